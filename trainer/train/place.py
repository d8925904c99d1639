"""Where checkpoints lie: a folder that all nodes see, or a URL (see `remote`), with one interface. No torch."""

from __future__ import annotations

import importlib
import json
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from trainer.train.files import free_bytes, refuse_damaged, sync_folder, wait_idly, write_json, write_part
from trainer.train.stored import (
    LATEST,
    MANIFEST,
    Row,
    discard,
    name_of,
    newest_of,
    part_name,
    remove,
    rows,
    staging_name,
    staging_steps,
    steps,
)

_LOOK_SECONDS = 0.05
ID = "id"


class Place(Protocol):
    """What a rank and its writer do where checkpoints lie. All may raise OSError: the storage does not answer now.

    `step` counts optimizer steps, `mark` is what the parts of one save have in common, and no other's have.
    """

    def newest(self, warn: Callable[[str], None], step: int | None = None) -> int | None:
        """Step of the newest whole checkpoint, or of one that is asked for. What is damaged is told, and set aside."""

    def exists(self, step: int) -> bool:
        """Whether there is a checkpoint of that step, whole or damaged."""

    def fetch(self, step: int) -> Path:
        """A folder that this node can read with the files of a checkpoint."""

    def forget(self) -> None:
        """Delete what `fetch` and `newest` have copied."""

    def rows(self) -> Iterator[Row]:
        """All that is there, the newest step first: whole, damaged, unfinished."""

    def identity(self) -> str:
        """What tells this place from one that had its name before; made on first use."""

    def clean(self) -> None:
        """Delete what never became whole. Only for a start, when nothing is being written."""

    def put(self, step: int, mark: str, rank: int, view: memoryview, sha256: str | None = None) -> None:
        """Write a rank's part; DamagedError if it has another sha256 than what is given."""

    def commit(self, step: int, mark: str, ranks: int, keep_last: int, given_up: Callable[[], bool]) -> bool:
        """Wait for all parts and make a checkpoint of them, then drop the oldest; False if a part will never come."""

    def fail(self, step: int, mark: str, rank: int) -> bool:
        """Say that a part will not come; returns whether the save had been given up already."""

    def drop(self, step: int, mark: str) -> None:
        """Delete what there is of a save that will not become whole."""

    def free(self) -> int | None:
        """Bytes free, if that can be told."""


def place_of(where: str | Path, scratch: Path) -> Place:
    """The place that a path or a URL names.

    Args:
        scratch: a folder of this node's, for copies of what lies at a URL; made when needed.

    Raises:
        ConfigError: what a URL of this kind needs is not installed.
    """
    if isinstance(where, str) and "://" in where:
        made: Place = importlib.import_module("trainer.train.remote").Bucket(where, scratch)
        return made
    return Folder(Path(where))


class Folder:
    """A folder on storage that all nodes see: a checkpoint is whole when it has its final name."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def newest(self, warn: Callable[[str], None], step: int | None = None) -> int | None:
        """See `Place`."""
        return newest_of(self.path, warn, step)

    def exists(self, step: int) -> bool:
        """See `Place`."""
        return (self.path / name_of(step)).exists()

    def fetch(self, step: int) -> Path:
        """See `Place`; it is read where it lies."""
        return self.path / name_of(step)

    def forget(self) -> None:
        """See `Place`; there are no copies."""

    def rows(self) -> Iterator[Row]:
        """See `Place`."""
        return rows(self.path)

    def identity(self) -> str:
        """See `Place`."""
        with suppress(FileNotFoundError, ValueError, KeyError):
            return str(json.loads((self.path / ID).read_text(encoding="utf-8"))["id"])
        made = uuid.uuid4().hex[:12]
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / ID, {"id": made})
        return made

    def clean(self) -> None:
        """See `Place`."""
        for path, _ in staging_steps(self.path):
            remove(path)

    def put(self, step: int, mark: str, rank: int, view: memoryview, sha256: str | None = None) -> None:
        """See `Place`."""
        staging = self._staging(step, mark)
        staging.mkdir(parents=True, exist_ok=True)
        made = write_part(staging / part_name(rank), view)
        refuse_damaged(made, sha256)
        write_json(staging / _entry_name(rank), made)

    def commit(self, step: int, mark: str, ranks: int, keep_last: int, given_up: Callable[[], bool]) -> bool:
        """See `Place`."""
        staging = self._staging(step, mark)
        while True:
            names = {path.name for path in staging.iterdir()}  # opening a folder makes network storage look again
            if all(_entry_name(rank) in names for rank in range(ranks)):
                break
            if any(name.startswith("failed-") for name in names) or given_up():
                self.drop(step, mark)
                return False
            wait_idly(_LOOK_SECONDS)
        entries = [staging / _entry_name(rank) for rank in range(ranks)]
        files = {part_name(rank): json.loads(entry.read_text(encoding="utf-8")) for rank, entry in enumerate(entries)}
        write_json(staging / MANIFEST, {"step": step, "files": files})
        for entry in entries:
            entry.unlink()
        sync_folder(staging)
        discard(self.path, step)  # one that is damaged
        staging.rename(self.path / name_of(step))
        with suppress(OSError):  # it is whole, whatever comes of the rest
            self._point_to(step)
        with suppress(OSError):
            self._prune(step, keep_last)
        return True

    def fail(self, step: int, mark: str, rank: int) -> bool:
        """See `Place`."""
        staging = self._staging(step, mark)
        gone = not staging.exists()
        with suppress(OSError):
            (staging / part_name(rank)).unlink(missing_ok=True)
            (staging / f"failed-{rank:05d}").touch()
        return gone

    def drop(self, step: int, mark: str) -> None:
        """See `Place`."""
        shutil.rmtree(self._staging(step, mark), ignore_errors=True)

    def free(self) -> int | None:
        """See `Place`."""
        return free_bytes(self.path)

    def _staging(self, step: int, mark: str) -> Path:
        return self.path / staging_name(step, mark)

    def _point_to(self, step: int) -> None:
        sync_folder(self.path)
        link = self.path / f"{LATEST}.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(name_of(step))
        link.replace(self.path / LATEST)

    def _prune(self, newest: int, keep_last: int) -> None:
        """Drop the oldest, what a run that went on from an older one has made obsolete, and what never became whole. The one
        just written stays."""
        for step in obsolete(steps(self.path), newest, keep_last):
            discard(self.path, step)
        for path, step in staging_steps(self.path):
            if step < newest:
                shutil.rmtree(path, ignore_errors=True)


def obsolete(found: list[int], newest: int, keep_last: int) -> set[int]:
    """Steps of the checkpoints that are to go once that of `newest` has been written."""
    return set(found) - set(sorted(step for step in found if step <= newest)[-keep_last:])


def _entry_name(rank: int) -> str:
    return str(Path(part_name(rank)).with_suffix(".json"))
