"""Where `trainer pack` takes images from: a dataset target or a folder of images, each image as bytes (C, H, W)."""

from __future__ import annotations

import hashlib
import importlib
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from PIL import Image

from trainer import targets
from trainer.errors import ConfigError
from trainer.train.batches import TensorImages
from trainer.train.data import split

Bytes = NDArray[numpy.uint8]
Size = tuple[int, int]  # height, width
_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif"))


def _fast_decoder() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:  # the extra `pack`
        return None


_simplejpeg = _fast_decoder()
DECODER = "simplejpeg" if _simplejpeg else "PIL"


@dataclass(frozen=True)
class Folder:
    """Images in one folder for each class: (file, class number), in the order of their names."""

    root: Path
    files: list[tuple[str, int]]
    classes: list[str]

    @classmethod
    def of(cls, root: Path) -> Folder:
        """Raises:
        ConfigError: there are no class folders, or no images in one.
        """
        classes = sorted(each.name for each in root.iterdir() if each.is_dir())
        files = []
        for number, name in enumerate(classes):
            found = sorted(each for each in (root / name).rglob("*") if each.suffix.lower() in _SUFFIXES and each.is_file())
            if not found:
                raise ConfigError(f"pack {root}: {root / name} holds no images; remove it, or name the folder above the classes")
            files += [(str(each.relative_to(root)), number) for each in found]
        if not files:
            raise ConfigError(f"pack {root}: no class folders there; it must hold CLASS/*.jpg or train/CLASS/*.jpg")
        return cls(root, files, classes)

    def __len__(self) -> int:
        return len(self.files)

    @property
    def fingerprint(self) -> str:
        """Of the names, so that a pack of other files is not taken up."""
        return hashlib.sha256("\n".join(name for name, _ in self.files).encode()).hexdigest()

    def read(self, index: int, size: Size | None) -> tuple[Bytes, int]:
        """One image, RGB, and its class."""
        name, label = self.files[index]
        path = self.root / name
        try:
            return decoded(path, size), label
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise ConfigError(f"pack {path}: is no image that can be read ({error}); repair or remove it") from None


@dataclass(frozen=True)
class Samples:
    """A map-style dataset of (image, label)."""

    name: str
    dataset: Any

    @property
    def classes(self) -> list[str]:
        """Their names, or none where the dataset does not tell them: then numbers, from the labels."""
        known = getattr(self.dataset, "classes", [])
        return [str(each) for each in known] if isinstance(known, list | tuple) else []

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fingerprint(self) -> str:
        """Of the first image and the last."""
        ends = b"".join(self.read(index, None)[0].tobytes() for index in (0, len(self) - 1))
        return hashlib.sha256(ends).hexdigest()

    def read(self, index: int, size: Size | None) -> tuple[Bytes, int]:
        """One image and its label."""
        if isinstance(self.dataset, TensorImages):  # as bytes, not as it hands them out
            image, label = self.dataset.images[index], self.dataset.labels[index]
        else:
            image, label = self._pair(index)
        try:
            return _fitted(image, size), int(label)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"pack {self.name}: sample {index}: {error}") from None

    def _pair(self, index: int) -> tuple[Any, Any]:
        sample = self.dataset[index]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise ConfigError(f"pack {self.name}: sample {index} is a {type(sample).__name__}; pack takes pairs (image, label)")
        return sample[0], sample[1]


Source = Folder | Samples


def sources(dataset: str, args: dict[str, Any]) -> dict[str, Source]:
    """The parts of a data set by name: train, and eval if there is one.

    Args:
        dataset: a folder of CLASS/*.jpg, or of train/CLASS/*.jpg with val or eval or test beside it; or `package.module:callable`
            that returns a dataset or (training, evaluation or None), or has a parameter `train` as torchvision's have.

    Raises:
        ConfigError: it is none of these, or empty.
    """
    root = Path(dataset).expanduser()
    if root.is_dir():
        if args:
            raise ConfigError(f"pack {dataset} {' '.join(args)}: a folder takes no arguments; remove them")
        parts: dict[str, Source] = {name: Folder.of(path) for name, path in _folders(root).items()}
    elif ":" in dataset and "/" not in dataset:
        parts = _samples(dataset, args)
    else:
        raise ConfigError(f"pack {dataset}: no such folder; name one, or a target such as torchvision.datasets:CIFAR10")
    if len({tuple(part.classes) for part in parts.values()}) > 1:
        raise ConfigError(f"pack {dataset}: training and evaluation have different classes; give both the same")
    for name, part in parts.items():
        if not len(part):
            raise ConfigError(f"pack {dataset}: the {name} part is empty; give at least one image")
    return parts


