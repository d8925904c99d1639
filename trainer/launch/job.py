"""Submitting and following from Python: what the command line does, as an object.

from trainer import load_config, submit

job = submit(load_config("slurm/site.yaml", "configs/imagenet.yaml", "resources.nodes=2"))
print(job.status())
job.wait()
"""

from __future__ import annotations

import importlib
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer import yaml12
from trainer.config import Config
from trainer.errors import ConfigError, ExitCode, KitError
from trainer.launch.plan import Plan, Submission, new_run_dir
from trainer.launch.run import ACTIVE, Run, Status, UnreachableError, backend, find_run
from trainer.settings import check

_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 600.0


class JobFailedError(KitError):
    """A job ended otherwise than well; the text is its fault line, or what is known."""

    exit_code = ExitCode.RANK_FAILED


def submit(config: Config, *, after: Job | None = None, simulate_preemption_after: float | None = None) -> Job:
    """Check a config and send it to its backend.

    Args:
        after: a job on Slurm that has to end well before this one starts.
        simulate_preemption_after: seconds; the first attempt is then warned as by a preemption, saves, and is requeued.

    Raises:
        ConfigError: a setting is refused, here or by the scheduler.
    """
    return send(Submission([config], after=after.run if after else None, simulate_preemption_after=simulate_preemption_after))


def submit_array(configs: list[Config], *, after: Job | None = None) -> Job:
    """Send configs that differ in what they learn as the tasks of one Slurm job array; `.tasks` has a job for each.

    Raises:
        ConfigError: a setting is refused, or they differ in what Slurm is asked for.
    """
    return send(Submission(configs, array=True, after=after.run if after else None))


def send(submission: Submission) -> Job:
    """Check what is to be submitted and send it."""
    return Job(_backend_of(submission).submit(submission))


def plan(submission: Submission) -> Plan:
    """What `send` would do, into the folder that it would take now."""
    found: Plan = _backend_of(submission).plan(submission, new_run_dir(submission.config))
    return found


def variants(sweeps: list[str]) -> list[list[str]]:
    """The overrides of each task of an array, from `section.key=V1,V2,...`; of several, every combination.

    Raises:
        ConfigError: a text is no such list.
    """
    found = []
    for sweep in sweeps:
        dotted, equals, values = sweep.partition("=")
        try:
            listed = yaml12.load(f"[{values}]") if equals and dotted and values.strip() else None
        except ConfigError:
            listed = None
        if not listed:
            raise ConfigError(f"--array {sweep}: write section.key=V1,V2,... such as optimizer.args.lr=0.1,0.2")
        found.append([f"{dotted}={json.dumps(value)}" for value in listed])
    return [list(combination) for combination in itertools.product(*found)] if found else []


def _backend_of(submission: Submission) -> ModuleType:
    if not submission.configs:
        raise ConfigError("submit_array([]): no configs; give at least one")
    seconds = submission.simulate_preemption_after
    if seconds is not None and not 0 < seconds < float("inf"):
        raise ConfigError(f"simulate_preemption_after={seconds}: is no number of seconds above 0")
    for config in submission.configs:
        check(config)
        for name in ("name", "backend", "resources", "container", "slurm", "runs_dir", "run_dir"):
            if getattr(config, name) != getattr(submission.config, name):
                raise ConfigError(f"--array {name}: the tasks of an array run on the same machines; submit them one by one")
    places = [config.checkpoint.folder for config in submission.configs if config.checkpoint.folder]
    if shared := [each for each in places if places.count(each) > 1]:
        raise ConfigError(f"checkpoint.folder={shared[0]}: several tasks of the array would keep theirs there; give each its own")
    return backend(submission.config.backend)


