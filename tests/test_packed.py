"""Packed images: what is read is what was packed, augmentation hangs on (seed, epoch, sample) alone, and damage has a name."""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import pickle
import re
import sys
import threading
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from tests.conftest import DIGITS, wait_until
from tests.jobs import TRAINER, command, equal, finish, logs, losses, overrides, processes_of, saved, start
from trainer.cli import main
from trainer.errors import ConfigError
from trainer.train import pictures
from trainer.train.ahead import ahead
from trainer.train.augment import Augment, Beta, inside, uniform
from trainer.train.batches import GlobalOrder, Loading, TensorImages, batches, mix
from trainer.train.data import digits, packed
from trainer.train.pack import pack, verify
from trainer.train.packed import Packed
from trainer.train.shards import Index, Mapped

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # newer Pythons warn of forks
NUMBERS = "trainer.train.data:digits"
SHARD = 65536  # bytes: the digits make two


def colours(images: int = 3000, shape: tuple[int, int, int] = (3, 9, 7)) -> tuple[TensorImages, None]:
    """A target: odd shapes, whose rows are padded."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (images, *shape), dtype=torch.uint8, generator=generator)
    return TensorImages(pixels, torch.arange(images) % 7, 0.0, 1.0), None


COLOURS = "tests.test_packed:colours"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits and the colours, packed in several shards."""
    folder = tmp_path_factory.mktemp("packed") / "it's packed"
    pack(NUMBERS, folder / "digits", processes=2, shard_bytes=SHARD)
    pack(COLOURS, folder / "colours", processes=2, shard_bytes=SHARD)
    return folder


def whole(data: Packed, epoch: int, size: int, order: torch.Tensor | None = None, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """All images and labels in the order of the samples, loaded in batches of a size in a given order."""
    order = torch.arange(len(data)) if order is None else order
    found = list(batches(data, ((epoch, part) for part in torch.split(order, size)), seed, Loading(num_workers=2)))
    back = torch.argsort(order)
    return torch.cat([images for images, _ in found])[back], torch.cat([labels for _, labels in found])[back]


def test_what_is_read_is_what_was_packed(made: Path) -> None:
    training, evaluation = packed(str(made / "digits"))
    assert len(Index.read(made / "digits").parts["train"]) == 2 and evaluation is not None
    for data, source in zip((training, evaluation), digits(), strict=True):
        assert isinstance(source, TensorImages)
        assert torch.equal(torch.stack([data.pixels(index) for index in range(len(data))]), source.images)
        images, labels = whole(data, 0, 100)
        assert torch.equal(labels, source.labels) and images.dtype == torch.float32
        assert (images - source.batch(torch.arange(len(source)))[0]).abs().max() < 1e-2  # the mean to more places
        assert torch.equal(images[7], data[7][0]) and data[7][1] == source.labels[7]
        assert abs(images.mean()) < 0.02 and abs(images.std() - 1) < 0.02


def test_rows_that_are_padded_and_a_given_mean(made: Path) -> None:
    source, (data, none) = colours()[0], packed(str(made / "colours"), mean=(0, 0, 0), std=(1 / 255,) * 3)
    assert none is None and torch.equal(whole(data, 0, 64)[0], source.images.float())
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[2999][0], data[2999][0]) and len(list(copy)) == 3000


def moved_by_hand(image: torch.Tensor, border: int, down: int, right: int, flipped: bool) -> torch.Tensor:
    image = image.flip(-1) if flipped else image
    _, height, width = image.shape
    return torch.nn.functional.pad(image, (border,) * 4)[:, down : down + height, right : right + width]


def test_crops_and_flips_are_those_of_each_sample_done_by_hand(made: Path) -> None:
    data, _ = packed(str(made / "colours"), crop=3, flip=True, mean=(0, 0, 0), std=(1 / 255,) * 3)
    samples = torch.randperm(3000)[:500]
    images, _ = next(data.batches(iter([(4, samples)]), 11))
    key = mix(11, 4)
    down, right, side = uniform(key, samples.numpy(), range(3))
    for place, index in enumerate(samples.tolist()):
        corner = int(down[place] * 7), int(right[place] * 7)
        expected = moved_by_hand(data.pixels(index), 3, *corner, bool(side[place] < 0.5))
        assert torch.equal(images[place], expected.float())
    assert {int(x) for x in down * 7} == set(range(7)) and 200 < (side < 0.5).sum() < 300


