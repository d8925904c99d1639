"""What lies in a checkpoint folder, told without loading it: names, manifests, what is whole and what is damaged. No torch.

checkpoints/step-00000200/state.pt        tensors and plain types only: loads with weights_only=True
checkpoints/step-00000200/manifest.json   step, and size and sha256 of each file
checkpoints/latest -> step-00000200       for people; a resume looks for the newest whole one itself
"""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from trainer.errors import ConfigError

STATE, MANIFEST, LATEST = "state.pt", "manifest.json", "latest"


def name_of(step: int) -> str:
    """The name of a step's checkpoint."""
    return f"step-{step:08d}"


def steps(folder: Path) -> list[int]:
    """Steps of all checkpoints in a folder, whole or not, oldest first."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-????????") if path.is_dir())


def problem(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every file is there with its size and sha256."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest["files"].items():
            path = checkpoint / name
            if file_size(path) != entry["bytes"]:
                return f"{path} has {file_size(path)} bytes instead of {entry['bytes']}"
            if _sha256(path) != entry["sha256"]:
                return f"{path} has another sha256 than when it was written"
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{checkpoint}: {type(error).__name__}: {error}"
    return None


def newest_whole(folder: Path, step: int | None = None) -> Path:
    """The newest whole checkpoint, or that of a step.

    Raises:
        ConfigError: there is none.
    """
    for number in reversed(steps(folder)):
        if step in (None, number) and problem(folder / name_of(number)) is None:
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
        lines.append(f"{step:10d}  {saved}  {size / 1e6:10.1f}  {problem(checkpoint) or 'whole'}")
    return "\n".join(lines)


def file_size(path: Path) -> int:
    """Bytes of a file."""
    return path.stat().st_size


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