class Job:
    """A submitted run."""

    def __init__(self, run: Run) -> None:
        self.run = run

    @classmethod
    def of(cls, name: str | None = None) -> Job:
        """The job of a run folder, of a name under runs/, or (None) the newest."""
        return cls(find_run(name))

    @property
    def _backend(self) -> ModuleType:
        return backend(self.run.job["backend"])

    @property
    def tasks(self) -> list[Job]:
        """The jobs of an array's tasks; empty for any other job."""
        return [Job(run) for run in self.run.tasks]

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.folder

    @property
    def number(self) -> str:
        """The scheduler's number for it as ` job 4711`, or nothing where there is no scheduler."""
        return f" job {self.run.job['job_id']}" if "job_id" in self.run.job else ""

    def status(self) -> Status:
        """How it stands now."""
        found: Status = self._backend.status(self.run)
        return found

    def active(self) -> bool:
        """Whether it waits or runs."""
        return self.status().state in ACTIVE

    def logs(self, follow: bool = False, rank: int | None = 0) -> Iterator[str]:
        """The lines that a rank printed in the newest attempt, or (None) those of all ranks with the rank before each.

        With `follow` they come as they are written, until the job ends, over all attempts. Where a node ended before it had
        ranks, its own lines say why.

        Raises:
            ConfigError: there is no log.
        """
        if hasattr(self._backend, "logs"):  # its logs are not in this folder
            yield from self._backend.logs(self.run, follow, rank)
            return
        if self.tasks:
            raise ConfigError(f"RUN={self.folder}: is a job array; name one of its tasks, such as {self.tasks[0].folder}")
        shown: dict[Path, int] = {}
        while True:
            active = follow and self._patient_status().state in ACTIVE
            for path in self.run.logs(rank):
                yield from self._new_lines(path, shown, whole_lines=active, prefix=rank is None)
            if not active:
                break
            time.sleep(_POLL_SECONDS)
        if not shown:
            for path in sorted((self.folder / "logs").glob("*.log")):
                yield from self._new_lines(path, shown, whole_lines=False, prefix=True)
        if not shown:
            raise ConfigError(f"RUN={self.folder}: no log of rank {rank} yet; see {self.folder}/logs")

    @staticmethod
    def _new_lines(path: Path, shown: dict[Path, int], whole_lines: bool, prefix: bool) -> Iterator[str]:
        """What came since the last look, without a last line that is still being written."""
        with open(path, "rb") as file:
            file.seek(shown.get(path, 0))
            block = file.read()
        if whole_lines:
            block = block[: block.rfind(b"\n") + 1]
        shown[path] = shown.get(path, 0) + len(block)
        for line in block.decode("utf-8", "replace").splitlines():
            yield f"{path.name.split('.')[0]}: {line}" if prefix else line

    def wait(self, timeout_seconds: float | None = None) -> Status:
        """Wait for the end, by what the scheduler's queue and the nodes say: accounting is not needed.

        Raises:
            JobFailedError: it ended otherwise than well, or was stopped; the text says by what.
            TimeoutError: it goes on after `timeout_seconds`.
        """
        until = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while (now := self._patient_status()).state in ACTIVE:
            if until is not None and time.monotonic() > until:
                raise TimeoutError(f"{self.folder}: {now.detail} after {timeout_seconds} s")
            time.sleep(_POLL_SECONDS)
        if now.state != "done":
            raise JobFailedError(now.detail)
        return now

    def _patient_status(self) -> Status:
        """The status, when the scheduler answers: a controller that is being restarted must not end a wait."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self.status()
            except UnreachableError:
                if time.monotonic() > until:
                    raise
                time.sleep(5)

    def cancel(self, now: bool = False) -> str:
        """Ask it to save and stop, or (`now`) kill it; returns a line for a person."""
        line: str = self._backend.cancel(self.run, now)
        return line

    @property
    def submitit_job(self) -> Any:
        """The same job as submitit knows jobs: a `submitit.SlurmJob` whose state, waiting and result need no accounting.

        Raises:
            ConfigError: not a Slurm job, or submitit is not installed.
        """
        if "job_id" not in self.run.job:
            raise ConfigError(f"backend={self.run.job['backend']}: submitit_job is for jobs on Slurm")
        try:
            return importlib.import_module("trainer.launch.submitit_job").SubmititJob(self)
        except ImportError:
            raise ConfigError("submitit_job: submitit is not installed; pip install 'ddp-job-kit[slurm]'") from None
