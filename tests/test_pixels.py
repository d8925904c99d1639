"""The C library for packed images: the same bits as numpy and torch make, for any shape; used only where it is of this source."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from trainer.train import pixels
from trainer.train.augment import Augment
from trainer.train.batches import CPU, TensorImages
from trainer.train.pack import pack
from trainer.train.packed import packed

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # newer Pythons warn of forks
needs_library = pytest.mark.skipif(not pixels.compiled(), reason="installed without a C compiler")


def colours(shape: tuple[int, int, int]) -> tuple[TensorImages, None]:
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    images = torch.randint(0, 256, (200, *shape), dtype=torch.uint8, generator=generator)
    return TensorImages(images, torch.arange(200) % 5, 0.0, 1.0), None


def by_hand(image: torch.Tensor, border: int, down: int, right: int, mirrored: bool) -> torch.Tensor:
    _, tall, wide = image.shape
    image = torch.nn.functional.pad(image.flip(-1) if mirrored else image, (border,) * 4)
    return image[:, down : down + tall, right : right + wide]


def test_the_tests_have_the_library_where_there_is_a_compiler() -> None:
    assert pixels.compiled() or not shutil.which("cc")


@needs_library
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_images_are_those_made_by_hand(data: st.DataObject) -> None:
    """Equal to the bit, whatever the shape, the padding of rows and the border, with nothing written beside them."""
    channels, tall, wide = (data.draw(st.integers(1, most)) for most in (4, 9, 70))
    border, count, total = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 5)), 6
    random = numpy.random.default_rng(data.draw(st.integers(0, 2**32)))
    size = channels * tall * wide
    rows = torch.from_numpy(random.integers(0, 256, (total, size + data.draw(st.integers(0, 15))), dtype=numpy.uint8))
    chosen = torch.from_numpy(random.integers(0, total, count))
    moves = numpy.stack([*random.integers(0, 2 * border + 1, (2, count)), random.integers(0, 2, count)])
    scale, bias = (torch.from_numpy(random.normal(size=(channels, 1, 1)).astype(numpy.float32)) for _ in range(2))
    out = torch.full((count + 2, channels, tall, wide), torch.nan)
    pixels.images(rows, chosen, moves, border, scale, bias, out[1:-1])
    for place, (index, *move) in enumerate(zip(chosen.tolist(), *moves.tolist(), strict=True)):
        image = by_hand(rows[index, :size].view(channels, tall, wide), border, *move)
        assert torch.equal(out[1 + place], image.float().mul_(scale).add_(bias))
    assert out[[0, -1]].isnan().all()


@pytest.mark.parametrize("library", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("width", [1, 16, 63, 64, 784, 3072, 20000])
def test_rows_are_copied(width: int, library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not library:
        monkeypatch.setattr(pixels, "_library", None)
    rows, chosen = torch.randint(0, 256, (50, width), dtype=torch.uint8), torch.randint(0, 50, (40,))
    out = torch.zeros(42, width, dtype=torch.uint8)
    pixels.gather(rows, chosen[::2], out[1:21])
    assert torch.equal(out[1:21], rows[chosen[::2]]) and not out[0].any() and not out[21:].any()
    assert pixels.gather(rows, chosen[:0], out[:0]).shape == (0, width)
    for wrong in (50, -1, 2**40):
        chosen[7] = wrong
        with pytest.raises(IndexError, match=f"sample {wrong}: there are 50"):
            pixels.gather(rows, chosen, out[:40])


@needs_library
def test_a_number_that_is_no_sample_makes_no_image() -> None:
    rows, out, one = torch.zeros(3, 16, dtype=torch.uint8), torch.full((2, 1, 4, 4), 7.0), torch.ones(1, 1, 1)
    with pytest.raises(IndexError, match="sample 3: there are 3"):
        pixels.images(rows, torch.tensor([0, 3]), numpy.zeros((3, 2), dtype=numpy.int64), 0, one, one, out)
    assert (out == 7).all()


@needs_library
@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 8, 8), (3, 9, 21)])
@pytest.mark.parametrize(
    "how", [Augment(), Augment(crop=2, flip=True, erase=0.5), Augment(flip=True, mixup=0.3), Augment(crop=40)]
)
def test_batches_are_the_same_without_the_library(
    how: Augment, shape: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack("tests.test_pixels:colours", tmp_path / "packed", {"shape": shape})
    data, _ = packed(str(tmp_path / "packed"), how.crop, how.flip, how.erase, how.mixup)

    def batches() -> list[torch.Tensor]:
        return [
            each for batch in data.batches(iter([(0, torch.arange(100)), (1, torch.arange(7, 107))]), 3, CPU) for each in batch
        ]

    with_library = batches()
    monkeypatch.setattr(pixels, "_library", None)
    assert all(torch.equal(*pair) for pair in zip(with_library, batches(), strict=True))


def test_the_log_of_a_run_says_that_there_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trainer")
    pack("tests.test_pixels:colours", tmp_path / "packed", {"shape": (1, 8, 8)})
    said = []
    for library in (object(), None):
        monkeypatch.setattr(pixels, "_library", library)
        packed(str(tmp_path / "packed"))
        said.append("no libpixels.so" in caplog.text)
    assert said == [False, True]


@needs_library
def test_a_library_of_another_source_or_machine_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pixels._loaded() is not None
    for name, content in (("gone.so", None), ("wrong.so", b"\x7fELF of another machine")):
        if content:
            (tmp_path / name).write_bytes(content)
        monkeypatch.setattr(pixels, "LIBRARY", tmp_path / name)
        assert pixels._loaded() is None
    monkeypatch.undo()
    monkeypatch.setattr(pixels, "SOURCE", tmp_path / "pixels.c")
    (tmp_path / "pixels.c").write_text("/* newer */")
    assert pixels._loaded() is None


@pytest.mark.parametrize("compiler", ["cc", "false", "no-such-compiler -x"])
def test_an_installation_needs_no_compiler(compiler: str, tmp_path: Path) -> None:
    """A real installation of a copy: with a compiler it brings the library, else it works without and says so."""
    if compiler == "cc" and not shutil.which("cc"):
        pytest.skip("no C compiler")
    copy, site = tmp_path / "it's a copy", tmp_path / "site"
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\n")
    for name in filter(None, files):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    arguments = ["install", str(copy), "--target", str(site), "--no-deps", "--no-build-isolation", "--verbose"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], env={"PATH": "/usr/bin:/bin", "CC": compiler}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "trainer/train/libpixels.so").exists() == (compiler == "cc")
    assert ("packed images will be slower" in done.stdout + done.stderr) == (compiler != "cc")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from trainer.train import pixels; print(pixels.__file__, pixels.compiled())"
    )
    used = subprocess.run([sys.executable, "-P", "-c", code, str(site)], cwd=tmp_path, capture_output=True, text=True)
    assert used.stdout.split() == [str(site / "trainer/train/pixels.py"), str(compiler == "cc")], used.stderr
