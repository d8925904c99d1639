"""Prints what the kit needs, a requirement a line, but for torch and torchvision: the base image brings its own."""

from pathlib import Path

import tomllib

project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text(encoding="utf-8"))["project"]
wanted = project["dependencies"] + project["optional-dependencies"]["train"]
print(*(line for line in wanted if not line.startswith("torch")), sep="\n")
