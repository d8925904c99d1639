"""Prints what torch here is, a fact a line, without the seconds and the memory that importing it takes."""

import runpy
from importlib.util import find_spec
from pathlib import Path

spec = find_spec("torch")
if spec is None or spec.origin is None:
    raise SystemExit("error: the base image has no torch; choose one that has")
facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
print(f"torch {facts['__version__']}")
print(f"cuda {facts['cuda'] or 'none'}")
