"""Augmentation of whole batches, on any device. What happens to a sample is a function of (seed, epoch, sample) alone: not of the
rank, the batch it is in, or its place there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy
import torch
from numpy.typing import NDArray

Floats = NDArray[numpy.float64]
Moves = NDArray[numpy.int64]  # of samples (B,): (3, B), see Augment.moved
_GAMMA = 0x9E3779B97F4A7C15
_USES = 16  # numbers that a sample may draw in an epoch


def uniform(key: int, samples: NDArray[numpy.int64], uses: range) -> Floats:
    """Numbers in [0, 1) by splitmix64 (Steele, Lea, Flood 2014; doi:10.1145/2660193.2660195), used as a hash.

    Args:
        key: of the seed and epoch.
        samples: (B,).
        uses: what the numbers are for, each below 16.

    Returns:
        Shape (len(uses), B).
    """
    counter = samples.astype(numpy.uint64) * numpy.uint64(_USES) + numpy.array(uses, dtype=numpy.uint64)[:, None]
    z = (counter + numpy.uint64(1)) * numpy.uint64(_GAMMA) + numpy.uint64(key)
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    z ^= z >> numpy.uint64(31)
    found: Floats = (z >> numpy.uint64(11)).astype(numpy.float64) * 2.0**-53
    return found


@dataclass(frozen=True)
class Augment:
    """What is done to training images."""

    crop: int = 0  # pixels of zeros added on each side before a crop of the image's own size
    flip: bool = False  # left and right, every second time
    erase: float = 0.0  # probability of a rectangle set to the mean (arXiv:1708.04896)
    mixup: float = 0.0  # alpha of the Beta distribution (arXiv:1710.09412); 0: none
    cutmix: float = 0.0  # likewise (arXiv:1905.04899); with both, each every second time

    @property
    def moves(self) -> bool:
        """Whether pixels change their place."""
        return bool(self.crop or self.flip)

    @property
    def mixes(self) -> bool:
        """Whether labels become shares of classes."""
        return bool(self.mixup or self.cutmix)

    def moved(self, key: int, samples: NDArray[numpy.int64]) -> Moves:
        """For samples (B,) (3, B): the corner of its crop in the image with its border, down and right, and whether it is flipped
        before."""
        if not self.moves:
            return numpy.zeros((3, len(samples)), dtype=numpy.int64)
        down, right, side = uniform(key, samples, range(3))
        ways = 2 * self.crop + 1
        return numpy.stack([down * ways, right * ways, (side < 0.5) & self.flip]).astype(numpy.int64)

    def erased(self, key: int, samples: NDArray[numpy.int64], height: int, width: int) -> NDArray[numpy.int64]:
        """Rectangles (4, B): top, bottom, left, right; empty where nothing is erased. Area 2-33 %, aspect 0.3-3.3, as in the
        paper."""
        chance, size, shape, down, right = uniform(key, samples, range(3, 8))
        area, aspect = (0.02 + 0.31 * size) * height * width, numpy.exp((2 * shape - 1) * math.log(1 / 0.3))
        tall = numpy.minimum(numpy.rint(numpy.sqrt(area * aspect)), height) * (chance < self.erase)
        wide = numpy.minimum(numpy.rint(numpy.sqrt(area / aspect)), width)
        top, left = numpy.floor(down * (height - tall + 1)), numpy.floor(right * (width - wide + 1))
        return numpy.stack([top, top + tall, left, left + wide]).astype(numpy.int64)

    def mixed(
        self, key: int, samples: NDArray[numpy.int64], total: int, height: int, width: int
    ) -> tuple[NDArray[numpy.int64], Floats, NDArray[numpy.int64]]:
        """What is mixed into samples (B,): partners (B,), any of `total`; shares (B,) of the samples themselves where all pixels
        are mixed, 1 elsewhere; rectangles (4, B) that come from the partner, empty where all pixels are mixed."""
        which, partner, how, side, down, right = uniform(key, samples, range(8, 14))
        cut = which < (0.5 if self.mixup and self.cutmix else float(self.cutmix > 0))
        share = numpy.where(cut, self._cut_share(how, side), self._mix_share(how, side))
        tall, wide = (length * numpy.sqrt(1 - share) * cut for length in (height, width))
        top, left = down * height - tall / 2, right * width - wide / 2
        edges = [(top, height), (top + tall, height), (left, width), (left + wide, width)]
        box = numpy.stack([numpy.clip(numpy.rint(edge), 0, most) for edge, most in edges]).astype(numpy.int64)
        return (partner * total).astype(numpy.int64), numpy.where(cut, 1.0, share), box

    def _mix_share(self, how: Floats, side: Floats) -> Floats:
        return self._mixup_beta(how, side) if self.mixup else how

    def _cut_share(self, how: Floats, side: Floats) -> Floats:
        return self._cutmix_beta(how, side) if self.cutmix else how

    @cached_property
    def _mixup_beta(self) -> Beta:
        return Beta(self.mixup)

    @cached_property
    def _cutmix_beta(self) -> Beta:
        return Beta(self.cutmix)


class Beta:
    """Beta(alpha, alpha) from uniform numbers, by the inverse of its distribution function on a table.

    With x = u ** (1 / alpha) the density below 1/2 is (1 - x) ** (alpha - 1), which is smooth; above 1/2 it is the mirror image.
    """

    def __init__(self, alpha: float, points: int = 4096) -> None:
        self.alpha, self._u = alpha, numpy.linspace(0, 0.5**alpha, points)
        density = (1 - self._u ** (1 / alpha)) ** (alpha - 1)
        steps = numpy.concatenate([[0], numpy.cumsum(density[1:] + density[:-1])])
        self._share = steps / steps[-1]

    def __call__(self, how: Floats, side: Floats) -> Floats:
        """Shares in [0, 1]: `how` decides how far from the nearer end, `side` from which."""
        low: Floats = numpy.interp(how, self._share, self._u) ** (1 / self.alpha)
        return numpy.where(side < 0.5, low, 1 - low)


def shifted(padded: torch.Tensor, start: torch.Tensor, height: int, width: int, out: torch.Tensor) -> torch.Tensor:
    """Crops of images, one for each: the windows (C, height, width) of `padded` (B, C, H, W) that start at its flat positions."""
    _, channels, tall, wide = padded.shape
    span = (channels - 1) * tall * wide + (height - 1) * wide + width
    windows = padded.as_strided((padded.numel() - span + 1, channels, height, width), (1, tall * wide, wide, 1))
    found: torch.Tensor = torch.index_select(windows, 0, start, out=out)
    return found


def inside(box: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Rectangles (4, B) as masks (B, 1, height, width)."""
    top, bottom, left, right = box[:, :, None, None, None]
    down, across = torch.arange(height, device=box.device)[:, None], torch.arange(width, device=box.device)
    mask: torch.Tensor = (down >= top) & (down < bottom) & (across >= left) & (across < right)
    return mask
