"""What `trainer lint` looks at, in small: a manifest's fields with their paths, and a container with its command line."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

_OF_TRAINER = {"image": "image", "command": "command", "args": "args", "resources": "resourcesPerNode"}
_SHELL = re.compile(r"(sh|bash|dash|ash|zsh|ksh)")
_TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
_WITHOUT_VALUE = {"standalone", "m", "module", "no-python", "run-path", "virtual-local-rank"}  # torchrun's flags
_SHOWN = 60  # characters of a value that a line shows


@dataclass(frozen=True)
class Field:
    """A value in a manifest and where it stands; `value` is None where nothing stands."""

    where: str  # FILE: KIND/NAME
    path: str
    value: Any

    def __getitem__(self, key: str) -> Field:
        step = key if re.fullmatch(r"[\w-]+", key) else f"[{key}]"
        dot = "." if self.path and step == key else ""
        return Field(self.where, f"{self.path}{dot}{step}", self.value.get(key) if isinstance(self.value, dict) else None)

    def at(self, path: str) -> Field:
        """The field at a dotted path below this one."""
        found = self
        for key in path.split("."):
            found = found[key]
        return found

    def each(self) -> list[Field]:
        """The entries of a list, or of a mapping; none of anything else."""
        if isinstance(self.value, dict):
            return [self[str(key)] for key in self.value]
        entries = self.value if isinstance(self.value, list) else []
        return [Field(self.where, f"{self.path}[{i}]", entry) for i, entry in enumerate(entries)]

    @property
    def key(self) -> str:
        """The last name of the path."""
        found = re.search(r"\[([^]]*)\]$|([^.\[\]]+)$", self.path)
        return (found[1] or found[2]) if found else ""

    @property
    def text(self) -> str:
        """A scalar as text, else nothing."""
        return "" if self.value is None or isinstance(self.value, dict | list) else str(self.value)

    @property
    def number(self) -> int | None:
        """A whole number, also one in quotes."""
        return int(self.text) if self.text.isascii() and self.text.isdecimal() else None

    def line(self, wrong: str, fix: str) -> str:
        """`FILE: KIND/NAME: field: what is wrong (value); fix: what to do`."""
        shown = self.text if isinstance(self.value, str) else json.dumps(self.value, default=str)
        shown = shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
        shown = "missing" if self.value is None else shown
        told = f" ({shown})" if shown and not isinstance(self.value, dict | list) else ""
        return " ".join(f"{self.where}: {self.path}: {wrong}{told}; fix: {fix}".split())


@dataclass(frozen=True)
class Container:
    """A container as the controller makes it: what a TrainJob's `trainer` says replaces what the runtime says."""

    own: Field
    trains: bool
    trainer: Field | None = None

    def __getitem__(self, key: str) -> Field:
        if self.trainer is not None and key in _OF_TRAINER:
            replaced = self.trainer[_OF_TRAINER[key]]
            if replaced.value is not None:
                return replaced
        return self.own[key]

    @cached_property
    def env(self) -> list[Field]:
        """The entries of env."""
        return self.own["env"].each() + (self.trainer["env"].each() if self.trainer is not None else [])

    @cached_property
    def words(self) -> list[tuple[str, Field]]:
        """The command line, a shell's script taken apart, each word with the entry it stands in."""
        entries = self["command"].each() + self["args"].each()
        words = [(entry.text, entry) for entry in entries]
        script = self.script
        if script is None:
            return words
        place = entries.index(script)
        try:
            inside = shlex.split(script.text, comments=True)
        except ValueError:
            inside = script.text.split()
        return words[:place] + [(word, script) for word in inside] + words[place + 1 :]

    @cached_property
    def script(self) -> Field | None:
        """What a shell as the pod's first process is given to run, or None: no shell."""
        entries = self["command"].each() + self["args"].each()
        if not entries or not _SHELL.fullmatch(PurePosixPath(entries[0].text).name):
            return None
        for flag, script in pairwise(entries[1:]):
            if re.fullmatch(r"-[a-z]*c", flag.text):
                return script
        return None

    @cached_property
    def launcher(self) -> str:
        """`trainer` (the kit's node), `torchrun`, `python` (one process), or nothing: not to be told from here."""
        names = [PurePosixPath(word).name for word, _ in self.words]
        if any(pair == ("trainer", "node") for pair in pairwise(names)):
            return "trainer"
        if set(_TORCHRUN) & set(names):
            return "torchrun"
        program = [name for name in names if not (_SHELL.fullmatch(name) or name.startswith("-") or name == "exec")] or [""]
        if re.fullmatch(r"python[\d.]*", program[0]) and not {"accelerate", "deepspeed"} & set(names):
            return "python"
        return ""

    @cached_property
    def flags(self) -> dict[str, Field]:
        """torchrun's own flags, written with dashes; the value's place is the word's."""
        words = self.words
        names = [PurePosixPath(word).name for word, _ in words]
        starts = [i + 1 for i, n in enumerate(names) if n in _TORCHRUN]
        found: dict[str, Field] = {}
        i = starts[0] if starts else len(words)
        while i < len(words) and words[i][0].startswith("-"):
            (word, place), i = words[i], i + 1
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("_", "-")
            if not equals and name not in _WITHOUT_VALUE and i < len(words):
                (value, place), i = words[i], i + 1
            found[name] = Field(place.where, place.path, value)
        return found

    @property
    def gpus(self) -> int:
        """GPUs of its limits (or requests); slices of a GPU count too."""
        return self._gpus("limits") or self._gpus("requests")

    def _gpus(self, which: str) -> int:
        return sum(entry.number or 0 for entry in gpu_entries(self["resources"][which]))


def gpu_entries(resources: Field) -> list[Field]:
    """The entries of limits or requests that are GPUs: `nvidia.com/gpu`, `amd.com/gpu`, `nvidia.com/mig-1g.5gb`."""
    keys = resources.value if isinstance(resources.value, dict) else {}
    return [resources[key] for key in map(str, keys) if re.match(r"[\w.-]+/(gpu|mig-)", key)]
