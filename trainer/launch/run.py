"""A run is a folder: the resolved config, what was submitted, and what came of it."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.errors import ConfigError, ExitCode
from trainer.settings import check_resume, dump_config

PACKAGE = Path(__file__).parent.parent
KIT = PACKAGE / "_kit" if (PACKAGE / "_kit").is_dir() else PACKAGE.parent  # slurm/ and k8s/: in a wheel, or in a checkout


@dataclass(frozen=True)
class Command:
    """One process to start: what it runs, and the variables it gets on top of the environment."""

    argv: list[str]
    environ: dict[str, str] = field(default_factory=dict)

    def shell(self) -> str:
        """The same as a line for a shell."""
        return " ".join([*(f"{name}={shlex.quote(value)}" for name, value in self.environ.items()), shlex.join(self.argv)])


@dataclass(frozen=True)
class Plan:
    """What a submission does, before it does it: files for the run folder, then commands."""

    backend: str
    run_dir: str
    files: dict[str, str]
    commands: list[Command]

    def text(self) -> str:
        """What `trainer render` prints and what lies in RUN/plan.txt."""
        parts = [f"# {self.backend}: run folder {self.run_dir}"]
        parts += [f"# file {name}\n{content.rstrip()}" for name, content in self.files.items()]
        parts += [f"# command\n{command.shell()}" for command in self.commands]
        return "\n\n".join(parts) + "\n"


@dataclass(frozen=True)
class Submission:
    """What is to be sent: one config, or those of a job array's tasks, and what is asked for beyond them."""

    configs: list[Config]
    array: bool = False
    after: Run | None = None  # a run that has to end well first
    simulate_preemption_after: float | None = None  # seconds after which the first attempt is warned as by a preemption

    @property
    def config(self) -> Config:
        """The config, or that of the first task: all agree in what the scheduler is told."""
        return self.configs[0]

    def refuse_queue(self) -> None:
        """For a backend without a queue.

        Raises:
            ConfigError: something was asked for that only a queue can do.
        """
        wanted = {"--array": self.array, "--after": self.after, "--simulate-preemption-after": self.simulate_preemption_after}
        for option, given in wanted.items():
            if given:
                raise ConfigError(f"{option}: backend={self.config.backend} has no queue for it; set backend=slurm")

    def folders(self, run_dir: str) -> dict[str, Config]:
        """The folder of each run: `run_dir`, or for an array the folders 0, 1, ... below it."""
        if not self.array:
            return {run_dir: self.config}
        return {f"{run_dir}/{number}": config for number, config in enumerate(self.configs)}


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

    def keep(self, plan: Plan, job: dict[str, Any]) -> None:
        """Write what was sent, whole or not at all."""
        job = {"backend": plan.backend, "submitted": round(time.time(), 3), "workdir": os.getcwd(), **job}
        job["commands"] = [asdict(command) for command in plan.commands]
        write_whole(self.folder / "job.json", json.dumps(job, indent=2) + "\n")

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
        ends = [event for event in self.events() if event["event"] == "node_end" and event["time"] >= job["submitted"]]
        last = [event for event in ends if event["attempt"] == ends[-1]["attempt"]]  # empty if there are none
        faults = [event["fault"] for event in last if event["fault"]]
        codes = {event["exit_code"] for event in last}
        if faults:
            return Status("failed", faults[0])
        if len(last) < job["nodes"]:
            word = self.last_word()
            if not last and not word and job.get("after"):
                return Status("lost", f"{who} never started: it was to come after {job['after']}, which did not end well")
            return Status(
                "lost", f"{who}: {job['nodes'] - len(last)} of {job['nodes']} nodes ended without a word; last line: {word}"
            )
        if ExitCode.STOPPED in codes:
            return Status("stopped", f"{who} stopped on request and saved; go on with: trainer submit {self.folder}/config.yaml")
        return Status("done", f"{who} ended well")

    def last_word(self) -> str:
        """The last line of the newest log of a node or batch job: why a run ended that left no other word."""
        logs = sorted((self.folder / "logs").glob("*.log"), key=lambda path: path.stat().st_mtime)
        lines = logs[-1].read_text(encoding="utf-8", errors="replace").splitlines() if logs else []
        return lines[-1] if lines else ""

    def logs(self, rank: int | None = None) -> list[Path]:
        """The logs of the newest attempt: of one rank, or of all ranks."""
        attempts = sorted((self.folder / "logs").glob("attempt-*"))
        pattern = "rank-*.log" if rank is None else f"rank-{rank:04d}.*.log"
        return sorted(attempts[-1].glob(pattern)) if attempts else []


def new_run_dir(config: Config, make: bool = False) -> str:
    """The folder for a new run, absolute: the config's own, or RUNS_DIR/NAME-DATE-TIME.

    Args:
        make: make it, so that no other submission can take it.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = base = Path(config.run_dir or f"{config.runs_dir}/{config.name}-{stamp}").absolute()
    for number in itertools.count(2):
        if config.run_dir or (not make and not path.exists()):
            break
        try:
            path.mkdir(parents=True)
            break
        except FileExistsError:
            path = base.with_name(f"{base.name}-{number}")
        except OSError as error:
            raise ConfigError(
                f"runs_dir={config.runs_dir}: {error.strerror or error}; choose a folder that can be written"
            ) from None
    return str(path)


@contextmanager
def locked(submission: Submission, run_dir: str) -> Iterator[None]:
    """One submission at a time into a run folder, and none that its checkpoints would refuse.

    Raises:
        ConfigError: another one is going on, or the config cannot go on from the folder's checkpoints.
    """
    for folder, config in submission.folders(run_dir).items():
        check_resume(config, Path(folder))
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        lock = open(Path(run_dir) / ".submit", "w")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise ConfigError(f"run_dir={run_dir}: {error.strerror or error}; choose a folder that can be written") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"run_dir={run_dir}: another submission into it is going on; use another folder") from None
        except OSError:  # a file system without locks
            pass
        yield


def resolved(config: Config, run_dir: str) -> str:
    """The text of RUN/config.yaml."""
    return dump_config(config.model_copy(update={"run_dir": run_dir}))


def write_plan(plan: Plan) -> Run:
    """Make the run folder and write the plan and its files into it.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = Path(plan.run_dir)
    try:
        for name, content in {**plan.files, "plan.txt": plan.text()}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, content)
            if name.endswith("config.yaml"):
                (folder / name).with_name("logs").mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir={folder}: {error.strerror or error}; choose a folder that can be written") from None
    return Run(folder)


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
