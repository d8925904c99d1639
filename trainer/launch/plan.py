"""A submission is a printable plan first: files for the run folder, then commands."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.launch.run import ACTIVE, Run, backend, write_whole
from trainer.settings import check_resume, dump_config

PACKAGE = Path(__file__).parent.parent
# slurm/, k8s/ and docker-compose.yml: in a wheel, or in a checkout
KIT = PACKAGE / "_kit" if (PACKAGE / "_kit").is_dir() else PACKAGE.parent


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
    shown: str | None = None  # the file that is all of the text but for comments, so that others can read it

    def text(self) -> str:
        """What `trainer render` prints and what lies in RUN/plan.txt."""
        if self.shown:
            commands = "".join(f"# command: {command.shell()}\n" for command in self.commands)
            return f"# {self.backend}: run folder {self.run_dir}\n{commands}{self.files[self.shown]}"
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


def new_run_dir(config: Config, make: bool = False) -> str:
    """The folder for a new run, absolute: the config's own, or RUNS_DIR/NAME-DATE-TIME.

    Args:
        make: make it, so that no other submission can take it.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = base = Path(config.run_dir or f"{config.runs_dir}/{config.name}-{stamp}").absolute()
    if not str(path).isprintable():
        raise ConfigError(f"run_dir={str(path)!r}: has a character that cannot be printed; use another folder")
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
        for folder in dict.fromkeys([run_dir, *submission.folders(run_dir)]):
            _refuse_if_in_use(Run(Path(folder)))
        yield


def _refuse_if_in_use(run: Run) -> None:
    """Whatever backend it runs on: a second job would take the first one's place in job.json."""
    if (run.folder / "job.json").exists():
        now = backend(run.job["backend"]).status(run)
        if now.state in ACTIVE:
            raise ConfigError(f"run_dir={run.folder}: its run is still going on ({now.detail}); cancel it or use another folder")


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


def keep(run: Run, plan: Plan, facts: dict[str, Any]) -> None:
    """Write down in job.json what was sent."""
    commands = [asdict(command) for command in plan.commands]
    job = {"backend": plan.backend, "submitted": round(time.time(), 3), "workdir": os.getcwd(), **facts, "commands": commands}
    write_whole(run.folder / "job.json", json.dumps(job, indent=2) + "\n")
