"""Why a run ended: the verdict, where each rank was then, and their stacks, equal ones together."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.launch.run import Run

_SHOWN_FRAMES, _LOG_LINES = 12, 15
_PROCESS = r"^process \d+(, state [RS](, in the kernel's \S+)?$)?"  # what may differ between ranks that are at the same
_HEAD = ("rank", "host", "step", "phase", "last progress", "process", "last collective")


def explain(run: Run) -> str:
    """The text for a person.

    Raises:
        ConfigError: nothing is known of an end.
    """
    ends = [event for event in run.events() if event["event"] == "node_end"]
    if not ends:
        raise ConfigError(f"{run.folder}: no node of it has ended yet; see trainer status")
    attempt = max(event["attempt"] for event in ends)
    faults = [event for event in ends if event["attempt"] == attempt and event["fault"]]
    if not faults:
        return f"attempt {attempt} ended without a fault; see trainer status"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(faults[0]["time"]))
    text = [faults[0]["fault"], f"attempt {attempt} of {run.folder}, ended {when}"]
    for folder in (run.folder / kind / f"attempt-{attempt:03d}" for kind in ("hang", "crash")):
        if folder.is_dir():
            text += ["", *_table(_ranks(folder))]
            text += [line for group in _groups(folder) for line in group]
    return "\n".join([*text, *_log(run.folder, attempt, faults[0]["fault"])])


def _ranks(folder: Path) -> list[dict[str, Any]]:
    found = []
    for path in sorted(folder.glob("node-*.json")):
        with suppress(ValueError):  # cut off by a kill
            found += json.loads(path.read_text(encoding="utf-8"))
    return sorted(found, key=lambda rank: int(rank["rank"]))


def _table(ranks: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [_HEAD, *(_row(rank) for rank in ranks)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    for row in rows:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()


def _row(rank: Mapping[str, Any]) -> tuple[str, ...]:
    process = rank["state"] if rank["state"].startswith("exit") else f"pid {rank['pid']}, state {rank['state']}"
    collective = rank["finding"]["operation"] or f"{rank['sequence']} begun"
    facts = (rank["rank"], rank["host"], rank["step"], rank["phase"], f"{rank['age']:.1f} s before", process, collective)
    return tuple(str(fact) for fact in facts)


def _groups(folder: Path) -> Iterator[list[str]]:
    """Ranks whose processes are all at the same, with the main threads' stacks."""
    groups: dict[str, list[int]] = {}
    for path in sorted(folder.glob("rank-*.txt")):
        text = re.sub(_PROCESS, "process", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        groups.setdefault(text, []).append(int(path.name[5:9]))
    for text, ranks in sorted(groups.items(), key=lambda group: len(group[1])):
        who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        yield ["", f"{len(ranks)} of {sum(map(len, groups.values()))} ({who}):", *_main_threads(text)]
    if groups:
        yield ["", f"all threads: {folder}"]


def _main_threads(text: str) -> Iterator[str]:
    for process in text.split("\n\n"):
        lines = process.split("\nthread 1\n")[0].splitlines()
        yield f"  {lines[0]}"
        frames = [line for line in lines[1:] if line.startswith("  File")]
        yield from (f"  {line}" for line in frames[:_SHOWN_FRAMES])
        if len(frames) > _SHOWN_FRAMES:
            yield f"    ... and {len(frames) - _SHOWN_FRAMES} more"


def _log(folder: Path, attempt: int, fault: str) -> list[str]:
    """The end of the log of the rank at fault."""
    found = re.match(r"FAULT \S+ host=\S+ rank=(\d+): ", fault)
    paths = sorted((folder / "logs" / f"attempt-{attempt:03d}").glob(f"rank-{int(found[1]):04d}.*.log")) if found else []
    lines = [line for path in paths for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]]
    return ["", f"end of {paths[0]}:", *(f"  {line}" for line in lines)] if lines else []
