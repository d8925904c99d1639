"""Two ranks against one, one thread each, at the same global batch of a model that computes much and sends little.

Each measurement is a start of its own, of one rank and of two in turn; the null test is one rank against one.

    python -m bench.scaling [--rounds 3] [--steps 8] [--json]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import repeat
from pathlib import Path

import torch
from torch import nn

from bench.interleave import Ratio, as_json, free_port, repeated
from trainer.process import leave
from trainer.train.distributed import joined
from trainer.train.loop import Loop, StepOptions
from trainer.train.optim import LearningRate, Schedule

BATCH, SIDE, WARM = 64, 32, 3


def network() -> nn.Module:
    """Convolutions: 0.3 M parameters."""
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 128), (128, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def rank(steps: int) -> None:
    """One rank; the first prints the seconds of a step."""
    torch.set_num_threads(1)
    with joined(0, 300) as world:
        torch.manual_seed(0)
        model, mine = network(), BATCH // world.world_size
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loop = Loop(model, nn.CrossEntropyLoss(), optimizer, LearningRate(optimizer, Schedule(10**6)), world, StepOptions())
        batches = repeat((torch.randn(mine, 3, SIDE, SIDE), torch.arange(mine) % 10))
        for _ in range(WARM):
            loop.take_step(batches)
        since = time.perf_counter()
        for _ in range(steps):
            loop.take_step(batches)
        if world.rank == 0:
            print((time.perf_counter() - since) / steps)


def step_seconds(ranks: int, steps: int) -> float:
    """Seconds of a step with so many ranks."""
    port, processes = str(free_port()), []
    for number in range(ranks):
        place = {"RANK": number, "WORLD_SIZE": ranks, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        environ = {**os.environ, **{name: str(value) for name, value in place.items()}, "MASTER_ADDR": "127.0.0.1"}
        environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        argv = [sys.executable, "-m", "bench.scaling", "--rank", "--steps", str(steps)]
        processes.append(subprocess.Popen(argv, env=environ, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return float(outputs[0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments.steps)
        leave(0)
    ones, ratios = [step_seconds(1, arguments.steps)], []
    for _ in range(arguments.rounds):
        two = step_seconds(2, arguments.steps)
        ones.append(step_seconds(1, arguments.steps))
        ratios.append((ones[-2] + ones[-1]) / 2 / two)
    told = {"speedup": Ratio.of(ratios), "null": repeated(ones)}
    print(f"one rank {statistics.median(ones) * 1e3:.0f} ms a step; two are {told['speedup']} times as fast; null {told['null']}")
    if arguments.json:
        print(as_json(told))


if __name__ == "__main__":
    main()