@pytest.mark.parametrize(
    "how", [{"crop": 2, "flip": True}, {"erase": 0.5}, {"mixup": 0.4}, {"crop": 1, "mixup": 0.2, "cutmix": 1.0}]
)
def test_augmentation_hangs_on_seed_epoch_and_sample_only(
    made: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data, _ = packed(str(made / "colours"), **how)
    images, labels = whole(data, 0, 3000)
    for size, order in ((64, None), (7, torch.randperm(3000)), (1000, torch.arange(2999, -1, -1))):
        again = whole(data, 0, size, order)
        assert torch.equal(again[0], images) and torch.equal(again[1], labels)
    monkeypatch.setattr("trainer.train.packed._CACHED", 1000)
    assert torch.equal(whole(data, 0, 300)[0], images)
    for other in (whole(data, 1, 300), whole(data, 0, 300, seed=1)):
        assert (other[0] != images).flatten(1).any(1).float().mean() > 0.4
    assert data.augment.mixes == (labels.ndim == 2)


def test_all_ranks_together_see_what_one_sees(made: Path) -> None:
    data, _ = packed(str(made / "colours"), crop=2, flip=True, erase=0.3)

    def seen(world_size: int, accumulation: int) -> torch.Tensor:
        parts = []
        for rank in range(world_size):
            order = GlobalOrder(len(data), 96, accumulation, rank, world_size, seed=3)
            parts.append([images.clone() for images, _ in batches(data, order.micro_batches(0, 40), 3, Loading())])
        steps = zip(*parts, strict=True)
        return torch.cat(list(chain.from_iterable(steps)))

    assert torch.equal(seen(1, 1), seen(4, 1)) and torch.equal(seen(1, 1), seen(2, 3))


def test_images_that_are_kept_are_not_written_over(made: Path) -> None:
    data, _ = packed(str(made / "colours"), crop=2)
    chosen = [(0, torch.arange(first, first + 50)) for first in range(0, 1000, 50)]
    kept = [images.flatten(1) for images, _ in data.batches(iter(chosen), 0)]  # views of them
    alone = [next(data.batches(iter([each]), 0))[0].flatten(1) for each in chosen]
    assert all(map(torch.equal, kept, alone))
    places = {images.data_ptr() for images, _ in data.batches(iter(chosen), 0)}
    assert len(places) <= 2, "the memory of those that are not kept is used again"


def test_erased_rectangles_have_the_papers_sizes() -> None:
    boxes = Augment(erase=0.5).erased(9, numpy.arange(20000), 32, 32)
    area = (boxes[1] - boxes[0]) * (boxes[3] - boxes[2]) / 1024
    assert 0.48 < (area > 0).mean() < 0.52 and area[area > 0].min() > 0.015 and area.max() < 0.36
    assert boxes.min() == 0 and boxes.max() == 32
    mask = inside(torch.from_numpy(boxes[:, :50]), 32, 32)
    assert mask.shape == (50, 1, 32, 32) and mask.flatten(1).sum(1).tolist() == (area[:50] * 1024).tolist()


@pytest.mark.parametrize("alpha", [0.2, 1.0, 3.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    how, side = uniform(3, numpy.arange(40000), range(2))
    shares = numpy.sort(Beta(alpha)(how, side))
    drawn = numpy.sort(numpy.random.default_rng(0).beta(alpha, alpha, 40000))
    assert numpy.abs(shares - drawn).mean() < 0.01 and abs(shares.var() - 1 / (4 * (2 * alpha + 1))) < 0.003


def test_mixed_labels_are_the_shares_of_the_pixels(made: Path) -> None:
    data, _ = packed(str(made / "colours"), cutmix=1.0, mean=(0, 0, 0), std=(1 / 255,) * 3)
    samples = torch.arange(400)
    images, labels = next(data.batches(iter([(2, samples)]), 5))
    assert labels.shape == (400, 7) and torch.allclose(labels.sum(1), torch.ones(400))
    own = torch.stack([data.pixels(index) for index in range(400)]).float()
    same = (images == own).all(1).flatten(1).float().mean(1)
    other, _, _ = data.augment.mixed(mix(5, 2), samples.numpy(), 3000, 9, 7)
    differ = torch.from_numpy(other % 7) != samples % 7
    assert (labels[samples, samples % 7][differ] - same[differ]).abs().max() < 0.02  # equal pixels by chance
    mixed, shares = next(packed(str(made / "colours"), mixup=1.0)[0].batches(iter([(2, samples)]), 5))
    assert 0.3 < shares[samples, samples % 7].mean() < 0.8 and mixed.isfinite().all()


def test_numbers_of_neighbours_have_nothing_in_common() -> None:
    samples = numpy.arange(50000)
    many = uniform(1, samples, range(4))
    assert many.min() >= 0 and many.max() < 1 and abs(many.mean() - 0.5) < 0.005
    rows = numpy.vstack([many, uniform(2, samples, range(4)), uniform(1, samples + 1, range(2))])
    assert numpy.abs(numpy.corrcoef(rows) - numpy.eye(10)).max() < 0.02


def test_training_goes_on_to_the_bit_and_ranks_make_no_difference(made: Path, folder: Path) -> None:
    how = [
        f"data={json.dumps({'target': 'trainer.train.data:packed', 'args': {'path': str(made / 'digits'), 'crop': 1, 'erase': 0.2}})}"
    ]
    common = [str(DIGITS), *how, "training.log_every_steps=1", "training.batch_size=64", "checkpoint.every_steps=10"]
    runs = {name: folder / name for name in ("whole", "parts", "two")}
    one = [sys.executable, "-m", "trainer.train", *common, "resources.ranks_per_node=1"]
    jobs = [
        [start(*one, overrides(runs["whole"]), "training.max_steps=30")],
        [start(*one, overrides(runs["parts"]), "training.max_steps=17")],
        [start(*TRAINER, "run", *common, "resources.ranks_per_node=2", overrides(runs["two"]), "training.max_steps=30")],
    ]
    for code, output in map(finish, chain.from_iterable(jobs)):
        assert code == 0, output
    code, output = command(*one, overrides(runs["parts"]), "training.max_steps=30")
    assert code == 0 and "resuming at step 17" in output, output
    assert equal(saved(runs["whole"]), saved(runs["two"]), within=1e-4), logs(runs["two"])
    assert [step for step, _ in losses(runs["whole"])] == list(range(1, 31))
    assert losses(runs["whole"])[17:] == losses(runs["parts"])[17:] and equal(saved(runs["whole"]), saved(runs["parts"]))


def slow(seconds: float = 0.004) -> torch.utils.data.Dataset[Any]:
    """The colours, each of which takes its time."""

    class Slow(torch.utils.data.Dataset[Any]):
        images = colours(1500, (1, 32, 32))[0].images

        def __len__(self) -> int:
            return len(self.images)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            time.sleep(seconds)
            return self.images[index], index % 7

    return Slow()


SLOW = "tests.test_packed:slow"


def test_a_killed_pack_leaves_no_half_shard_and_goes_on(folder: Path) -> None:
    """Its processes die with it; what it has finished is kept, even beside a damaged shard, and the result is the same."""
    out, small = folder / "killed", 16384
    code = f"from pathlib import Path; from trainer.train.pack import pack; pack({SLOW!r}, Path({str(out)!r}), processes=2, shard_bytes={small})"
    process = start(sys.executable, "-c", code, TRAINER_TEST="killed")
    assert wait_until(lambda: len(list(out.glob("train-*.bin"))) >= 3, 60)
    process.kill()
    finish(process)
    assert wait_until(lambda: not processes_of(out), 10)
    sizes = {path.name: path.stat() for path in out.glob("train-*.bin")}
    full = pack(SLOW, folder / "full", {"seconds": 0}, shard_bytes=small)
    assert len(sizes) < len(full.parts["train"]) and not (out / "index.json").exists()
    for name, stat in sizes.items():
        assert stat.st_size == (folder / "full" / name).stat().st_size, "whole under its final name"
    noted = [json.loads(line)["file"] for line in (out / "progress.jsonl").read_text().split("\n")[1:-1]]
    damaged, *kept = sorted(noted)
    with open(out / damaged, "r+b") as file:
        file.write(b"!")
    (out / "progress.jsonl").write_text((out / "progress.jsonl").read_text() + '{"file": "tr')  # a line cut off
    again = pack(SLOW, out, shard_bytes=small, processes=8)
    assert [shard.sha256 for shard in again.parts["train"]] == [shard.sha256 for shard in full.parts["train"]]
    assert kept and all((out / name).stat().st_mtime_ns == sizes[name].st_mtime_ns for name in kept)
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in (folder / "full").iterdir())


def test_damage_is_named_with_its_file_and_mended_by_the_same_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "packed"
    assert main(["pack", NUMBERS, "--processes", "2", str(out)]) == 0 and main(["pack", "--verify", str(out)]) == 0
    assert "1437 train, 360 eval, 10 classes, images 1x8x8, all whole" in capsys.readouterr().out
    file = out / "eval-00000.bin"
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    assert main(["pack", "--verify", str(out)]) == 2
    assert f"error: {file}: is damaged" in (told := capsys.readouterr().err) and "run the same trainer pack again" in told
    for damage, word in ((content[:-1], f"has {len(content) - 1} bytes instead of {len(content)}"), (None, "missing")):
        file.unlink() if damage is None else file.write_bytes(damage)
        with pytest.raises(ConfigError, match=f"data.args.path=.*{file.name}: {word}; run the same trainer pack again"):
            packed(str(out))
        with pytest.raises(ConfigError, match=word):
            verify(out)
    before = (out / "train-00000.bin").stat().st_mtime_ns
    assert main(["pack", NUMBERS, str(out)]) == 0 and file.read_bytes() == content
    assert (out / "train-00000.bin").stat().st_mtime_ns == before and main(["pack", "--verify", str(out)]) == 0


def tree(root: Path, shapes: dict[str, tuple[int, int]], kind: str = "RGB") -> Path:
    for name, size in shapes.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        coarse = numpy.random.default_rng(len(name)).integers(0, 256, (4, 4, 3), dtype=numpy.uint8)
        Image.fromarray(coarse).resize(size).convert(kind).save(root / name)
    return root


def test_a_folder_of_images_is_packed_by_classes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree(
        folder / "tree",
        {f"{part}/{name}/{n}.jpg": (60, 40) for part in ("train", "val") for name in ("cat", "dog") for n in range(3)},
    )
    index = pack(str(root), folder / "full")
    training, evaluation = packed(str(folder / "full"))
    assert index.classes == ["cat", "dog"] and training.labels.tolist() == [0, 0, 0, 1, 1, 1] and evaluation is not None
    by_pil = numpy.asarray(Image.open(root / "train" / "cat" / "0.jpg")).transpose(2, 0, 1)
    assert numpy.array_equal(training.pixels(0).numpy(), by_pil)
    assert pictures.DECODER == "simplejpeg"
    for decoder in (pictures._simplejpeg, None):  # the second is PIL
        monkeypatch.setattr(pictures, "_simplejpeg", decoder)
        out = folder / f"small {decoder is None}"
        pack(str(root), out, size=(16, 20))
        (small, _), expected = (
            packed(str(out)),
            Image.fromarray(by_pil.transpose(1, 2, 0)).crop((5, 0, 55, 40)).resize((20, 16), Image.Resampling.BILINEAR),
        )
        assert small.shape == (3, 16, 20)
        assert (
            numpy.abs(small.pixels(0).numpy().astype(int) - numpy.asarray(expected).transpose(2, 0, 1)).mean() < 8
        )  # halved by the decoder, then scaled


BAD = {
    "nothing/": "no such folder; name one, or a target such as torchvision.datasets:CIFAR10",
    "no.such:thing": "pack.target=no.such:thing: No module named 'no'",
    "empty": "no class folders there; it must hold CLASS/",
    "hollow": "hollow/dog holds no images; remove it",
    "broken": "broken/cat/0.jpg: is no image that can be read",
    "shapes": "sample 1 has shape \\(3, 20, 30\\), sample 0 has \\(3, 40, 60\\); give --size HxW",
    "trainer.train.data:fake_images samples=20 shape=[3,4,4]": "sample 0: is a Tensor|is a ndarray of float32 .*; pack takes bytes: leave ToTensor",
    "tests.test_packed:slow seconds": "pack seconds: is no argument; write key=value",
    "tests.test_packed:slow secs=0": "pack.args={'secs': 0}: .*unexpected keyword argument 'secs'",
    "tests.test_packed:words": "sample 0: is a str, no image",
    "tests.test_packed:none": "the train part is empty",
}


def words() -> list[tuple[str, int]]:
    return [("a", 0), ("b", 1)]


def none() -> list[Any]:
    return []


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_told_in_one_line(
    words: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    tree(folder / "hollow", {"cat/0.png": (8, 8)})
    (folder / "hollow" / "dog").mkdir()
    tree(folder / "broken", {"cat/1.jpg": (8, 8)})
    (folder / "broken" / "cat" / "0.jpg").write_bytes(b"\xff\xd8 no image")
    tree(folder / "shapes", {"cat/0.png": (60, 40), "cat/1.png": (30, 20)})
    monkeypatch.chdir(folder)
    dataset, *args = words.split()
    assert main(["pack", dataset, "out", *args]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search(BAD[words], line), line
    assert not list((folder / "out").glob("*.bin"))


def test_another_folder_is_not_written_into(made: Path, folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no packed data; choose another folder"):
        pack(NUMBERS, folder)
    with pytest.raises(
        ConfigError,
        match=r"holds data packed otherwise \(args, dataset, parts, shape\); choose another folder".replace("args, ", ""),
    ):
        pack(COLOURS, made / "digits", shard_bytes=SHARD)
    with pytest.raises(ConfigError, match=r"packed otherwise \(samples_per_shard\)"):  # shards of two lengths would overlap
        pack(COLOURS, made / "colours", shard_bytes=10 * SHARD)
    with pytest.raises(ConfigError, match="data.args.path=.*no packed data there; write it with: trainer pack DATASET"):
        packed(str(folder))
    for how, line in {"crop": -1, "erase": 2, "mixup": -0.1, "mean": [0.5, 0.5], "std": [0]}.items():
        with pytest.raises(ConfigError, match=f"data.args.{how}="):
            packed(str(made / "digits"), **{how: line})  # type: ignore[arg-type]


class Stream:
    """Stands in for a GPU's: says what is asked of it."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def record_event(self) -> str:
        self.told.append("made")
        return "event"

    def wait_event(self, event: str) -> None:
        self.told.append(f"waited for {event}")


class OnDevice:
    def __init__(self, number: int, told: list[str]) -> None:
        self.number, self.told = number, told

    def record_stream(self, stream: Stream) -> None:
        self.told.append(f"{self.number} kept")


def test_batches_ahead_keep_their_order_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread's part only: there is no GPU here, so streams are stood in for."""
    told: list[str] = []
    for name, stand_in in {"Stream": Stream(told), "current_stream": Stream(told)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=stand_in: found)
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda given: contextlib.nullcontext())

    def some(last: int, broken: bool) -> Iterator[Any]:
        for number in range(last):
            made.append(number)
            yield OnDevice(number, told), OnDevice(number, told)
        if broken:
            raise ConfigError("the disk is gone")

    made: list[int] = []
    assert [images.number for images, _ in ahead(some(9, False), torch.device("cuda"))] == list(range(9))
    assert told.count("waited for event") == 9 and told.count("8 kept") == 2
    found = ahead(some(3, True), torch.device("cuda"))
    assert [next(found)[0].number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ConfigError, match="the disk is gone"):
        next(found)
    made.clear()
    left = ahead(some(10**6, False), torch.device("cuda"))
    assert next(left)[0].number == 0 and wait_until(lambda: len(made) >= 4, 10)
    left.close()  # type: ignore[attr-defined]
    assert wait_until(lambda: not [each for each in threading.enumerate() if each.name == "batches ahead"], 10) and len(made) <= 5


READ = """
import os, sys
from pathlib import Path
Path(sys.argv[2], "cgroup.procs").write_text(str(os.getpid()))
import torch
from trainer.train import shards
from trainer.train.batches import GlobalOrder
from trainer.train.packed import packed
def kib(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])
shards._RESIDENT = 32 << 20
data, _ = packed(sys.argv[1], flip=True)
seen = []
for number, (images, labels) in enumerate(data.batches(GlobalOrder(len(data), 64, 1, 0, 1, 0).micro_batches(0, len(data) // 64), 0)):
    seen.append((kib("VmRSS"), kib("RssAnon")))
print(len(data), seen[9][1], *(max(column) for column in zip(*seen[9:])), seen[9][0])
"""


def sparse(folder: Path, samples: int) -> Path:
    """Data that takes no time to write: its shards are holes."""
    pack(COLOURS, folder, {"images": 64, "shape": [3, 64, 64]})
    index = json.loads((folder / "index.json").read_text())
    (shard,) = index["parts"]["train"]
    shard["samples"] = samples
    (folder / "index.json").write_text(json.dumps(index))
    os.truncate(folder / shard["file"], samples * (3 * 64 * 64 + 8))
    return folder


@pytest.mark.skipif(os.geteuid() != 0 or not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="needs a memory cgroup to limit")
def test_memory_stays_flat_over_data_twice_the_limit(tmp_path: Path) -> None:
    limit = 448 << 20
    data, group = sparse(tmp_path / "data", 2 * limit // (3 * 64 * 64)), Path(f"/sys/fs/cgroup/memory/packed-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        code, output = command(sys.executable, "-c", READ, str(data), str(group))
        assert code == 0, output
    finally:
        assert wait_until(lambda: not (group / "cgroup.procs").read_text(), 10)
        group.rmdir()
    samples, anonymous, most, most_anonymous, first = map(int, output.split())
    assert samples * 3 * 64 * 64 >= 2 * limit - 12288 and most_anonymous - anonymous < 8 << 10, output
    assert most - first < 96 << 10, output  # KiB, with pages let go of every 32 MiB; nearly a GiB was read


def in_memory(rows: Mapped) -> int:
    """How many of its pages are in the page cache."""
    pages = (ctypes.c_ubyte * (-(-rows.bytes // mmap.PAGESIZE)))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(rows._base), ctypes.c_size_t(rows.bytes), pages) == 0
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("block_size", [1, 64])
def test_blocks_are_read_in_one_piece(block_size: int, tmp_path: Path) -> None:
    """And single samples are not, where memory is short."""
    index = pack(COLOURS, tmp_path / "data", {"images": 4096, "shape": [3, 32, 32]})
    data, _ = packed(str(tmp_path / "data"))
    data.images._advise(mmap.MADV_RANDOM)
    for shard in index.parts["train"]:
        with open(tmp_path / "data" / shard.file, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(data.images):
        pytest.skip("this file system keeps its files in memory")
    order = GlobalOrder(len(data), 8, 1, 0, 1, 0, block_size)
    next(data.batches(order.micro_batches(0, 2), 0, block_size=block_size))
    used = 8 * block_size * data.images.rows.shape[1] / mmap.PAGESIZE  # pages
    assert wait_until(lambda: in_memory(data.images) >= used - 2, 5)
    assert in_memory(data.images) <= used + 2 * 8
