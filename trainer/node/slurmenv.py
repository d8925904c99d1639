"""Slurm's spellings of lists and counts, read right or refused. Needs no scontrol: it is not in the image."""

from __future__ import annotations

import re

_MOST_HOSTS = 100_000  # in one range; Slurm itself allows 65,536 nodes


def expand_nodelist(text: str) -> list[str]:
    """The hosts of Slurm's compressed node list: `n[01-03,7],login` -> n01, n02, n03, n7, login.

    Raises:
        ValueError: brackets or ranges that make no sense.
    """
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        hosts += _expand(item)
    if not hosts or text.count("[") != text.count("]"):
        raise ValueError(f"no node list: {text!r}")
    return hosts


def _expand(item: str) -> list[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if not match:
        return [item]
    hosts = []
    for part in match[1].split(","):
        bounds = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if not bounds:
            raise ValueError(f"no node list: {item!r}")
        first, last = bounds[1], bounds[2] or bounds[1]
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise ValueError(f"no node list: {item!r}")
        for number in range(int(first), int(last) + 1):
            hosts += _expand(item[: match.start()] + str(number).zfill(len(first)) + item[match.end() :])
    return hosts


def counts(text: str) -> list[int]:
    """A count for each node: `2(x3),1` -> 2, 2, 2, 1.

    Raises:
        ValueError: not such a list.
    """
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise ValueError(f"no list of counts: {text!r}")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def gpu_count(text: str) -> int:
    """GPUs of one node: `8`, `a100:4`, `gpu:h100:8`, `gpu:2`, `gres:gpu:4(IDX:0-3)`, several kinds with commas added up.

    Raises:
        ValueError: none of these, such as a list for several nodes (`2(x3)`).
    """
    total = 0
    for part in re.split(r",(?![^(]*\))", text):  # a comma inside (IDX:0,2) does not separate
        match = re.fullmatch(r"(?:gres[:/])?(?:gpu[:/])?(?:[A-Za-z][\w.-]*:)?(\d+)(?:\(IDX:[\d,-]+\))?", part)
        if not match:
            raise ValueError(f"no count of GPUs: {text!r}")
        total += int(match[1])
    return total
