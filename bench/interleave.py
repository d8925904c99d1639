"""Ratios measured interleaved in one run: each block of the one in question stands between two blocks of the yardstick."""

from __future__ import annotations

import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

from trainer.train.distributed import World, joined

Block = Callable[[], None]


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles of a ratio over the rounds. Many short blocks tell more than a few long ones: the machine drifts."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """Of two or three all are told; of none, as of a null test of one round, it is not a number."""
        if not values:
            return cls(math.nan, math.nan, math.nan)
        if len(values) < 4:
            return cls(statistics.median(values), min(values), max(values))
        lower, median, upper = statistics.quantiles(values, n=4)
        return cls(median, lower, upper)

    def inverse(self, scale: float = 1.0) -> Ratio:
        """The yardstick to the one in question: `scale` times 1 / ratio."""
        return Ratio(scale / self.median, scale / self.upper, scale / self.lower)

    def __str__(self) -> str:
        return f"{self.median:.3g} [{self.lower:.3g}..{self.upper:.3g}]"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def one_rank() -> Iterator[World]:
    """A process group of one."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with joined(0, 60) as world:
        yield world


def cpu_seconds(block: Block) -> float:
    """CPU time of this process, all its threads, over one block."""
    before = time.process_time()
    block()
    return time.process_time() - before


def ratios(yardstick: Block, others: dict[str, Block], rounds: int) -> tuple[dict[str, Ratio], float]:
    """Measure others against a yardstick.

    Returns:
        The ratio of each to the mean of the two yardstick blocks beside it, and the yardstick's median CPU seconds.
    """
    found: dict[str, list[float]] = {name: [] for name in others}
    plain = [cpu_seconds(yardstick)]
    for _ in range(rounds):
        for name, block in others.items():
            seconds = cpu_seconds(block)
            plain.append(cpu_seconds(yardstick))
            found[name].append(seconds / ((plain[-2] + plain[-1]) / 2))
    return {name: Ratio.of(values) for name, values in found.items()}, statistics.median(plain)


def each(these: Sequence[float], those: Sequence[float]) -> Ratio:
    """These to those, round by round."""
    return Ratio.of([one / other for one, other in zip(these, those, strict=True)])


def repeated(values: Sequence[float]) -> Ratio:
    """A null test where blocks are too long for one of their own: each round to the one before."""
    return each(values[1:], values[:-1])


def as_json(found: dict[str, Ratio]) -> str:
    """One line: median, lower and upper of each."""
    return json.dumps({name: [round(value, 5) for value in astuple(ratio)] for name, ratio in found.items()})
