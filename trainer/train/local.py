"""Parts on a node's own disk: written first, so that training goes on, and copied to where the checkpoints lie. No torch.

LOCAL_FOLDER/ddp-job-kit-PLACE-ID/step-00000200.part-00003.safetensors   rank 3's part of a save
LOCAL_FOLDER/ddp-job-kit-PLACE-ID/step-00000200.part-00003.json          which save it is of, its size and sha256: it is complete

PLACE is a hash of where the checkpoints lie, ID stands in a file there: parts of a run that was deleted are never taken for
parts of the one that has its name now.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.train.files import sync_folder, write_json, write_part
from trainer.train.stored import name_of, part_name

Entry = Mapping[str, Any]  # step, mark, rank, ranks, bytes, sha256


def local_place(folder: str, place: str, identity: str) -> Path:
    """Where on a node's disk the parts of a run lie.

    Args:
        folder: checkpoint.local_folder.
        place: folder or URL of the checkpoints.
        identity: what stands in the file `id` there.
    """
    return Path(folder).expanduser() / f"ddp-job-kit-{hashlib.sha256(place.encode()).hexdigest()[:12]}-{identity}"


class Local:
    """The parts on this node's disk. Each rank's writer touches its own only; `wipe` is for a start, before there are writers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, step: int, mark: str, rank: int, ranks: int, view: memoryview) -> Entry:
        """Write a rank's part, and keep the one before it: two saves at most.

        Args:
            mark: what parts of one save have in common.

        Raises:
            OSError: it cannot be written; nothing of it is left.
        """
        self._own_folder()
        mine = {entry["step"] for entry in self.held() if entry["rank"] == rank}
        for old in mine - {max((other for other in mine if other < step), default=step)} | {step}:
            self._remove(old, rank)
        path = self._path(step, rank)
        try:
            entry = {"step": step, "mark": mark, "rank": rank, "ranks": ranks, **write_part(path, view)}
            write_json(path.with_suffix(".json"), entry)
            sync_folder(self.folder)
        except OSError:
            self._remove(step, rank)
            raise
        return entry

    def held(self) -> list[Entry]:
        """All parts that are complete, of whatever rank and save."""
        found = []
        for path in sorted(self.folder.glob("step-*.part-*.json")):
            with suppress(OSError, ValueError, TypeError, KeyError):
                entry = json.loads(path.read_text(encoding="utf-8"))
                if self.file(entry).stat().st_size == entry["bytes"] and {"mark", "ranks", "sha256"} <= entry.keys():
                    found.append(entry)
        return found

    def file(self, entry: Entry) -> Path:
        """The part of an entry."""
        return self._path(entry["step"], entry["rank"])

    def drop(self, rank: int) -> None:
        """Delete all of a rank's parts; the folder too, if nothing is left in it."""
        for step in {entry["step"] for entry in self.held() if entry["rank"] == rank}:
            self._remove(step, rank)
        with suppress(OSError):
            self.folder.rmdir()

    def wipe(self) -> None:
        """Delete all parts, and those of runs that had the same place and are gone."""
        for path in self.folder.parent.glob(f"{self.folder.name.rpartition('-')[0]}-*"):
            shutil.rmtree(path, ignore_errors=True)

    def _own_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.folder.is_symlink() or self.folder.stat().st_uid != os.getuid():  # /tmp is everybody's
            raise OSError(errno.EPERM, "belongs to another user", str(self.folder))

    def _path(self, step: int, rank: int) -> Path:
        return self.folder / f"{name_of(step)}.{part_name(rank)}"

    def _remove(self, step: int, rank: int) -> None:
        path = self._path(step, rank)
        for each in (path.with_suffix(".json"), path, path.with_suffix(".writing")):  # an entry never without its part
            with suppress(OSError):
                each.unlink(missing_ok=True)


def complete_saves(held: Sequence[Sequence[Entry]], newer_than: int) -> list[list[tuple[int, Entry]]]:
    """Saves of which all parts are on some node's disk, the newest first.

    Args:
        held: what each rank has told of its node.
        newer_than: the step of the newest whole checkpoint, -1 if there is none.

    Returns:
        For each save its parts by their rank: who told of it, and its entry.
    """
    saves: dict[tuple[int, str], dict[int, tuple[int, Entry]]] = {}
    for teller, entries in enumerate(held):
        for entry in entries:
            if entry["step"] > newer_than:
                saves.setdefault((entry["step"], entry["mark"]), {}).setdefault(entry["rank"], (teller, entry))
    found = []
    for _, parts in sorted(saves.items(), key=lambda item: item[0], reverse=True):
        ranks = next(iter(parts.values()))[1]["ranks"]
        if sorted(parts) == list(range(ranks)):
            found.append([parts[rank] for rank in range(ranks)])
    return found
