"""Real jobs on the lab's Slurm for the tests: send, follow, and what the queue says."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from tests.conftest import ROOT, wait_until
from tests.jobs import TRAINER, command, events, logs, overrides

TWO_BY_TWO = ["resources.nodes=2", "resources.gpus_per_node=2"]


def slurm(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    return done.stdout + done.stderr


def queue(job: str) -> str:
    """State and reason, or nothing when the job has left the queue."""
    done = subprocess.run(["squeue", "-h", "-j", job, "-o", "%T %r"], capture_output=True, text=True)
    assert not done.stderr or "Invalid job id" in done.stderr, done.stderr
    return done.stdout.strip()


def let_start_now(job: str, run: Path) -> None:
    """A requeued job waits two minutes (BeginTime), and no option of 22.05 shortens that. By then the nodes are clean: a start in
    the same second as the end was seen to fail without a word."""
    assert wait_until(lambda: queue(job) == "PENDING BeginTime", 40), (
        queue(job) + slurm("scontrol", "show", "job", job) + batch_log(run)
    )
    assert wait_until(lambda: set(slurm("sinfo", "-hNo", "%T").split()) == {"idle"}, 40), slurm("sinfo", "-N")
    time.sleep(1)

    def started() -> bool:
        slurm("scontrol", "update", f"jobid={job}", "StartTime=now")  # refused while the first run is still being cleaned up
        return queue(job).startswith("RUNNING")

    assert wait_until(started, 30), slurm("scontrol", "show", "job", job) + batch_log(run)


def submit(run: Path, *settings: str) -> str:
    """`trainer submit` on Slurm; returns the job's id."""
    code, output = command(*TRAINER, "submit", str(ROOT / "slurm" / "site.yaml"), *settings, overrides(run))
    assert code == 0, output
    return str(json.loads((run / "job.json").read_text())["job_id"])


def follow(run: Path) -> str:
    code, output = command(*TRAINER, "logs", "--follow", str(run))
    assert code == 0, output + logs(run)
    return output


def batch_log(run: Path) -> str:
    return "".join(path.read_text() for path in run.glob("logs/slurm-*.log"))


def exit_code(run: Path) -> int | None:
    """What the batch job's last attempt ended with, by the run's own record."""
    ends = events(run, "job_end")
    return int(ends[-1]["exit_code"]) if ends else None
