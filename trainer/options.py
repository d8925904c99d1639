"""Options of the command line that need more than a word."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from trainer import yaml12
from trainer.errors import ConfigError


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


def add_pack(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command `pack`."""
    command = commands.add_parser("pack", help=pack.__doc__)
    words = "a folder of CLASS/*.jpg or package.module:callable; a folder to write; key=value: arguments of the callable"
    command.add_argument("config", nargs="*", metavar="DATASET OUT key=value", help=words)  # named so, options may stand between
    command.add_argument("--size", type=_size, metavar="HxW", help="scale and cut all images to this size (one number: a square)")
    command.add_argument("--processes", type=int, metavar="N", help="default: one for each core")
    command.add_argument("--verify", metavar="OUT", help="compare the shards of a folder with their checksums; write nothing")
    command.set_defaults(function=pack)


def pack(arguments: argparse.Namespace) -> None:
    """Decode images once, into files that training reads at the speed of memory (data.target: trainer.train.data:packed)."""
    if arguments.verify is None and len(arguments.config) < 2:
        raise ConfigError("pack: needs a data set and a folder to write: trainer pack DATASET OUT")
    packs = importlib.import_module("trainer.train.pack")
    if arguments.verify is not None:
        out, index = arguments.verify, packs.verify(Path(arguments.verify))
    else:
        (dataset, out, *words), args = arguments.config, {}
        for word in words:
            key, is_pair, value = word.partition("=")
            if not is_pair or not key.isidentifier():
                raise ConfigError(f"pack {word}: is no argument; write key=value")
            args[key] = yaml12.load(value)
        index = packs.pack(dataset, Path(out), args, arguments.size, arguments.processes)
    parts = ", ".join(f"{sum(shard.samples for shard in shards)} {name}" for name, shards in index.parts.items())
    print(f"{out}: {parts}, {len(index.classes)} classes, images {'x'.join(map(str, index.shape))}, all whole")


def _size(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    if not height.isdecimal() or not (width or height).isdecimal() or not int(height) or not int(width or height):
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 224 or 224x320")
    return int(height), int(width or height)
