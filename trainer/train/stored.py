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
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from trainer.errors import ConfigError

MANIFEST, LATEST = "manifest.json", "latest"


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
        aside = (folder / name_of(number)).with_suffix(".damaged")
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


def newest_whole(folder: Path, step: int | None = None) -> Path:
    """The newest whole checkpoint, or that of a step.

    Raises:
        ConfigError: there is none.
    """
    for number in reversed(steps(folder)):
        if step in (None, number) and _told(folder / name_of(number)) == "whole":
            return folder / name_of(number)
    which = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
    raise ConfigError(f"{folder}: {which} there; see trainer checkpoints")


def listing(folder: Path) -> str:
    """All checkpoints as a table: step, age, size, and whether whole."""
    found = steps(folder)
    if not found:
        raise ConfigError(f"{folder}: no checkpoint there yet; checkpoint.every_steps says how often one is written")
    lines = [f"{'step':>10}  {'saved':19}  {'MB':>10}  "]
    for step in found:
        checkpoint = folder / name_of(step)
        size = sum(file_size(path) for path in checkpoint.iterdir())
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.stat().st_mtime))
        lines.append(f"{step:10d}  {saved}  {size / 1e6:10.1f}  {_told(checkpoint)}")
    return "\n".join(lines)


def _told(checkpoint: Path) -> str:
    try:
        return problem(checkpoint) or "whole"
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
