"""Packed images on a CPU: rows of bytes copied, or made into normalised floats, by a small C library (pixels.c) that an
installation with a C compiler makes; without it numpy copies and torch makes the floats, to the same bits and more slowly.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray

logger = logging.getLogger(__name__)

SOURCE, LIBRARY = Path(__file__).with_suffix(".c"), Path(__file__).with_name("libpixels.so")


def _loaded() -> ctypes.CDLL | None:
    """The library, unless there is none, or none of this source and for this kind of machine."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        library.source.restype = ctypes.c_char_p
        made_of = library.source()
    except (OSError, AttributeError):
        return None
    if made_of != hashlib.sha256(SOURCE.read_bytes()).hexdigest().encode():
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.gather.argtypes = [pointer, pointer, number, number, pointer, number]
    library.images.argtypes = [*library.gather.argtypes, pointer, number, number, number, number, pointer, pointer]
    library.gather.restype = library.images.restype = number
    return library


_library = _loaded()


def compiled() -> bool:
    """Whether the library is there."""
    return _library is not None


def tell_if_slow() -> None:
    """Say in the run's log that the library is not there, and what brings it."""
    if not compiled():
        logger.info(
            "packed images: made by numpy and torch, more slowly: no %s of this version; install the kit beside a C compiler",
            LIBRARY.name,
        )


def gather(rows: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copy the rows `chosen` (B,) int64 of `rows` (N, width) uint8 into `out` (B, width).

    Raises:
        IndexError: one is no row.
    """
    chosen = chosen.contiguous()
    if _library is None:
        if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(rows):
            raise _no_row(rows, chosen, int(((chosen < 0) | (chosen >= len(rows))).nonzero()[0]))
        numpy.take(rows.numpy(), chosen.numpy(), axis=0, out=out.numpy(), mode="clip")  # faster than torch's
    elif (wrong := _library.gather(*_places(rows, chosen, out))) >= 0:
        raise _no_row(rows, chosen, wrong)
    return out


def images(
    rows: torch.Tensor,
    chosen: torch.Tensor,
    moves: NDArray[numpy.int64],
    border: int,
    scale: torch.Tensor,
    bias: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Make `out` (B, C, H, W) float32 of the rows `chosen` (B,) int64 of `rows` (N, width) uint8; only where `compiled`.

    Args:
        moves: (3, B): the corner, down and right, at which an image is cut out of itself in a border of zeros, and whether it
            is mirrored before.
        border: pixels on each side.
        scale: float32 (C, 1, 1); pixels are multiplied by it.
        bias: float32 (C, 1, 1), added then.

    Raises:
        IndexError: one is no row.
    """
    assert _library is not None
    chosen, moves = chosen.contiguous(), numpy.ascontiguousarray(moves)
    places, levels = _places(rows, chosen, out), (scale.data_ptr(), bias.data_ptr())
    if (wrong := _library.images(*places, moves.ctypes.data, border, *out.shape[1:], *levels)) >= 0:
        raise _no_row(rows, chosen, wrong)
    return out


def _places(rows: torch.Tensor, chosen: torch.Tensor, out: torch.Tensor) -> tuple[int, ...]:
    assert chosen.dtype == torch.int64 and rows.is_contiguous() and out.is_contiguous()
    total, width = rows.shape
    count = chosen.numel()  # quicker than len
    assert out.shape[0] == count
    return out.data_ptr(), rows.data_ptr(), total, width, chosen.data_ptr(), count


def _no_row(rows: torch.Tensor, chosen: torch.Tensor, place: int) -> IndexError:
    return IndexError(f"sample {int(chosen[place])}: there are {len(rows)}")
