"""Packed images (`trainer pack`) for training: whole batches, gathered from mapped files, augmented and normalised at once, on
the device of the rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from trainer.errors import ConfigError
from trainer.train import pixels
from trainer.train.ahead import ahead
from trainer.train.augment import Augment, Moves, inside, shifted
from trainer.train.batches import CPU, Chosen, Sample, WholeBatches, mix
from trainer.train.shards import Index, Mapped, labels

_CACHED = 1 << 20  # bytes of images that a core works on at a time


def packed(
    path: str,
    crop: int = 0,
    flip: bool = False,
    erase: float = 0.0,
    mixup: float = 0.0,
    cutmix: float = 0.0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> tuple[Packed, Packed | None]:
    """A data target: the training and evaluation images that `trainer pack` wrote into a folder, the training ones augmented.

    Args:
        crop: pixels of zeros added on each side before a random crop of the image's own size.
        flip: mirror every second image.
        erase: probability that a random rectangle is set to the mean.
        mixup: alpha; images and labels are mixed with those of another sample, and labels become shares (B, classes).
        cutmix: alpha; a rectangle comes from another sample. With mixup, each every second time.
        mean: of each channel, with white as 1 (default: that of the training images).
        std: likewise.

    Raises:
        ConfigError: the folder holds no packed data, a shard has the wrong size, or an argument is out of range.
    """
    folder = Path(path).expanduser()
    try:
        index = Index.read(folder)
    except FileNotFoundError:
        raise ConfigError(f"data.args.path={path}: no packed data there; write it with: trainer pack DATASET {path}") from None
    if wrong := list(index.wrong_sizes(folder)):
        raise ConfigError("\n".join(f"data.args.path={path}: {line}" for line in wrong))
    augment = Augment(crop, flip, erase, mixup, cutmix)
    _check(augment, index, mean, std)
    levels = ([each * 255 for each in mean] if mean else index.mean, [each * 255 for each in std] if std else index.std)
    pixels.tell_if_slow()
    training = Packed(folder, index, "train", augment, *levels)
    return training, Packed(folder, index, "eval", Augment(), *levels) if "eval" in index.parts else None


def _check(augment: Augment, index: Index, mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
    if augment.crop < 0:
        raise ConfigError(f"data.args.crop={augment.crop}: is no number of pixels; give 0 or more")
    if not 0 <= augment.erase <= 1:
        raise ConfigError(f"data.args.erase={augment.erase}: is no probability; give 0 to 1")
    for name in ("mixup", "cutmix"):
        if getattr(augment, name) < 0:
            raise ConfigError(f"data.args.{name}={getattr(augment, name)}: is no alpha; give 0 (none) or more, such as 0.2")
    for name, values in {"mean": mean, "std": std}.items():
        if values is not None and len(values) != index.shape[0]:
            raise ConfigError(f"data.args.{name}={list(values)}: give a number for each of {index.shape[0]} channels")
    if std is not None and min(std) <= 0:
        raise ConfigError(f"data.args.std={list(std)}: divides; give numbers above 0")


class Packed(WholeBatches):
    """One part of packed data: map-style, (image (C, H, W) float32 normalised and not augmented, label); `batches` augments."""

    def __init__(
        self, folder: Path, index: Index, part: str, augment: Augment, mean: Sequence[float], std: Sequence[float]
    ) -> None:
        self._made_of = (folder, index, part, augment, mean, std)
        self.shape, self.classes, self.augment = tuple(index.shape), index.classes, augment
        self.images = Mapped(folder, index.parts[part], index.stride)
        self.labels = labels(folder, index.parts[part], index.stride)
        deviation = torch.tensor(std).view(-1, 1, 1).clamp(min=1e-3)
        self.scale, self.bias = 1 / deviation, -torch.tensor(mean).view(-1, 1, 1) / deviation

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, self._made_of  # another process maps the files for itself

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.pixels(index).float().mul_(self.scale).add_(self.bias), int(self.labels[index])

    def pixels(self, index: int) -> torch.Tensor:
        """One image as it was packed: (C, H, W) uint8."""
        return self.images.rows[index, : math.prod(self.shape)].clone().view(self.shape)

    def batches(self, chosen: Iterator[Chosen], seed: int, device: torch.device = CPU, block_size: int = 1) -> Iterator[Sample]:
        """Images (B, C, H, W) float32 on the device, and labels (B,) int64 or, where they are mixed, (B, classes) float32.

        On a GPU, a thread works two batches ahead of the step.
        """
        made = _Batches(self, seed, device, block_size)
        batches = (made.batch(epoch, indices) for epoch, indices in chosen)
        return ahead(batches, device) if device.type == "cuda" else batches


class _Batches:
    """Makes batches one after the other in buffers that it keeps, since fresh memory costs more than what is done in it."""

    def __init__(self, data: Packed, seed: int, device: torch.device, block_size: int) -> None:
        self.data, self.seed, self.device, self.augment = data, seed, device, data.augment
        self.block_size, self._begun = block_size, set[int]()  # blocks of samples, this epoch
        self.scale, self.bias = data.scale.to(device), data.bias.to(device)
        self._known: tuple[int, int] = (-1, 0)
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        self._arrays: list[Any] = []
        self._copied: list[torch.cuda.Event] = []
        self._turn = 0  # which pinned buffer was filled last

    def batch(self, epoch: int, indices: torch.Tensor) -> Sample:
        """The batch of sample indices (B,)."""
        if epoch != self._known[0]:
            self._known = epoch, mix(self.seed, epoch)
            self._begun.clear()
        if self.block_size > 1:
            self._read_ahead(indices)
        key, samples = self._known[1], indices.numpy()
        images, targets = self._images(key, indices), self.data.labels[indices].to(self.device, non_blocking=True)
        return self._mixed(key, samples, images, targets) if self.augment.mixes else (images, targets)

    def _read_ahead(self, indices: torch.Tensor) -> None:
        """Have each block read in one piece when its first sample is used."""
        for block in set((indices // self.block_size).tolist()) - self._begun:
            self._begun.add(block)
            self.data.images.read_ahead(block * self.block_size, self.block_size)

    def _images(self, key: int, indices: torch.Tensor) -> torch.Tensor:
        """Some samples at a time, so that they stay in a core's cache; on a GPU all at once."""
        augment, (_, height, width) = self.augment, self.data.shape
        images = self._floats((len(indices), *self.data.shape))
        moves = augment.moved(key, indices.numpy())
        some = len(indices) if self.device.type == "cuda" else max(1, _CACHED // self.data.images.rows.shape[1])
        for first in range(0, len(indices), some):
            part, chosen = images[first : first + some], indices[first : first + some]
            self._normalised(chosen, moves[:, first : first + some], part)
            if augment.erase:
                boxes = self._on_device(augment.erased(key, chosen.numpy(), height, width))
                part.masked_fill_(inside(boxes, height, width), 0)
        return images

    def _normalised(self, indices: torch.Tensor, moves: Moves, out: torch.Tensor) -> None:
        """Cropped, flipped and normalised images (B, C, H, W)."""
        if self.device.type == "cpu" and pixels.compiled():
            self.data.images.about_to_read(len(indices))
            pixels.images(self.data.images.rows, indices, moves, self.augment.crop, self.data.scale, self.data.bias, out)
        else:
            bytes_ = self._moved(indices, moves) if self.augment.moves else self._fetched(indices)
            out.copy_(bytes_).mul_(self.scale).add_(self.bias)

    def _mixed(self, key: int, samples: Any, images: torch.Tensor, targets: torch.Tensor) -> Sample:
        """Partners are any samples of the data, augmented as they are in this epoch, so that it does not matter who else is in a
        batch."""
        _, height, width = self.data.shape
        partners, share, boxes = self.augment.mixed(key, samples, len(self.data), height, width)
        others = self._images(key, torch.from_numpy(partners))
        shares = self._on_device(share).float()
        box = self._on_device(boxes)
        torch.lerp(others, images, shares.view(-1, 1, 1, 1), out=images)
        torch.where(inside(box, height, width), others, images, out=images)
        covered = ((box[1] - box[0]) * (box[3] - box[2])).float() / (height * width)
        mine = (shares * (1 - covered)).unsqueeze(1)
        other = self.data.labels[torch.from_numpy(partners)].to(self.device)
        both = [torch.nn.functional.one_hot(each, len(self.data.classes)) for each in (targets, other)]
        return images, both[0] * mine + both[1] * (1 - mine)

    def _moved(self, indices: torch.Tensor, moves: Moves) -> torch.Tensor:
        """Cropped and flipped: (B, C, H, W) uint8. Those to be flipped are fetched first, which makes them one slice, and the
        crop, a second gather, puts all into their places."""
        (channels, height, width), border = self.data.shape, self.augment.crop
        down, right, mirrored = moves
        order, flipped = numpy.argsort(-mirrored, kind="stable"), int(mirrored.sum())
        fetched = self._fetched(indices[torch.from_numpy(order)])
        tall, wide = height + 2 * border, width + 2 * border
        padded = self._buffer("padded", (len(indices), channels, tall, wide))
        core = padded[:, :, border : border + height, border : border + width]
        core[:flipped].copy_(fetched[:flipped].flip(-1))
        core[flipped:].copy_(fetched[flipped:])
        start = self._on_device(numpy.argsort(order) * (channels * tall * wide) + down * wide + right)
        return shifted(padded, start, height, width, self._buffer("moved", (len(indices), *self.data.shape)))

    def _fetched(self, indices: torch.Tensor) -> torch.Tensor:
        """Bytes (B, C, H, W) on the device; through pinned memory to a GPU."""
        count, size = len(indices), math.prod(self.data.shape)
        if self.device.type != "cuda":
            rows = self.data.images.gather(indices, self._buffer("rows", (count, self.data.images.rows.shape[1])))
        else:
            rows = self._through_pinned(indices)
        return rows[:, :size].view(count, *self.data.shape)

    def _through_pinned(self, indices: torch.Tensor) -> torch.Tensor:
        """Two buffers in turn: one is filled while the other is copied to the device."""
        if len(self._copied) == 2:
            self._copied.pop(0).synchronize()
        self._turn = 1 - self._turn
        shape = (len(indices), self.data.images.rows.shape[1])
        name = (f"pinned {self._turn}", shape[0])
        if name not in self._kept:
            self._kept[name] = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        rows = self.data.images.gather(indices, self._kept[name]).to(self.device, non_blocking=True)
        self._copied.append(torch.cuda.current_stream(self.device).record_event())
        return rows

    def _on_device(self, numbers: Any) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)

    def _buffer(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Zeros at first, then whatever was left in it; what is done with it on a GPU is done in one stream, so in turn."""
        if (kept := self._kept.get((name, shape[0]))) is None:
            kept = self._kept[name, shape[0]] = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        return kept

    def _floats(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor in memory that no tensor given out before still uses: each of them, and autograd, holds its array."""
        if self.device.type == "cuda":
            return torch.empty(shape, device=self.device)
        for array, references in zip(self._arrays, _references(self._arrays), strict=True):
            if array.shape == shape and references == _UNUSED:
                return torch.from_numpy(array)
        self._arrays = [array for array in self._arrays if array.shape == shape][-3:]
        self._arrays.append(numpy.empty(shape, dtype=numpy.float32))
        return torch.from_numpy(self._arrays[-1])


def _references(arrays: list[Any]) -> list[int]:
    return [sys.getrefcount(array) for array in arrays]


_UNUSED = _references([numpy.empty(0)])[0]  # of an array that only its list holds
