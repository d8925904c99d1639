"""A packed data set on disk: a folder with index.json and shards, flat files of images as bytes with their labels behind them.

A shard holds n samples: n rows of `stride` bytes, each an image (C, H, W) uint8 and padding, then n little-endian int64 labels.
The rows of every shard but a part's last one fill whole pages, so that all of them can be mapped one behind the other.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch

from trainer.errors import ConfigError
from trainer.process import memory_limit, own_cgroups
from trainer.train import pixels

FORMAT, INDEX = 1, "index.json"
SHARD_BYTES = 64 << 20
_PAGE = 65536  # the largest that is common
_HUGE_PAGE = 2 << 20  # where Linux keeps a file in such pages, rows from anywhere are found at once
_ROW = 16  # bytes that a row is a multiple of: else the samples of odd shapes would fill whole pages only in huge shards
_LABEL = 8
_RESIDENT = 1 << 30  # bytes that may be gathered before their pages are let go of


@dataclass(frozen=True)
class Shard:
    """One file, and what its images add up to."""

    file: str
    samples: int
    sha256: str
    sums: list[int]  # of each channel's bytes
    squares: list[int]  # of each channel's squared bytes


@dataclass(frozen=True)
class Index:
    """What index.json says."""

    plan: dict[str, object]  # what was packed and how: a pack of something else is not mixed in
    shape: list[int]  # of an image: C, H, W
    classes: list[str]
    mean: list[float]  # of the training images' channels, in bytes (0-255)
    std: list[float]
    parts: dict[str, list[Shard]]  # train, and eval if there is one

    @classmethod
    def read(cls, folder: Path) -> Index:
        """The index of a folder.

        Raises:
            FileNotFoundError: there is none.
            ConfigError: it is not to be read.
        """
        path = folder / INDEX
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields.pop("format") != FORMAT:
                raise ConfigError(f"{path}: was written by another version of the kit; pack the data again")
            fields["parts"] = {name: [Shard(**shard) for shard in shards] for name, shards in fields["parts"].items()}
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{path}: is no index of packed data ({error}); remove its folder and pack the data again"
            ) from None

    def write(self, folder: Path) -> None:
        """Put it in place whole."""
        temporary = folder / f".{INDEX}.partial"
        temporary.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1), encoding="utf-8")
        synced(temporary).rename(folder / INDEX)

    @property
    def stride(self) -> int:
        """Bytes of a row."""
        return stride(self.shape)

    def wrong_sizes(self, folder: Path) -> Iterator[str]:
        """A line for each shard that is missing or has another length than it should have."""
        for shard in (each for shards in self.parts.values() for each in shards):
            path, want = folder / shard.file, shard.samples * (self.stride + _LABEL)
            if not path.is_file():
                yield f"{path}: missing; {REMEDY}"
            elif path.stat().st_size != want:
                yield f"{path}: has {path.stat().st_size} bytes instead of {want}; {REMEDY}"


REMEDY = "run the same trainer pack again, which makes only damaged shards anew"


def stride(shape: Sequence[int]) -> int:
    """Bytes of a row for images of a shape."""
    return -(-math.prod(shape) // _ROW) * _ROW


def samples_per_shard(shape: Sequence[int], shard_bytes: int = SHARD_BYTES) -> int:
    """As many as fill whole pages, huge ones if that can be, and come near to `shard_bytes`."""
    fitting = shard_bytes // stride(shape)
    units = [page // math.gcd(page, stride(shape)) for page in (_HUGE_PAGE, _PAGE)]
    unit = next((unit for unit in units if unit <= fitting), units[-1])
    return max(1, fitting // unit) * unit


def synced(path: Path) -> Path:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return path


def sha256(path: Path) -> str:
    """A file's checksum."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class Mapped:
    """The rows of a part's shards as one array (N, stride) uint8, read from disk when they are used.

    What has been read may stay in the system's page cache, but is let go of by this process now and then: its memory does not
    grow with the data.
    """

    def __init__(self, folder: Path, shards: Sequence[Shard], width: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self.bytes, self._gathered = sum(shard.samples for shard in shards) * width, 0
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        room = self.bytes + _HUGE_PAGE
        free, at = self._map(None, room, mmap.PROT_READ, anonymous, -1), 0
        weakref.finalize(self, self._libc.munmap, ctypes.c_void_p(free), ctypes.c_size_t(room))
        self._base = -(-free // _HUGE_PAGE) * _HUGE_PAGE
        for shard in shards:
            descriptor = os.open(folder / shard.file, os.O_RDONLY)
            size = shard.samples * width
            self._map(self._base + at, size, mmap.PROT_READ, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
            os.close(descriptor)
            at += size
        if self.bytes > _memory() / 2:
            self._advise(mmap.MADV_RANDOM)  # what is read ahead would be dropped before it is used
        whole = numpy.ctypeslib.as_array((ctypes.c_uint8 * self.bytes).from_address(self._base))
        self.rows = torch.from_numpy(whole.reshape(-1, width))

    def gather(self, indices: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Copy the rows `indices` (B,) into `out` (B, stride)."""
        self.about_to_read(indices.numel())
        return pixels.gather(self.rows, indices, out)

    def about_to_read(self, count: int) -> None:
        """Let go of what was read before, where that has become much."""
        if self._gathered > _RESIDENT < self.bytes:
            self._gathered = 0
            self._advise(mmap.MADV_DONTNEED)
        self._gathered += count * self.rows.shape[1]

    def read_ahead(self, first: int, count: int) -> None:
        """Begin to read rows into the page cache, in one piece."""
        width = self.rows.shape[1]
        start, end = first * width // mmap.PAGESIZE * mmap.PAGESIZE, min((first + count) * width, self.bytes)
        self._libc.madvise(ctypes.c_void_p(self._base + start), ctypes.c_size_t(end - start), mmap.MADV_WILLNEED)

    def _map(self, address: int | None, size: int, protection: int, flags: int, descriptor: int) -> int:
        where, length = ctypes.c_void_p(address), ctypes.c_size_t(size)
        found = self._libc.mmap(where, length, protection, flags, descriptor, ctypes.c_long(0))
        if found in (None, _FAILED):
            raise OSError(ctypes.get_errno(), f"mapping {size} bytes: {os.strerror(ctypes.get_errno())}")
        return int(found)

    def _advise(self, advice: int) -> None:
        self._libc.madvise(ctypes.c_void_p(self._base), ctypes.c_size_t(self.bytes), advice)


def _memory() -> int:
    """Bytes of memory that this process may use."""
    limits = [limit for group in own_cgroups("memory") if (limit := memory_limit(group))]
    return min([os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), *limits])


_MAP_FIXED = 0x10  # mmap(2); Python's mmap module does not name it
_FAILED = ctypes.c_void_p(-1).value


def labels(folder: Path, shards: Sequence[Shard], width: int) -> torch.Tensor:
    """The labels of a part: (N,) int64."""
    read = [numpy.fromfile(folder / each.file, dtype="<i8", offset=each.samples * width) for each in shards]
    return torch.from_numpy(numpy.concatenate(read).astype(numpy.int64))
