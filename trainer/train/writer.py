"""The writer: a process beside each rank that puts its part of a checkpoint on disk while the rank trains on. No torch.

It takes requests as JSON lines and answers each with one. Parts go into a folder aside; rank 0's writer waits for all of them,
writes the manifest, renames the folder and moves `latest`, so that a kill at any moment leaves the checkpoint before it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import select
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.process import die_with_parent
from trainer.train.stored import LATEST, MANIFEST, discard, name_of, part_name, staging_steps, steps

_BLOCK = 1 << 23
_LOOK_SECONDS = 0.05
Request = Mapping[str, Any]


class Inbox:
    """Requests from the rank; its end is this process's end."""

    def __init__(self, fd: int) -> None:
        self._fd, self._waiting = fd, b""

    def get(self, seconds: float | None) -> Request | None:
        """The next one; None if none comes in time."""
        while b"\n" not in self._waiting:
            if not select.select([self._fd], [], [], seconds)[0]:
                return None
            if not (block := os.read(self._fd, 1 << 16)):
                sys.exit(0)
            self._waiting += block
        line, _, self._waiting = self._waiting.partition(b"\n")
        request: Request = json.loads(line)
        return request


def main(parent: int, arena: int) -> None:
    """Serve requests until the rank ends.

    Args:
        parent: pid of the rank.
        arena: descriptor of the memory that both share.
    """
    die_with_parent(parent)
    inbox = Inbox(0)
    while True:
        request = inbox.get(None)
        if request and "step" in request:
            print(json.dumps(_serve(request, arena, inbox)), flush=True)


def _serve(request: Request, arena: int, inbox: Inbox) -> dict[str, Any]:
    started, staging = time.monotonic(), Path(request["staging"])
    rank = request["rank"]
    try:
        staging.mkdir(parents=True, exist_ok=True)
        _write_part(staging, rank, arena, request["size"])
        if rank == 0 and not _commit(staging, request, inbox):
            return {"step": request["step"], "abandoned": True, "error": "a part of it is missing"}
        return {"step": request["step"], "seconds": time.monotonic() - started}
    except Exception as error:
        about, gone = _free(staging.parent), rank != 0 and not staging.exists()  # rank 0 has given it up already
        with suppress(OSError):
            (staging / part_name(rank)).unlink(missing_ok=True)
            (staging / f"failed-{rank:05d}").touch()
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        number, told = (error.errno, error.strerror) if isinstance(error, OSError) else (None, None)
        cause = told or f"{type(error).__name__}: {error}"
        return {"step": request["step"], "errno": number or 0, "error": cause, "free": about, "abandoned": gone}


def _write_part(staging: Path, rank: int, arena: int, size: int) -> None:
    free = _free(staging)
    if free is not None and free < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    digest, path = hashlib.sha256(), staging / part_name(rank)
    with mmap.mmap(arena, size, prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        hashing = threading.Thread(target=digest.update, args=(view,))
        hashing.start()
        try:
            with open(path, "wb", buffering=0) as file:
                done = 0
                while done < size:
                    done += file.write(view[done : done + _BLOCK])
                os.fsync(file.fileno())
        finally:
            hashing.join()
    _write(path.with_suffix(".json"), {"bytes": size, "sha256": digest.hexdigest()})


def _commit(staging: Path, request: Request, inbox: Inbox) -> bool:
    """Make a checkpoint of the parts, once all are there; False if one never will be."""
    folder, step, ranks = staging.parent, request["step"], request["ranks"]
    while True:
        names = {entry.name for entry in os.scandir(staging)}  # opening a folder makes network storage look again
        if all(_entry_name(rank) in names for rank in range(ranks)):
            break
        told = inbox.get(_LOOK_SECONDS)
        if any(name.startswith("failed-") for name in names) or (told and told.get("abandon") == step):
            shutil.rmtree(staging, ignore_errors=True)
            return False
    entries = [staging / _entry_name(rank) for rank in range(ranks)]
    files = {part_name(rank): json.loads(entry.read_text(encoding="utf-8")) for rank, entry in enumerate(entries)}
    _write(staging / MANIFEST, {"step": step, "files": files})
    for entry in entries:
        entry.unlink()
    _sync_folder(staging)
    target = folder / name_of(step)
    discard(folder, step)  # one that is damaged
    staging.rename(target)
    with suppress(OSError):  # it is whole, whatever comes of the rest
        _sync_folder(folder)
        link = folder / f"{LATEST}.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
        link.replace(folder / LATEST)
    with suppress(OSError):
        _prune(folder, step, request["keep_last"])
    return True


def _prune(folder: Path, newest: int, keep_last: int) -> None:
    """Drop the oldest, what a run that went on from an older one has made obsolete, and what never became whole. The one just
    written stays."""
    found = steps(folder)
    kept = [step for step in found if step <= newest][-keep_last:]
    for step in set(found) - set(kept):
        discard(folder, step)
    for path, step in staging_steps(folder):
        if step < newest:
            shutil.rmtree(path, ignore_errors=True)


def _entry_name(rank: int) -> str:
    return str(Path(part_name(rank)).with_suffix(".json"))


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """A small file, all of it or none."""
    temporary = path.with_suffix(".writing")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free(folder: Path) -> int | None:
    with suppress(OSError):
        about = os.statvfs(next(place for place in (folder, *folder.parents) if place.exists()))
        return about.f_bavail * about.f_frsize
    return None
