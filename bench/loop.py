"""CPU time of a step of the kit's loop against the same step in a bare hand-written DDP loop.

The model is one linear layer at batch 1 on one rank, so that next to nothing but overhead is measured. The kit's side is all that
a run does between steps: schedule, metrics window, stop signal, metrics.jsonl and a progress line as often as by default. A rank
that is alone sends nothing and does without DDP; `of 2` does all that one of two ranks does, whose peer answers at once.
The null test is the bare loop against itself: a difference inside its range is not resolved. Accelerate and Lightning take
part where they are installed.

    python -m bench.loop [--json] [--rounds 100] [--steps 150]
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.interleave import Block, as_json, one_rank, ratios
from bench.peers import Accelerated, Lightning, Stream
from trainer.learning import Training
from trainer.train.batches import GlobalOrder, Loading, TensorImages
from trainer.train.checkpoint import Checkpointer
from trainer.train.distributed import World
from trainer.train.exchange import ExchangeOptions
from trainer.train.loop import Loop, StepOptions
from trainer.train.models import linear
from trainer.train.optim import LearningRate, Schedule, fused
from trainer.train.run import Cadence, Run
from trainer.train.stop import StopSignal

FEATURES, CLASSES, SAMPLES = 3072, 10, 2048
FAR = 10**6  # steps: the schedule of both loops never ends
RATE = 1e-7  # nothing is learned: a model that knows its samples by heart has gradients so small that a CPU adds them slowly


def dataset() -> TensorImages:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (SAMPLES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return TensorImages(images, torch.arange(SAMPLES) % CLASSES, mean=120.0, std=60.0)


class Bare:
    """What one writes by hand: DDP, SGD with momentum, uint8 images in memory gathered and normalised in batches."""

    def __init__(self, steps: int) -> None:
        self.model = DistributedDataParallel(linear(FEATURES, CLASSES))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        self.loss = nn.CrossEntropyLoss()
        self.images, self.labels = dataset().images, dataset().labels
        self.steps, self.order = steps, torch.randperm(SAMPLES).tolist()

    def __call__(self) -> None:
        for step in range(self.steps):
            chosen = torch.as_tensor([self.order[step % SAMPLES]])
            inputs, targets = self.images[chosen].float().sub_(120.0).div_(60.0), self.labels[chosen]
            loss = self.loss(self.model(inputs), targets)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


class Kit:
    """The kit's run, in blocks of as many steps."""

    def __init__(self, world: World, steps: int, folder: Path, engine: str = "ddp") -> None:
        model = linear(FEATURES, CLASSES)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, **fused(torch.optim.SGD, {}, model))
        rate = LearningRate(optimizer, Schedule(FAR, warmup_steps=100))
        self.loop = Loop(model, nn.CrossEntropyLoss(), optimizer, rate, world, StepOptions(), exchange=ExchangeOptions(engine))
        order = GlobalOrder(SAMPLES, world.world_size, 1, world.rank, world.world_size, seed=0)
        saver = Checkpointer(folder, world)
        self.run = Run(
            world, order, FAR, self.loop, saver, dataset(), None, Cadence(Training().log_every_steps, 1, FAR), Loading()
        )
        self.stop, self.steps = StopSignal(world), steps

    def __call__(self) -> None:
        for _ in range(self.steps):
            self.run.advance(self.stop)


def peers(steps: int) -> dict[str, Block]:
    """Those that are installed in this environment."""
    order = torch.randperm(SAMPLES).tolist()
    known: dict[str, Callable[..., Block]] = {"accelerate": Accelerated, "lightning": Lightning}
    there = {name: peer for name, peer in known.items() if importlib.util.find_spec(name)}
    return {name: peer(Stream(dataset(), order), (FEATURES, CLASSES), RATE, steps) for name, peer in there.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of a block")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # else Accelerate sets another number for all
    torch.set_num_threads(1)
    with one_rank() as world, tempfile.TemporaryDirectory() as folder:
        bare = Bare(arguments.steps)
        pair = replace(world, world_size=2)
        names = {"kit": (world, "ddp"), "flat": (world, "flat"), "kit of 2": (pair, "ddp"), "flat of 2": (pair, "flat")}
        kits = {name: Kit(of, arguments.steps, Path(folder) / name, engine) for name, (of, engine) in names.items()}
        blocks: dict[str, Block] = {**kits, "null": Bare(arguments.steps), **peers(arguments.steps)}
        with ExitStack() as stack:
            stack.enter_context(kits["kit"].stop)
            for name, kit in kits.items():
                stack.enter_context(kit.run.reporting(Path(folder) / name))
            for block in (bare, *blocks.values()):  # warm up
                block()
            found, seconds = ratios(bare, blocks, arguments.rounds)
    step_us = seconds / arguments.steps * 1e6
    told = "; ".join(f"{name} / bare {ratio}" for name, ratio in found.items())
    print(f"bare step {step_us:.0f} us CPU; {told}; {arguments.rounds} rounds")
    if arguments.json:
        print(as_json(found))


if __name__ == "__main__":
    main()
