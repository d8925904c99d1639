"""What lies in a checkpoint folder, told without loading it: names, manifests, what is whole and what is damaged. No torch.

checkpoints/step-00000200/part-00003.safetensors   what rank 3 wrote: its share of the tensors, and its own state
checkpoints/step-00000200/manifest.json            step, and size and sha256 of each part
checkpoints/step-00000200.MARK.tmp                 one that is being written, or never became whole
checkpoints/step-00000200.damaged                  one that was found to be, for whoever wants to look
checkpoints/latest -> step-00000200                for people; a resume looks for the newest whole one itself
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MANIFEST, LATEST = "manifest.json", "latest"
DAMAGED, UNFINISHED = "damaged", "unfinished"


class Row(NamedTuple):
    """One line of a listing."""

    step: int
    how: str  # whole, damaged (and what is wrong), unfinished, or why that cannot be told
    size: int  # bytes
    saved: float  # seconds since 1970


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def part_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"part-{rank:05d}.safetensors"


def part_files(checkpoint: Path) -> list[Path]:
    """All parts that belong to a whole checkpoint, by rank.

    Raises:
        OSError: it cannot be read.
    """
    names = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    return sorted(checkpoint / name for name in names if name.startswith("part-"))


def staging_name(step: int, mark: str) -> str:
    """The name of a checkpoint that is not whole yet; `mark` keeps apart those of different starts."""
    return f"{name_of(step)}.{mark}.tmp"


def staging_steps(folder: Path) -> Iterator[tuple[Path, int]]:
    """Folder and step of all that are not whole yet, or never became so."""
    for path in folder.glob("step-*.tmp"):
        if match := re.fullmatch(r"step-(\d{8,})\..*", path.name):
            yield path, int(match[1])


def remove(path: Path) -> None:
    """Delete a folder or file, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def discard(folder: Path, step: int) -> None:
    """Delete a checkpoint: first its name, so that a kill leaves none that is only half there."""
    aside = folder / staging_name(step, "old")
    remove(aside)
    with suppress(FileNotFoundError):
        (folder / name_of(step)).rename(aside)
    remove(aside)


def newest_of(folder: Path, warn: Callable[[str], None], step: int | None = None) -> int | None:
    """The step of the newest whole checkpoint (or of one that is asked for), or None. What is damaged is told, and set aside.

    Raises:
        OSError: one cannot be read now.
    """
    found = steps(folder)
    for number in reversed(found):
        if step not in (None, number):
            continue
        if (wrong := problem(folder / name_of(number))) is None:
            if step is None and number != found[-1]:
                warn(f"using the checkpoint of step {number}; {found[-1] - number} steps are lost")
            return number
        warn(f"checkpoint of step {number} is damaged: {wrong}")
        aside = (folder / name_of(number)).with_suffix(f".{DAMAGED}")
        remove(aside)
        (folder / name_of(number)).rename(aside)
    return None


def steps(folder: Path) -> list[int]:
    """Steps of all checkpoints in a folder, whole or not, oldest first."""
    found = ((path, re.fullmatch(r"step-(\d{8,})", path.name)) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for path, match in found if match and path.is_dir())


def problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every file is there with its size and sha256.

    Raises:
        OSError: it cannot be read now, which says nothing about it.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest["files"].items():
            path = checkpoint / name
            if file_size(path) != entry["bytes"]:
                return f"{path} has {file_size(path)} bytes instead of {entry['bytes']}"
            if _sha256(path) != entry["sha256"]:
                return f"{path} has another sha256 than when it was written"
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{checkpoint}: {type(error).__name__}: {error}"
    return None


def rows(folder: Path) -> Iterator[Row]:
    """All that is in a folder, the newest step first: checkpoints, and what is damaged or unfinished.

    Raises:
        OSError: the folder cannot be read now.
    """
    found = [(step, folder / name_of(step), "") for step in steps(folder)]
    found += [(step, path, UNFINISHED) for path, step in staging_steps(folder)]
    for path in folder.glob("step-*.damaged"):
        if match := re.fullmatch(r"step-(\d{8,})\.damaged", path.name):
            found.append((int(match[1]), path, DAMAGED))
    for step, path, how in sorted(found, reverse=True):
        with suppress(FileNotFoundError):  # a run that goes on has renamed or dropped it meanwhile
            size = sum(file_size(file) for file in path.iterdir())
            yield Row(step, how or _told(path), size, path.stat().st_mtime)


def _told(checkpoint: Path) -> str:
    try:
        wrong = problem(checkpoint)
        return f"{DAMAGED}: {wrong}" if wrong else "whole"
    except OSError as error:
        return f"cannot be read: {error}"


def file_size(path: Path) -> int:
    """Bytes of a file."""
    return path.stat().st_size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