def _folders(root: Path) -> dict[str, Path]:
    if not (root / "train").is_dir():
        return {"train": root}
    found = [root / name for name in ("val", "eval", "test") if (root / name).is_dir()]
    return {"train": root / "train", **({"eval": found[0]} if found else {})}


def _samples(target: str, args: dict[str, Any]) -> dict[str, Source]:
    parameters = inspect.signature(targets.resolve("pack", target)).parameters
    if "train" in parameters and "train" not in args:
        found: Any = tuple(targets.call("pack", target, {**args, "train": train}) for train in (True, False))
    else:
        found = targets.call("pack", target, args)
    pair = split(target, found if isinstance(found, tuple) else (found, None))
    return {name: Samples(target, each) for name, each in zip(("train", "eval"), pair, strict=True) if each is not None}


def decoded(path: Path, size: Size | None) -> Bytes:
    """A file's image, RGB: (C, H, W)."""
    content = path.read_bytes()
    if _simplejpeg and content[:2] == b"\xff\xd8":
        try:
            height, width, *_ = _simplejpeg.decode_jpeg_header(content)
            half = _halvings((height, width), size)
            rough = size is not None  # colours are scaled fast where the image is scaled anyway; else equal to PIL's to the bit
            return _fitted(_simplejpeg.decode_jpeg(content, "RGB", False, rough, height >> half, width >> half, 1), size)
        except ValueError:  # four colours, say: PIL reads more
            pass
    with Image.open(path) as image:
        half = _halvings((image.height, image.width), size)
        image.draft("RGB", (image.width >> half, image.height >> half))  # JPEGs only
        return _fitted(image.convert("RGB"), size)


def _halvings(found: Size, size: Size | None) -> int:
    """How often a JPEG's decoder may halve an image that is to be scaled to `size`; other factors are slower than the whole."""
    return (
        min((max(0, (have // want).bit_length() - 1) for have, want in zip(found, size, strict=True)), default=0) if size else 0
    )


def _fitted(image: Any, size: Size | None) -> Bytes:
    """An image as bytes (C, H, W), scaled to cover `size` and cut at the centre to it.

    Args:
        image: PIL's, a tensor (C, H, W) or an array (H, W[, C]), of bytes.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(image, torch.Tensor):
        image = image.permute(1, 2, 0).numpy() if image.ndim == 3 else image.numpy()
    if isinstance(image, Image.Image):
        image = numpy.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB"))
    if not isinstance(image, numpy.ndarray) or image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)):
        raise TypeError(f"is a {_what(image)}, no image; give PIL images, tensors (C, H, W) or arrays (H, W, C) of bytes")
    if image.dtype != numpy.uint8:
        raise TypeError(f"is a {_what(image)}; pack takes bytes: leave ToTensor and Normalize out of the dataset's transform")
    pixels = numpy.atleast_3d(image).transpose(2, 0, 1)
    return numpy.ascontiguousarray(_covering(pixels, size) if size and pixels.shape[1:] != size else pixels)


def _what(image: Any) -> str:
    shape = tuple(getattr(image, "shape", ()))
    return f"{type(image).__name__}{f' of {image.dtype} {shape}' if shape else ''}"


def _covering(pixels: Bytes, size: Size) -> Bytes:
    """The largest part at the centre that has the proportions of `size`, scaled to it."""
    tall, wide = pixels.shape[1:]
    factor = min(tall / size[0], wide / size[1])
    height, width = max(1, round(size[0] * factor)), max(1, round(size[1] * factor))
    top, left = (tall - height) // 2, (wide - width) // 2
    part = pixels[:, top : top + height, left : left + width]
    part = part if part.flags.writeable else part.copy(order="K")  # torch warns of others
    whole = torch.from_numpy(part).unsqueeze(0)
    scaled = torch.nn.functional.interpolate(whole, size, mode="bilinear", antialias=True)  # of bytes: faster than PIL
    found: Bytes = scaled[0].numpy()
    return found
