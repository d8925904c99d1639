"""A run on Slurm with submitit's interface, for programs that know submitit's jobs (`as_completed`, `job.result()`, asyncio).

submitit itself waits for a pickle and asks Slurm's accounting; a rank that is killed leaves no pickle, and without accounting it
would wait for ever. Here the queue and what the nodes wrote say how the job stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from submitit import SlurmJob
from submitit.core.utils import FailedJobError

from trainer.launch.run import Status

if TYPE_CHECKING:
    from trainer.launch.job import Job

# Slurm's words for how a run stands
_STATES = {
    "pending": "PENDING",
    "running": "RUNNING",
    "done": "COMPLETED",
    "stopped": "CANCELLED",
    "failed": "FAILED",
    "lost": "FAILED",
}


class SubmititJob(SlurmJob[Status]):
    """`result()` is the run's last status; `exception()` has its fault line; `stdout()` is the batch log."""

    def __init__(self, job: Job) -> None:
        self._run_job = job  # first: submitit asks for it while it is being made
        super().__init__(folder=job.folder / "logs", job_id=job.run.job["job_id"], tasks=[0])

    @property
    def state(self) -> str:
        """Slurm's word for how it stands."""
        return _STATES[self._run_job.status().state]

    def get_info(self, mode: str = "force") -> dict[str, str]:
        """The few facts that need no accounting."""
        return {"JobID": self.job_id, "State": self.state}

    def done(self, force_check: bool = False) -> bool:
        """Whether it has ended, well or not."""
        return not self._run_job.active()

    def results(self) -> list[Status]:
        """Wait for the end.

        Raises:
            FailedJobError: it did not end well; the text is its fault line.
        """
        self.wait()
        now = self._run_job.status()
        if now.state != "done":
            raise FailedJobError(now.detail)
        return [now]

    def exception(self) -> FailedJobError | None:
        """What `result()` would raise."""
        try:
            self.results()
        except FailedJobError as error:
            return error
        return None

    def stdout(self) -> str | None:
        """The batch job's log, or None before there is one."""
        logs = sorted((self._run_job.folder / "logs").glob("slurm-*.log"))
        return "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs) or None

    def stderr(self) -> str | None:
        """None: it is in `stdout()`."""
        return None
