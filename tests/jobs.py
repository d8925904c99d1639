"""Real runs for the tests: the command line in a process of its own, and what a run folder says afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.conftest import DIGITS, ROOT, STARTED
from tests.conftest import wait_until as wait_until
from trainer.train.parts import read

TRAINER = [sys.executable, "-m", "trainer"]
SHORT = [str(DIGITS), "training.max_steps=20", "training.log_every_steps=1"]  # a run of a second or two


def start(*argv: str, cwd: Path = ROOT, **environ: str) -> subprocess.Popen[str]:
    """Start a command; its output is read by `finish`."""
    foreign = ("PET_", "RANK", "WORLD_SIZE", "MAKE", "MFLAGS")  # under `make test` another make would say which folder it enters
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    STARTED.append(process)
    return process


def finish(process: subprocess.Popen[str], seconds: float = 90) -> tuple[int, str]:
    """Exit code and output; a process that does not end is killed and its output is in the error."""
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"no end within {seconds} s:\n{process.communicate()[0]}") from None
    return process.returncode, output


def command(*argv: str, cwd: Path = ROOT, **environ: str) -> tuple[int, str]:
    return finish(start(*argv, cwd=cwd, **environ))


def overrides(run: Path) -> str:
    """`run_dir=...` with the path quoted for YAML, whatever is in it."""
    return f"run_dir={json.dumps(str(run))}"


def roll_call(run: Path) -> dict[str, Any]:
    """What came of the last roll call of a run."""
    return events(run, "roll_call")[-1]


def records(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may still be written to: a reader can meet the first half of a single write."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in records(run / "events.jsonl") if event["event"] == kind]


def metrics(run: Path, kind: str = "train") -> list[dict[str, Any]]:
    return [record for record in records(run / "metrics.jsonl") if record["kind"] == kind]


def losses(run: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in metrics(run)]


def saved(run: Path) -> dict[str, torch.Tensor]:
    return dict(read(run / "checkpoints" / "latest")["model"])


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], within: float = 0) -> bool:
    return first.keys() == second.keys() and all((first[k] - second[k]).abs().max() <= within for k in first)


def logs(run: Path) -> str:
    """All logs of a run, for the message of a failing test."""
    return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(run.rglob("*.log")))


def processes_of(run: Path) -> list[int]:
    """Pids of live processes, ranks and workers included, that have something of this run open or on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "cmdline").read_bytes()
            files = [os.readlink(link) for link in (entry / "fd").iterdir()]
            zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        if not zombie and (str(run).encode() in words or any(file.startswith(str(run)) for file in files)):
            found.append(int(entry.name))
    return found
