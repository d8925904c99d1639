"""A run is a folder: the resolved config, what was submitted, and what came of it."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.errors import ConfigError, ExitCode
from trainer.settings import load_config


class UnreachableError(ConfigError):
    """The scheduler does not answer now; the run is not touched by that."""


BACKENDS = {name: f"trainer.launch.{name}" for name in ("local", "slurm", "compose", "kubernetes")}
ACTIVE = ("pending", "running")  # states of a run that has not ended


def backend(name: str) -> ModuleType:
    """The module of a backend, loaded on first use.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in BACKENDS:
        raise ConfigError(f"backend={name}: not in this version; choose {' or '.join(BACKENDS)}")
    return importlib.import_module(BACKENDS[name])


@dataclass(frozen=True)
class Status:
    """How a run stands: `state` is pending, running, done, stopped, failed or lost; `detail` is a line for a person."""

    state: str
    detail: str


class Run:
    """A run's folder as the launch side sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def job(self) -> dict[str, Any]:
        """What was submitted last (job.json)."""
        path = self.folder / "job.json"
        try:
            job = json.loads(path.read_text(encoding="utf-8"))
            return dict(job, backend=str(job["backend"]))
        except FileNotFoundError:
            raise ConfigError(f"{self.folder}: holds no job.json, so nothing was submitted from it; name a run folder") from None
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{path}: is damaged; submit {self.folder}/config.yaml again to go on") from None

    @property
    def tasks(self) -> list[Run]:
        """The runs of a job array's tasks; empty for any other run."""
        return [Run(self.folder / str(number)) for number in range(self.job.get("tasks", 0))]

    def events(self) -> Iterator[dict[str, Any]]:
        """The records of events.jsonl, oldest first."""
        path = self.folder / "events.jsonl"
        if path.exists():
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                with suppress(ValueError):  # a line cut off by a kill
                    yield json.loads(line)

    def outcome(self, who: str) -> Status:
        """How a run ended, by its nodes' own words; `who` is the job's name in the line for a person."""
        job = self.job
        events = [event for event in self.events() if event["time"] >= job["submitted"]]
        ends = [event for event in events if event["event"] == "node_end"]
        last = [event for event in ends if event["attempt"] == ends[-1]["attempt"]]  # empty if there are none
        faults = [event["fault"] for event in last if event["fault"]]
        codes = {event["exit_code"] for event in last}
        batch = [event["exit_code"] for event in events if event["event"] == "job_end"][-1:]  # Slurm's batch job
        if batch and batch[0] and batch[0] not in codes:  # the last attempt ended before its nodes could say a word
            return Status("stopped" if batch[0] == ExitCode.STOPPED else "failed", f"{who}: {self.last_word()}")
        if faults:
            return Status("stopped" if codes == {ExitCode.STOPPED} else "failed", faults[0])
        if not last and not batch and not self.last_word():
            return Status("lost", f"{who} {self._never_started()}")
        if len(last) < job["nodes"]:
            lost = f"{job['nodes'] - len(last)} of {job['nodes']} nodes ended without a word"
            return Status("lost", f"{who}: {lost}; last line: {self.last_word()}")
        if ExitCode.STOPPED in codes:
            return Status("stopped", f"{who} stopped on request and saved; go on with: trainer submit {self.folder}/config.yaml")
        return Status("done", f"{who} ended well")

    def _never_started(self) -> str:
        after = self.job.get("after")
        if after and backend(self.job["backend"]).status(Run(Path(after))).state not in (*ACTIVE, "done"):
            return f"never started: it was to come after {after}, which did not end well"
        return "was cancelled before it started"

    def last_word(self) -> str:
        """Why a run ended that left no other word: the last error, or else line, in the newest log of a batch job or node."""
        logs = sorted((self.folder / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
        lines = logs[-1].read_text(encoding="utf-8", errors="replace").splitlines() if logs else []
        lines = [re.sub(r"^\S+ +\| ", "", line) for line in lines]  # compose's names of containers
        errors = [line for line in lines if line.startswith(("FAULT ", "error: "))]
        others = [line for line in lines if line.strip() and not line.startswith(("srun: ", "slurmstepd: "))]
        return (errors or others or lines or [""])[-1]

    def logs(self, rank: int | None = None) -> list[Path]:
        """The logs of the newest attempt: of one rank, or of all ranks."""
        attempts = sorted((self.folder / "logs").glob("attempt-*"))
        pattern = "rank-*.log" if rank is None else f"rank-{rank:04d}.*.log"
        return sorted(attempts[-1].glob(pattern)) if attempts else []


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def find_run(name: str | None) -> Run:
    """A run by its folder, by its name under runs/, or (None) the newest under runs/.

    Raises:
        ConfigError: there is none.
    """
    if name is None:
        jobs = sorted(Path("runs").glob("*/job.json"), key=lambda path: path.stat().st_mtime)
        if not jobs:
            raise ConfigError("RUN: no run under runs/; name a run folder")
        return Run(jobs[-1].parent)
    for folder in (Path(name), Path("runs") / name):
        if folder.is_dir():
            return Run(folder)
    raise ConfigError(f"RUN={name}: no such run folder; see ls runs/")


def checkpoints_of(name: str | None) -> Path | str:
    """Folder or URL of a run's checkpoints; any folder that has some will do, also one that no `submit` made.

    Raises:
        ConfigError: there is no such run.
    """
    folder = Path(name) if name and (Path(name) / "checkpoints").is_dir() else find_run(name).folder
    config = folder / "config.yaml"
    return (load_config(config).checkpoint.folder if config.is_file() else None) or folder / "checkpoints"
