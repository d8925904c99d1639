"""The data sets that come with the kit. A data target gives `(training, evaluation or None)`, both map-style datasets:
`len()` and `[index] -> (image, label)`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

from trainer.errors import ConfigError
from trainer.train.batches import Sample, TensorImages
from trainer.train.download import once_per_node
from trainer.train.packed import packed

__all__ = ["cifar10", "digits", "fake_images", "fashion_mnist", "image_folder", "packed", "split"]

Pair = tuple["Dataset[Any]", "Dataset[Any] | None"]


def split(target: str, found: Any) -> Pair:
    """Check what a data target returned.

    Raises:
        ConfigError: it is not a pair of map-style datasets.
    """
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ConfigError(f"data.target={target}: must return (training, evaluation or None); got {type(found).__name__}")
    for name, dataset in zip(("training", "evaluation"), found, strict=True):
        if dataset is None and name == "evaluation":
            continue
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(
                f"data.target={target}: the {name} dataset {type(dataset).__name__} has no len() or no [index]; give a map-style "
                "dataset, since ranks with uneven numbers of batches hang"
            )
    return found[0], found[1]


def digits() -> Pair:
    """1,797 real handwritten digits, (1, 8, 8) in 10 classes, carried in the package (see digits.md). Every fifth is for
    evaluation: 1,437 to train on and 360 to evaluate."""
    with numpy.load(Path(__file__).with_name("digits.npz")) as arrays:
        images = torch.from_numpy(arrays["images"]).unsqueeze(1)
        labels = torch.from_numpy(arrays["labels"]).long()
    held_out = torch.arange(len(labels)) % 5 == 0
    mean, std = 4.88, 6.02  # of the training part, in the file's units (0-16)
    training = TensorImages(images[~held_out], labels[~held_out], mean, std)
    return training, TensorImages(images[held_out], labels[held_out], mean, std)


class _FakeImages(Dataset[Sample]):
    """Noise with labels; made on the fly, so that any number of samples costs no memory."""

    def __init__(self, samples: int, shape: Sequence[int], classes: int) -> None:
        self.samples, self.shape, self.classes = samples, tuple(shape), classes

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        return torch.randn(self.shape, generator=generator), index % self.classes


def fake_images(samples: int = 1280, shape: Sequence[int] = (3, 224, 224), classes: int = 1000) -> Pair:
    """Random images for load tests: the same on every machine, nothing to learn."""
    return _FakeImages(samples, shape, classes), _FakeImages(max(1, samples // 10), shape, classes)


def _torchvision(name: str) -> Any:
    try:
        return importlib.import_module(f"torchvision.{name}")
    except ImportError as error:
        raise ConfigError(f"data.target: needs torchvision ({error}); pip install torchvision") from None


def _small_images(name: str, root: str, download: bool, mean: Sequence[float], std: Sequence[float], crop: int) -> Pair:
    transforms, kind = _torchvision("transforms"), getattr(_torchvision("datasets"), name)
    plain = [transforms.ToTensor(), transforms.Normalize(mean, std)]
    augmented = transforms.Compose([transforms.RandomCrop(crop, padding=4), transforms.RandomHorizontalFlip(), *plain])

    def is_there() -> bool:
        try:
            return bool(kind(root, train=True, download=False) and kind(root, train=False, download=False))
        except RuntimeError:  # torchvision's word for "not found or corrupted"
            return False

    def fetch(folder: Path) -> None:
        kind(folder, train=True, download=True)
        kind(folder, train=False, download=True)

    if download:
        once_per_node(Path(root), name, is_there, fetch)
    try:
        return kind(root, train=True, transform=augmented), kind(root, train=False, transform=transforms.Compose(plain))
    except RuntimeError as error:
        raise ConfigError(f"data.args.root={root}: {' '.join(str(error).split())}; set data.args.download=true") from None


def cifar10(root: str, download: bool = True) -> Pair:
    """CIFAR-10 through torchvision, (3, 32, 32) in 10 classes, with random crops and flips for training."""
    return _small_images("CIFAR10", root, download, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), crop=32)


def fashion_mnist(root: str, download: bool = True) -> Pair:
    """Fashion-MNIST through torchvision, (1, 28, 28) in 10 classes, with random crops and flips for training."""
    return _small_images("FashionMNIST", root, download, (0.2860,), (0.3530,), crop=28)


def image_folder(root: str, image_size: int = 224) -> Pair:
    """ImageNet's layout: root/train/CLASS/*.jpg and root/val/CLASS/*.jpg, with the usual crops and flips for training."""
    transforms, folder = _torchvision("transforms"), _torchvision("datasets").ImageFolder
    plain = [transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    crop = [transforms.Resize(image_size * 256 // 224), transforms.CenterCrop(image_size)]
    augment = [transforms.RandomResizedCrop(image_size), transforms.RandomHorizontalFlip()]
    try:
        training = folder(Path(root) / "train", transforms.Compose([*augment, *plain]))
        return training, folder(Path(root) / "val", transforms.Compose([*crop, *plain]))
    except FileNotFoundError as error:
        raise ConfigError(f"data.args.root={root}: {error}; it must hold train/CLASS/*.jpg and val/CLASS/*.jpg") from None
