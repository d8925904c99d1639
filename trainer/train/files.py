"""Files written so that they outlive a crash: parts with their sha256, small files all or nothing, synced folders. No torch."""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import select
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_BLOCK = 1 << 23


class DamagedError(OSError):
    """A file holds other bytes than those that were written."""


def write_hashed(file: IO[bytes], view: memoryview) -> dict[str, Any]:
    """Write all of `view` and hash it meanwhile; returns its `bytes` and `sha256`."""
    digest = hashlib.sha256()
    hashing = threading.Thread(target=digest.update, args=(view,))
    hashing.start()
    try:
        done = 0
        while done < len(view):
            done += file.write(view[done : done + _BLOCK])
    finally:
        hashing.join()
    return {"bytes": len(view), "sha256": digest.hexdigest()}


def write_part(path: Path, view: memoryview) -> dict[str, Any]:
    """Write and sync a part; returns its `bytes` and `sha256`.

    Raises:
        OSError: it cannot be written; with ENOSPC before anything is, where there is no room.
    """
    free = free_bytes(path.parent)
    if free is not None and free < len(view):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with open(path, "wb", buffering=0) as file:
        made = write_hashed(file, view)
        os.fsync(file.fileno())
    return made


def refuse_damaged(made: Mapping[str, Any], expected: str | None) -> None:
    """Compare what was copied with the sha256 that it had when it was first written.

    Raises:
        DamagedError: they differ.
    """
    if expected not in (None, made["sha256"]):
        raise DamagedError(errno.EIO, "the copy on the node's own disk has another sha256 than when it was written")


def wait_idly(seconds: float) -> None:
    """Wait as one who has nothing to do; see `writer`."""
    select.select([], [], [], seconds)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A small file, all of it or none, synced."""
    temporary = path.with_suffix(".writing")
    with open(temporary, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def mapped(descriptor: int, size: int) -> Iterator[memoryview]:
    """A file's first `size` bytes, as memory."""
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as memory, memoryview(memory) as view:
        yield view


@contextmanager
def mapped_file(path: Path) -> Iterator[memoryview]:
    """A whole file, as memory."""
    with open(path, "rb") as file, mapped(file.fileno(), path.stat().st_size) as view:
        yield view


def free_bytes(folder: Path) -> int | None:
    """Bytes free on the disk of a folder, which need not be there yet; None if that cannot be told."""
    with suppress(OSError):
        about = os.statvfs(next(place for place in (folder, *folder.parents) if place.exists()))
        return about.f_bavail * about.f_frsize
    return None
