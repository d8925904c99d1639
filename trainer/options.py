"""Options of the command line that need more than a word."""

from __future__ import annotations

import argparse


def add_queue_options(command: argparse.ArgumentParser) -> None:
    """What a scheduler's queue can do with a run."""
    command.add_argument(
        "--array",
        action="append",
        default=[],
        metavar="section.key=V1,V2",
        help="a Slurm job array with a task, and a run folder, for each value; given twice, for each combination",
    )
    command.add_argument("--after", metavar="RUN", help="start when that run has ended well (Slurm)")
    command.add_argument(
        "--simulate-preemption-after",
        metavar="SECONDS",
        type=_seconds,
        help="warn the first attempt then, as a preemption would: it saves, is requeued and goes on (Slurm)",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds")
    return seconds


def rank(text: str) -> str:
    """A global rank, or all."""
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a rank nor all")
    return text
