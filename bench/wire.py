"""What a slow network costs a step: two ranks in network namespaces, and 1 Gbit/s between them. Needs root (ip, tc).

A model of 25.2 M parameters learns with the kit's loop; its gradients are sent as they are, or as bf16 or fp16
(ddp.compress), in turn. The yardstick of an all-reduce is the line: of two ranks each sends as many bytes as it has.

    python -m bench.wire [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.interleave import Ratio, as_json, each, repeated
from trainer.train.distributed import World, joined
from trainer.train.exchange import ExchangeOptions
from trainer.train.loop import Loop, StepOptions
from trainer.train.optim import LearningRate, Schedule

RATE_BITS, MEGABYTES = 1e9, 25
ADDRESSES, PORT = ("10.213.7.1", "10.213.7.2"), "23471"
WAYS = ("none", "bf16", "fp16")


@contextmanager
def linked() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a wire of 1 Gbit/s between them; gone afterwards."""
    names = (f"wire{os.getpid()}a", f"wire{os.getpid()}b")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "wire", "netns", names[0], "type", "veth", "peer", "name", "wire", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire")
            run("ip", "-n", name, "link", "set", "lo", "up")
            run("ip", "-n", name, "link", "set", "wire", "up")
            shape = ["rate", f"{RATE_BITS:.0f}", "burst", "256kb", "latency", "50ms"]
            run("tc", "-n", name, "qdisc", "add", "dev", "wire", "root", "tbf", *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)


def run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def seconds(work: Callable[[], object]) -> float:
    """Wall time, of the slower rank: both begin together."""
    dist.barrier()
    since = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - since


class Step:
    """One optimizer step with one way to send gradients."""

    def __init__(self, world: World, compress: str) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rate = LearningRate(optimizer, Schedule(10**6))
        options = ExchangeOptions(compress=compress)
        self.loop = Loop(model, nn.CrossEntropyLoss(), optimizer, rate, world, StepOptions(), exchange=options)
        self.batches = repeat((torch.randn(8, 2048), torch.arange(8)))

    def __call__(self) -> None:
        self.loop.take_step(self.batches)


def rank(rounds: int) -> None:
    """One of the two ranks; the first one prints what was measured, as JSON."""
    torch.set_num_threads(1)
    with joined(0, 300) as world:
        steps = {way: Step(world, way) for way in WAYS}
        steps["null"] = Step(world, "none")
        sent = torch.randn(MEGABYTES * 10**6 // 4)
        reduce = {"all_reduce": lambda: dist.all_reduce(sent)}
        work: dict[str, Callable[[], object]] = {**steps, **reduce}
        for way in work.values():  # DDP lays its buckets out anew after the first step
            way(), way()
        found: dict[str, list[float]] = {name: [] for name in work}
        for _ in range(rounds):
            for name, way in work.items():
                found[name].append(seconds(way))
        if world.rank == 0:
            print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        return rank(arguments.rounds)
    with linked() as names:
        processes = [started(name, number, arguments.rounds) for number, name in enumerate(names)]
        outputs = [process.communicate()[0] for process in processes]
    assert not any(process.returncode for process in processes), outputs
    found = json.loads(outputs[0].splitlines()[-1])
    typical = {name: statistics.median(values) for name, values in found.items()}
    told = {f"{way}_of_fp32": each(found[way], found["none"]) for way in ("bf16", "fp16", "null")}
    line = MEGABYTES * 8e6 / RATE_BITS
    told["all_reduce_of_line_rate"] = Ratio.of([line / seconds for seconds in found["all_reduce"]])
    told["null of all_reduce"] = repeated(found["all_reduce"])
    print("; ".join(f"{name} {value * 1e3:.0f} ms" for name, value in typical.items()))
    print("; ".join(f"{name} {ratio}" for name, ratio in told.items()), f"({arguments.rounds} rounds)")
    if arguments.json:
        print(as_json(told))


def started(namespace: str, number: int, rounds: int) -> subprocess.Popen[str]:
    """One rank in its namespace."""
    place = {"RANK": str(number), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "wire"}
    environ = {**os.environ, **place, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "OMP_NUM_THREADS": "1"}
    argv = ["ip", "netns", "exec", namespace, sys.executable, "-m", "bench.wire", "--rank", "--rounds", str(rounds)]
    return subprocess.Popen(argv, env=environ, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()
