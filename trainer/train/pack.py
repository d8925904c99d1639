"""`trainer pack`: decode a data set once, into shards of bytes that training maps into memory (`trainer.train.shards`).

Each shard is written under another name, synced and renamed, so that what has its final name is whole. What is finished is
noted in progress.jsonl; the same command goes on from there, and makes damaged shards anew.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from tqdm import tqdm

from trainer.errors import ConfigError
from trainer.process import die_with_parent, usable_cores
from trainer.train.pictures import DECODER, Size, Source, sources
from trainer.train.shards import INDEX, REMEDY, SHARD_BYTES, Index, Shard, labels, samples_per_shard, sha256, stride, synced

PROGRESS = "progress.jsonl"


@dataclass(frozen=True)
class _Work:
    """One shard to be made: samples first <= index < last of a part."""

    part: str
    file: str
    first: int
    last: int


@dataclass(frozen=True)
class _Packing:
    """What every process of a pack knows."""

    parts: dict[str, Source]
    shape: Sequence[int]
    size: Size | None
    out: Path

    def make(self, work: _Work) -> Shard:
        """Write one shard."""
        count, width = work.last - work.first, stride(self.shape)
        rows, targets = numpy.zeros((count, width), dtype=numpy.uint8), numpy.zeros(count, dtype="<i8")
        source, pixels = self.parts[work.part], int(numpy.prod(self.shape))
        for place in range(count):
            image, targets[place] = source.read(work.first + place, self.size)
            if list(image.shape) != list(self.shape):
                raise ConfigError(_other_shape(source, work.first + place, image.shape, self.shape, self.size))
            rows[place, :pixels] = image.reshape(-1)
        temporary = self.out / f".{work.file}.partial"
        with open(temporary, "wb") as file:
            rows.tofile(file)
            targets.tofile(file)
        digest = sha256(temporary)
        synced(temporary).rename(self.out / work.file)
        synced(self.out)
        sums, squares = _levels(rows[:, :pixels].reshape(count, self.shape[0], -1))
        return Shard(work.file, count, digest, sums, squares)


def _other_shape(source: Source, index: int, found: Sequence[int], want: Sequence[int], size: Size | None) -> str:
    name = getattr(source, "name", "") or str(getattr(source, "root", ""))
    remedy = "convert all to the same colours" if size else "give --size HxW, which scales and cuts all to one size"
    return f"pack {name}: sample {index} has shape {tuple(found)}, sample 0 has {tuple(want)}; {remedy}"


def _levels(pixels: numpy.typing.NDArray[numpy.uint8]) -> tuple[list[int], list[int]]:
    """Sum and sum of squares of each channel of (N, C, H*W): exact, from how often each byte occurs."""
    counts = [numpy.bincount(pixels[:, channel].reshape(-1), minlength=256) for channel in range(pixels.shape[1])]
    values = numpy.arange(256)
    return [int(each @ values) for each in counts], [int(each @ values**2) for each in counts]


def pack(
    dataset: str,
    out: Path,
    args: dict[str, Any] | None = None,
    size: Size | None = None,
    processes: int | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Index:
    """Pack a data set into a folder; goes on where an earlier, killed one stopped.

    Args:
        dataset: a folder of images or a target, see `sources`; `args` are a target's.
        size: (height, width) that all images are scaled and cut to.
        processes: default: as many as there are cores.
        shard_bytes: about as many bytes a shard.

    Raises:
        ConfigError: the data is not to be packed, or the folder holds other data.
    """
    parts = sources(dataset, args or {})
    shape = list(parts["train"].read(0, size)[0].shape)
    each = samples_per_shard(shape, shard_bytes)
    plan = _plan(dataset, args or {}, parts, shape, size, each)
    out.mkdir(parents=True, exist_ok=True)
    done = {shard.file: shard for shard in _finished(out, plan) if _whole(out, shard)}
    works = [work for name, part in parts.items() for work in _works(name, len(part), each)]
    missing = [work for work in works if work.file not in done]
    if not missing and (out / INDEX).exists():
        return Index.read(out)
    for left in out.glob(".*.partial"):
        left.unlink()
    _make(_Packing(parts, shape, size, out), missing, done, plan, processes or usable_cores())
    index = _index(out, plan, parts, {name: [done[work.file] for work in works if work.part == name] for name in parts})
    index.write(out)
    (out / PROGRESS).unlink()
    return index


def _plan(
    dataset: str, args: dict[str, Any], parts: dict[str, Source], shape: list[int], size: Size | None, each: int
) -> dict[str, Any]:
    """What decides every byte; a folder may be moved."""
    named: dict[str, Any] = {"dataset": dataset, "args": args}
    if Path(dataset).expanduser().is_dir():
        named = {"decoder": DECODER}
    counts = {name: [len(part), part.fingerprint] for name, part in parts.items()}
    how = {"shape": shape, "size": list(size) if size else None, "samples_per_shard": each}
    plan: dict[str, Any] = json.loads(json.dumps({**named, "parts": counts, **how}))
    return plan


def _finished(out: Path, plan: dict[str, Any]) -> list[Shard]:
    """The shards that an earlier pack of the same data has noted.

    Raises:
        ConfigError: the folder holds other data.
    """
    remedy = "choose another folder, or remove this one"
    if (out / PROGRESS).exists():
        lines = (out / PROGRESS).read_text(encoding="utf-8").split("\n")[:-1]  # a last line that was cut off does not count
        before, *noted = map(json.loads, lines or ["{}"])
        shards = [Shard(**each) for each in noted]
    elif (out / INDEX).exists():
        index = Index.read(out)
        before, shards = index.plan, [shard for each in index.parts.values() for shard in each]
    elif any(each.name != f".{PROGRESS}.partial" for each in out.iterdir()):
        raise ConfigError(f"pack {out}: the folder is not empty and holds no packed data; {remedy}")
    else:
        return []
    if before != plan:
        differ = sorted(key for key in {*before, *plan} if before.get(key) != plan.get(key))
        raise ConfigError(f"pack {out}: holds data packed otherwise ({', '.join(differ)}); {remedy}")
    return shards


def _whole(out: Path, shard: Shard) -> bool:
    return (out / shard.file).is_file() and sha256(out / shard.file) == shard.sha256


def _works(part: str, samples: int, each: int) -> Iterator[_Work]:
    for number, first in enumerate(range(0, samples, each)):
        yield _Work(part, f"{part}-{number:05d}.bin", first, min(samples, first + each))


def _make(packing: _Packing, missing: list[_Work], done: dict[str, Shard], plan: dict[str, Any], processes: int) -> None:
    """Make the shards in processes, note each in progress.jsonl and in `done`."""
    temporary = packing.out / f".{PROGRESS}.partial"
    temporary.write_text("".join(f"{json.dumps(each)}\n" for each in [plan, *map(asdict, done.values())]), encoding="utf-8")
    temporary.rename(packing.out / PROGRESS)
    total = sum(work.last - work.first for work in missing)
    tqdm.monitor_interval = 0  # as in `metrics`
    context, workers = multiprocessing.get_context("fork"), min(processes, max(1, len(missing)))
    with (
        open(packing.out / PROGRESS, "a", encoding="utf-8") as progress,
        tqdm(total=total, unit=" images", desc=f"packing into {packing.out.name}", smoothing=0) as bar,
        ProcessPoolExecutor(workers, context, _begin, (packing, os.getpid())) as pool,
    ):
        futures = [pool.submit(_make_one, work) for work in missing]
        try:
            for future in as_completed(futures):
                shard = future.result()
                done[shard.file] = shard
                progress.write(f"{json.dumps(asdict(shard))}\n")
                progress.flush()
                os.fsync(progress.fileno())
                bar.update(shard.samples)
        except BrokenProcessPool:
            raise ConfigError(f"pack {packing.out}: a process was killed, for memory perhaps; try fewer --processes") from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_here: _Packing  # in a process of the pool: set once, as it may hold a whole data set


def _begin(packing: _Packing, parent: int) -> None:
    global _here  # noqa: PLW0603
    die_with_parent(parent)
    torch.set_num_threads(1)
    _here = packing


def _make_one(work: _Work) -> Shard:
    return _here.make(work)


def _index(out: Path, plan: dict[str, Any], parts: dict[str, Source], shards: dict[str, list[Shard]]) -> Index:
    shape = plan["shape"]
    pixels = sum(shard.samples for shard in shards["train"]) * shape[1] * shape[2]
    sums, squares = (
        [sum(channel) / pixels for channel in zip(*(getattr(shard, name) for shard in shards["train"]), strict=True)]
        for name in ("sums", "squares")
    )
    std = [max(0.0, square - mean**2) ** 0.5 for mean, square in zip(sums, squares, strict=True)]
    highest = int(labels(out, shards["train"], stride(shape)).max())
    return Index(plan, shape, parts["train"].classes or [str(each) for each in range(highest + 1)], sums, std, shards)


def verify(out: Path) -> Index:
    """Compare every shard of a folder with its checksum.

    Raises:
        ConfigError: a line for each that is damaged, or the folder holds no packed data.
    """
    try:
        index = Index.read(out)
    except FileNotFoundError:
        raise ConfigError(
            f"pack --verify {out}: no {INDEX} there; unfinished, or another folder; name the OUT of a finished pack"
        ) from None
    wrong = list(index.wrong_sizes(out))
    if not wrong:
        for shard in tqdm([each for shards in index.parts.values() for each in shards], unit=" shards", desc="checking"):
            if sha256(out / shard.file) != shard.sha256:
                wrong.append(f"{out / shard.file}: is damaged (another checksum than when it was written); {REMEDY}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return index
