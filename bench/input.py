"""Images per CPU second of the input path, beside a plain copy of the same bytes, PIL's pipeline and PIL's decoder.

Images of 3 x 32 x 32 (or --side) in batches of 256, packed by `trainer pack`, their files in the page cache; the copies read the
same mapped files in order, the kit a random permutation. PIL's pipeline is torchvision's RandomCrop(side, padding=4),
RandomHorizontalFlip, ToTensor and Normalize on each image, stacked.
JPEGs are 500 x 375, quality 90: the kit's decoder against PIL, in full size, and scaled and cut to 224 x 224 as `--size 224` does
against PIL's decoder with torchvision's Resize(224) and CenterCrop(224).
The null tests are a yardstick against itself: a difference inside their range is not resolved.

    python -m bench.input [--json] [--rounds 30] [--images 131072] [--side 32]
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import numpy
import torch
from PIL import Image
from torchvision import transforms

from bench.interleave import Block, ratios
from trainer.train import pictures
from trainer.train.batches import CPU, GlobalOrder, TensorImages
from trainer.train.pack import pack
from trainer.train.packed import Packed, packed

BATCH = 256
PIL_IMAGES, JPEGS = 100, 12


def noise(images: int, side: int) -> tuple[TensorImages, None]:
    """What is packed."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 3, side, side), dtype=torch.uint8, generator=generator)
    return TensorImages(pixels, torch.arange(images) % 10, 128.0, 64.0), None


class Copies:
    """Plain copies of the mapped rows, one batch after the other in the files' order, into one buffer."""

    def __init__(self, data: Packed, batches: int, floats: bool) -> None:
        rows = data.images.rows[: len(data) // BATCH * BATCH]
        if floats:
            rows = rows[: len(rows) // 4 // BATCH * BATCH].float()
        self.blocks = rows.view(-1, BATCH, rows.shape[1])
        self.batches = batches
        self.out, self.at = torch.empty_like(self.blocks[0]), 0

    def __call__(self) -> None:
        for _ in range(self.batches):
            self.out.copy_(self.blocks[self.at])
            self.at = (self.at + 1) % len(self.blocks)


class Gathered:
    """The kit's bytes: what is left to a CPU whose GPU augments and normalises."""

    def __init__(self, data: Packed, batches: int) -> None:
        self.batches, self.data, self.out = batches, data, torch.empty(BATCH, data.images.rows.shape[1], dtype=torch.uint8)
        self.chosen = GlobalOrder(len(data), BATCH, 1, 0, 1, 0).micro_batches(0, 10**6)

    def __call__(self) -> None:
        for _, indices in islice(self.chosen, self.batches):
            self.data.images.gather(indices, self.out)


def floats(batches: Iterator[object], count: int) -> Block:
    """The kit's whole batches."""

    def block() -> None:
        for _ in islice(batches, count):
            pass

    return block


def by_pil(images: list[Image.Image]) -> Block:
    """What is usually written."""
    steps = [transforms.RandomCrop(images[0].size, padding=4), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.25,) * 3)])

    def block() -> None:
        torch.stack([transform(image) for image in images])

    return block


def jpegs(folder: Path) -> list[Path]:
    """Blurred noise with some grain: about as many bytes as a photograph."""
    random = numpy.random.default_rng(0)
    made = []
    for number in range(JPEGS):
        coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=numpy.uint8)).resize(
            (500, 375), Image.Resampling.BICUBIC
        )
        grain = random.normal(0, 8, (375, 500, 3))
        image = Image.fromarray((numpy.asarray(coarse) + grain).clip(0, 255).astype(numpy.uint8))
        made.append(folder / f"{number}.jpg")
        image.save(made[-1], quality=90)
    return made


def decoded_by_pil(files: list[Path], cut: bool) -> None:
    scaled = transforms.Compose([transforms.Resize(224), transforms.CenterCrop(224)])
    for file in files:
        image = Image.open(io.BytesIO(file.read_bytes())).convert("RGB")
        numpy.asarray(scaled(image) if cut else image)


def decoded_by_kit(files: list[Path], cut: bool) -> None:
    for file in files:
        pictures.decoded(file, (224, 224) if cut else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--images", type=int, default=1 << 17)
    parser.add_argument("--side", type=int, default=32, help="pixels")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack("bench.input:noise", folder / "packed", {"images": arguments.images, "side": arguments.side})
        told = {**compare_bytes(folder, arguments.rounds), **compare_jpegs(folder, arguments.rounds)}
    if arguments.json:
        print(json.dumps({key: round(value, 4) for key, value in told.items()}))


def compare_bytes(folder: Path, rounds: int) -> dict[str, float]:
    """Against copies of what the kit gives out: bytes, then floats."""
    plain, moved = packed(str(folder / "packed"))[0], packed(str(folder / "packed"), crop=4, flip=True)[0]
    order = partial(GlobalOrder(len(plain), BATCH, 1, 0, 1, 0).micro_batches, 0, 10**6)
    told: dict[str, float] = {}
    batches = max(2, 40 * 1024 // plain.shape[1] ** 2)  # of a block
    copy, gathered = Copies(plain, batches, floats=False), Gathered(plain, batches)
    copy(), gathered()
    found, seconds = ratios(copy, {"gather": gathered, "null": Copies(plain, batches, floats=False)}, rounds)
    count = batches * BATCH
    print(
        f"bytes: copy {count / seconds:,.0f} images/CPU-s; copy / gather {1 / found['gather'].median:.3f}; null {found['null']}"
    )
    told["gather_of_copy"] = 1 / found["gather"].median
    images = [Image.fromarray(plain.pixels(index).permute(1, 2, 0).numpy()) for index in range(PIL_IMAGES)]
    ways = {
        "normalised": floats(plain.batches(order(), 0, CPU), batches),
        "moved": floats(moved.batches(order(), 0, CPU), batches),
    }
    copy = Copies(plain, batches, floats=True)
    for block in (copy, *ways.values()):
        block()
    found, seconds = ratios(copy, {**ways, "PIL": by_pil(images), "null": Copies(plain, batches, floats=True)}, rounds)
    pil = found["PIL"].median * count / PIL_IMAGES
    told |= {"floats_of_copy": 1 / found["normalised"].median, "moved_of_copy": 1 / found["moved"].median}
    told["moved_over_pil"] = pil / found["moved"].median
    print(
        f"floats: copy {count / seconds:,.0f} images/CPU-s; copy / normalised {told['floats_of_copy']:.3f}; copy / cropped, "
        f"flipped and normalised {told['moved_of_copy']:.3f}, which is {told['moved_over_pil']:.1f} x PIL; null {found['null']}"
    )
    return told


def compare_jpegs(folder: Path, rounds: int) -> dict[str, float]:
    """Decoders."""
    files, told = jpegs(folder), {}
    for cut in (False, True):
        yardstick = partial(decoded_by_pil, files, cut)
        yardstick()
        found, seconds = ratios(yardstick, {"kit": partial(decoded_by_kit, files, cut), "null": yardstick}, rounds)
        told["size_224_over_pil" if cut else "decoded_over_pil"] = 1 / found["kit"].median
        print(
            f"JPEG {'scaled and cut' if cut else 'in full'}: PIL {JPEGS / seconds:,.0f} images/CPU-s; {pictures.DECODER} "
            f"{1 / found['kit'].median:.2f} x PIL; null {found['null']} ({files[0].stat().st_size >> 10} KiB a file)"
        )
    return told


if __name__ == "__main__":
    main()
