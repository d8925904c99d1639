"""Which way between nodes is slow, and which node makes it so: what seems slow while all stream is measured again, alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import median

_SLOW = 0.5  # of the median
_AT_MOST = 4  # ways that are looked into, the slowest first

Measure = Callable[[int, int], float]  # (sender, receiver) -> bytes/s, with nobody else streaming


def slow_ways(
    received: Mapping[int, float], nodes: int, measure: Measure, name: Callable[[int], str]
) -> Iterator[tuple[int, str]]:
    """For each way that stays slow: the node rank that is to be left out, and what is slow, in words.

    Args:
        received: node rank -> bytes/s that came from the node before it in the ring, while all streamed.
        nodes: in the ring.
        name: a node as a person would name it.
    """
    if len(received) < 2:
        return
    usual = median(received.values())
    limit = _SLOW * usual
    suspects = sorted((rank for rank, rate in received.items() if rate < limit), key=lambda rank: received[rank])
    for receiver in suspects[:_AT_MOST]:
        sender = (receiver - 1) % nodes
        rate = measure(sender, receiver)
        if rate >= limit:
            continue
        speeds = f"{rate / 1e6:.0f} MB/s, the median is {usual / 1e6:.0f} MB/s"
        good = [rank for rank in received if rank not in (sender, receiver) and rank not in suspects]
        if not good:
            yield receiver, f"the way from {name(sender)} to {name(receiver)} is slow: {speeds}"
            continue
        sends, takes = measure(sender, good[0]) >= limit, measure(good[0], receiver) >= limit
        if sends and takes:
            yield receiver, f"the way from {name(sender)} to {name(receiver)} is slow: {speeds}; to and from others they are not"
        elif takes:
            yield sender, f"{name(sender)} sends slowly, to {name(receiver)} {speeds}; to {name(good[0])} too"
        else:
            yield receiver, f"{name(receiver)} receives slowly, from {name(sender)} {speeds}; from {name(good[0])} too"
