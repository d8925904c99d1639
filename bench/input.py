"""Images per CPU second of the input path, beside a plain copy of the same bytes, PIL's pipeline and PIL's decoder.

Images of 3 x 32 x 32 and 3 x 224 x 224 in batches of 256, packed by `trainer pack`, their files in the page cache. Copies read
the same mapped files in order, the kit a random permutation. PIL's pipeline is torchvision's RandomCrop(side, padding=4),
RandomHorizontalFlip, ToTensor and Normalize on each image, stacked.
JPEGs are 500 x 375, quality 90: the kit's decoder against PIL, in full size, and scaled and cut to 224 x 224 as `--size 224` does
against PIL's decoder with torchvision's Resize(224) and CenterCrop(224); all make bytes (C, H, W).
The null tests are a yardstick against itself: a difference inside their range is not resolved.

    python -m bench.input [--json] [--rounds 30] [--sides 32 224] [--megabytes 400]
"""

from __future__ import annotations

import argparse
import io
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

from bench.interleave import Block, Ratio, as_json, ratios
from trainer.train import pictures, pixels
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
        numpy.ascontiguousarray(numpy.asarray(scaled(image) if cut else image).transpose(2, 0, 1))


def decoded_by_kit(files: list[Path], cut: bool) -> None:
    for file in files:
        pictures.decoded(file, (224, 224) if cut else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--sides", type=int, nargs="+", default=[32, 224], help="pixels")
    parser.add_argument("--megabytes", type=int, default=400, help="of each set of images")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    told: dict[str, Ratio] = {}
    with tempfile.TemporaryDirectory() as root:
        for side in arguments.sides:
            folder = Path(root) / str(side)
            images = max(4 * BATCH, arguments.megabytes * 10**6 // (3 * side**2) // BATCH * BATCH)
            pack("bench.input:noise", folder, {"images": images, "side": side})
            batches = max(2, 40 * 1024 // side**2)  # of a block
            found = {**compare_bytes(folder, batches, arguments.rounds), **compare_floats(folder, batches, arguments.rounds)}
            told |= {f"{name} {side}": ratio for name, ratio in found.items()}
        told |= compare_jpegs(Path(root), arguments.rounds)
    print("\n".join(f"{name}: {ratio}" for name, ratio in told.items()))
    if arguments.json:
        print(as_json(told))


def compare_bytes(folder: Path, batches: int, rounds: int) -> dict[str, Ratio]:
    """The gathering of bytes and a copy of as many."""
    data, _ = packed(str(folder))
    copy, null, gathered = Copies(data, batches, floats=False), Copies(data, batches, floats=False), Gathered(data, batches)
    copy(), null(), gathered()
    found, seconds = ratios(copy, {"gather": gathered, "null": null}, rounds)
    print(f"{data.shape}: {batches * BATCH / seconds:,.0f} images/CPU-s are copied as bytes")
    return {"gather_of_copy": found["gather"].inverse(), "null of bytes": found["null"]}


def compare_floats(folder: Path, batches: int, rounds: int) -> dict[str, Ratio]:
    """Whole batches of floats, a copy of as many, and PIL's pipeline."""
    plain, moved = packed(str(folder))[0], packed(str(folder), crop=4, flip=True)[0]
    order = partial(GlobalOrder(len(plain), BATCH, 1, 0, 1, 0).micro_batches, 0, 10**6)
    ways = {
        "normalised": floats(plain.batches(order(), 0, CPU), batches),
        "moved": floats(moved.batches(order(), 0, CPU), batches),
    }
    copy, null = Copies(plain, batches, floats=True), Copies(plain, batches, floats=True)
    for block in (copy, null, *ways.values()):
        block()
    found, seconds = ratios(copy, {**ways, "null": null}, rounds)
    pil = by_pil([Image.fromarray(plain.pixels(index).permute(1, 2, 0).numpy()) for index in range(PIL_IMAGES)])
    beside, slow = ratios(pil, {"moved": ways["moved"], "null": pil}, rounds)
    count = batches * BATCH
    print(f"{plain.shape}: {count / seconds:,.0f} images/CPU-s are copied as floats, {PIL_IMAGES / slow:,.0f} made by PIL")
    told = {f"{name}_of_copy": found[name].inverse() for name in ways} | {"null of floats": found["null"]}
    return told | {"moved_over_pil": beside["moved"].inverse(count / PIL_IMAGES), "null of PIL": beside["null"]}


def compare_jpegs(folder: Path, rounds: int) -> dict[str, Ratio]:
    """Decoders."""
    files, told = jpegs(folder), {}
    for cut, name in ((False, "decoded"), (True, "size_224")):
        yardstick = partial(decoded_by_pil, files, cut)
        yardstick()
        found, seconds = ratios(yardstick, {"kit": partial(decoded_by_kit, files, cut), "null": yardstick}, rounds)
        print(f"JPEGs of {files[0].stat().st_size >> 10} KiB, {name}: PIL {JPEGS / seconds:,.0f} images/CPU-s")
        told |= {f"{name}_over_pil": found["kit"].inverse(), f"null of {name}": found["null"]}
    print(f"decoder: {pictures.DECODER}; floats and gathering: {'C' if pixels.compiled() else 'torch and numpy'}")
    return told


if __name__ == "__main__":
    main()
