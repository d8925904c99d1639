"""Which way between nodes is slow, and which node makes it so: what seems slow while all stream is measured again, alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

_SLOW = 0.5  # of what the best quarter of the ways reach: one bad node spoils two ways, which may be most of a small ring
_AT_MOST = 4  # ways that are looked into, the slowest first

Measure = Callable[[int, int], float]  # (sender, receiver) -> bytes/s, with nobody else streaming


@dataclass(frozen=True)
class Slow:
    """A way that stays slow."""

    node_rank: int  # of the node that is to be looked at, or left out
    words: str
    dead: bool  # nothing at all came through, though a connection could be made


def slow_ways(received: Mapping[int, float], measure: Measure, name: Callable[[int], str]) -> Iterator[Slow]:
    """Each way that stays slow.

    Args:
        received: for all nodes of the ring, node rank -> bytes/s that came from the node before it while all streamed.
        name: a node as a person would name it.
    """
    nodes, rates, alone = len(received), dict(received), set[int]()
    # What comes alone is not held up by what goes out at the same time, and may raise the limit for the rest; of two nodes, each
    # way carries the answers to the other, so that both may look equally slow.
    while (suspects := (set(rates) if nodes == 2 else _slow(rates)) - alone) and len(alone) < _AT_MOST:
        receiver = min(suspects, key=rates.__getitem__)
        alone.add(receiver)
        rates[receiver] = measure((receiver - 1) % nodes, receiver)
    usual, slow = _usual(rates), _slow(rates)
    for receiver in sorted(alone & slow, key=rates.__getitem__):
        sender, rate, limit = (receiver - 1) % nodes, rates[receiver], _SLOW * usual
        speeds = f"{rate / 1e6:.1f} MB/s, others reach {usual / 1e6:.0f} MB/s" if rate else "nothing comes through"
        good = [rank for rank in received if rank not in (sender, receiver, *slow)]
        if not good:
            yield Slow(receiver, f"the way from {name(sender)} to {name(receiver)} is slow: {speeds}", not rate)
            continue
        sends, takes = measure(sender, good[0]) >= limit, measure(good[0], receiver) >= limit
        if sends == takes:
            also = "to and from others it is not" if sends else f"so are those to and from {name(good[0])}"
            yield Slow(receiver, f"the way from {name(sender)} to {name(receiver)} is slow: {speeds}; {also}", not rate)
        elif takes:
            yield Slow(sender, f"{name(sender)} sends slowly, to {name(receiver)} {speeds}; to {name(good[0])} too", not rate)
        else:
            yield Slow(
                receiver, f"{name(receiver)} receives slowly, from {name(sender)} {speeds}; from {name(good[0])} too", not rate
            )


def _usual(rates: Mapping[int, float]) -> float:
    return sorted(rates.values())[-max(1, len(rates) // 4)]


def _slow(rates: Mapping[int, float]) -> set[int]:
    limit = _SLOW * _usual(rates)
    return {rank for rank, rate in rates.items() if rate < limit or not rate}
