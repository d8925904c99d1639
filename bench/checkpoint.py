"""How long a save holds up training, and when it is safe on disk: the kit's against torch.save and torch's async_save.

A model of 100.7 M parameters with AdamW (1.2 GB of state) trains on one core; each way saves once a round, all ways in turn.
stall: what the save takes from the loop, which is its call and, for the kit, the wait before the weights change in the next step.
durable: from the call until the files are synced and have their names; raw: a plain write and fsync of as many bytes, beside the
training as the others are.
beside: how much longer a step takes while the save is under way, in % of a step.

    python -m bench.checkpoint [--rounds 5] [--width 4096] [--batch 32] [--folder DIR] [--json]
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from bench.interleave import Ratio, as_json, each, one_rank, repeated
from trainer.train.checkpoint import Checkpointer
from trainer.train.distributed import World
from trainer.train.loop import Loop, StepOptions
from trainer.train.optim import LearningRate, Schedule

LAYERS, FAR = 6, 10**6
Done = Callable[[], bool]


class Training:
    """A loop with a state worth saving, and how long its last step was held up."""

    def __init__(self, world: World, width: int, batch: int) -> None:
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.loop = Loop(model, nn.MSELoss(), optimizer, LearningRate(optimizer, Schedule(FAR)), world, StepOptions())
        inputs = torch.randn(batch, width)
        self._batches: Iterator[Any] = repeat((inputs, inputs))

    def step(self) -> float:
        """One step; returns its seconds."""
        began = time.monotonic()
        self.loop.take_step(self._batches)
        return time.monotonic() - began


class Kit:
    """The kit's checkpointer."""

    def __init__(self, training: Training, world: World, folder: Path) -> None:
        self.training, self.saver, self.waited = training, Checkpointer(folder, world, keep_last=2), 0.0
        training.loop.before_update = self._join

    def _join(self) -> None:
        began = time.monotonic()
        self.saver.join()
        self.waited += time.monotonic() - began

    def __call__(self) -> Done:
        loop, self.waited = self.training.loop, 0.0
        self.saver.save(loop.step, loop.state(), {}, behind=True)
        name, latest = f"step-{loop.step:08d}", self.saver.folder / "latest"
        return lambda: latest.is_symlink() and latest.readlink().name == name


def blocking(training: Training, folder: Path) -> Done:
    """torch.save, fsync, rename."""
    with open(folder / "state.tmp", "wb") as file:
        torch.save(training.loop.state(), file)
        file.flush()
        os.fsync(file.fileno())
    (folder / "state.tmp").rename(folder / "state.pt")
    return lambda: True


def asynchronous(training: Training, folder: Path) -> Done:
    """torch's own, in a thread."""
    state, target = training.loop.state(), folder / "dcp"
    shutil.rmtree(target, ignore_errors=True)
    future = dcp.async_save({name: state[name] for name in ("model", "optimizer")}, checkpoint_id=str(target))
    return future.done  # type: ignore[union-attr]


def raw(size: int, folder: Path) -> Done:
    """A plain write and fsync of as many bytes, in a thread; two earlier files stay, as two checkpoints do."""
    folder.mkdir(exist_ok=True)
    durable = threading.Event()

    def write() -> None:
        with open(folder / str(time.time_ns()), "wb", buffering=0) as file:
            for _ in range(size >> 23):
                file.write(data)
            os.fsync(file.fileno())
        durable.set()
        for old in sorted(folder.iterdir())[:-2]:
            old.unlink()

    data = memoryview(bytes(1 << 23))
    threading.Thread(target=write).start()
    return durable.is_set


def measure(training: Training, way: Callable[[], Done], waited: Callable[[], float]) -> tuple[float, float, float]:
    """Stall and time until durable in s, and the ratio of a step beside the save to one without."""
    usual = statistics.median(training.step() for _ in range(3))
    began = time.monotonic()
    done = way()
    stall, ended, beside = time.monotonic() - began, [], []

    def look() -> None:
        while not done():
            time.sleep(0.005)
        ended.append(time.monotonic())

    watching = threading.Thread(target=look)
    watching.start()
    while not beside or not ended:
        beside.append(training.step())
    watching.join()
    return stall + waited(), ended[0] - began, statistics.mean(beside) / usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with one_rank() as world, tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        training, folder = Training(world, arguments.width, arguments.batch), Path(name)
        kit = Kit(training, world, folder / "kit")
        size = 12 * sum(each.numel() for each in training.loop.bare.parameters())
        ways: dict[str, Callable[[], Done]] = {
            "raw": partial(raw, size, folder / "raw"),
            "kit": kit,
            "async_save": partial(asynchronous, training, folder),
            "torch.save": partial(blocking, training, folder),
            "raw again": partial(raw, size, folder / "raw again"),
        }
        found: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
        with closing(kit.saver):
            for number in range(arguments.rounds + 1):  # the first warms up
                for way, save in ways.items():
                    waited = (lambda: kit.waited) if way == "kit" else (lambda: 0.0)
                    result = measure(training, save, waited)
                    if number:
                        found[way].append(result)
    told = report(found)
    if arguments.json:
        print(as_json(told))


def report(found: dict[str, list[tuple[float, float, float]]]) -> dict[str, Ratio]:
    """Medians, and the ratios that the bars are about."""
    stalls = {way: [stall for stall, *_ in values] for way, values in found.items()}
    durable = {way: [seconds for _, seconds, _ in values] for way, values in found.items()}
    for way, values in found.items():
        beside = statistics.median(more for *_, more in values)
        typical = statistics.median(stalls[way]) * 1e3, statistics.median(durable[way])
        print(f"{way:>10}: stall {typical[0]:7.1f} ms, durable {typical[1]:5.2f} s, a step beside it {beside - 1:+.0%}")
    told = {"durable_of_raw": each(durable["kit"], durable["raw"]), "null of raw": each(durable["raw again"], durable["raw"])}
    for way in ("async_save", "torch.save"):
        told |= {f"stall_of_{way}": each(stalls["kit"], stalls[way]), f"null of {way}": repeated(stalls[way])}
    print("\n".join(f"{name} {ratio}" for name, ratio in told.items()))
    return told


if __name__ == "__main__":
    main()
