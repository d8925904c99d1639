"""The Slurm backend: sbatch of slurm/job.sbatch, copied into the run folder as it is; every setting is a flag of sbatch or a
variable that the file names."""

from __future__ import annotations

import getpass
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.image import pinned
from trainer.launch.plan import KIT, PACKAGE, Command, Plan, Submission, keep, locked, new_run_dir, resolved, write_plan
from trainer.launch.run import ACTIVE, Run, Status, UnreachableError

TEMPLATE = "job.sbatch"
_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS")
# Options of sbatch that make no job, or none that can be followed; and what the kit has its own way for.
_REFUSED = {
    **dict.fromkeys(
        ("help", "usage", "version", "test-only", "quiet", "parsable", "wait", "wrap", "output", "error"),
        "makes no job that the kit can follow; remove it",
    ),
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node"), "the kit starts one task on each node; set resources.nodes"),
    "array": "the kit numbers the tasks; use trainer submit --array",
    "export": "the kit needs its variables on the nodes; use container.env",
    "requeue": "set slurm.max_requeues",
    "no-requeue": "set slurm.max_requeues=0",
}
_GONE = "Invalid job id"  # squeue's word for a job that the controller has forgotten


def plan(submission: Submission, run_dir: str) -> Plan:
    """What `submit` sends. Nothing is touched; Slurm is asked only how the run stands that this one is to come after.

    Raises:
        ConfigError: a path that cannot be mounted, or a run to come after that did not end well.
    """
    files = {TEMPLATE: (KIT / "slurm" / TEMPLATE).read_text(encoding="utf-8")}
    for folder, config in submission.folders(run_dir).items():
        files[f"{Path(folder).relative_to(run_dir)}/config.yaml".removeprefix("./")] = resolved(config, folder)
    argv = ["sbatch", "--parsable", *_flags(submission, run_dir), f"{run_dir}/{TEMPLATE}"]
    environ = {
        "RUN_DIR": run_dir,
        "MAX_REQUEUES": str(submission.config.slurm.max_requeues),
        **_image(submission.config, run_dir),
    }
    environ["STOP_AFTER"] = str(math.ceil(submission.simulate_preemption_after or 0) or "")
    environ |= {f"ON_NODE_{name}": value for name, value in submission.config.container.env.items()}
    return Plan("slurm", run_dir, files, [Command(argv, environ)])


def submit(submission: Submission) -> Run:
    """Send the job.

    Raises:
        ConfigError: no sbatch here, the run folder has a job that still goes on, or Slurm refused; with Slurm's own words.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("backend=slurm: no sbatch on PATH; submit from a login host of the cluster, or set backend=local")
    plan(submission, new_run_dir(submission.config))  # what it refuses leaves no folder behind
    run_dir = new_run_dir(submission.config, make=True)
    with locked(submission, run_dir):
        folders = submission.folders(run_dir)
        made = plan(submission, run_dir)
        run = write_plan(made)
        (command,) = made.commands
        sent = round(time.time(), 3)  # a job may be over before sbatch has answered
        done = subprocess.run(command.argv, env={**_clean(), **command.environ}, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"sbatch: {' '.join(done.stderr.split()) or 'failed without a word'}; correct the setting it names")
        job = done.stdout.strip().split(";")[0]
        if not job.isdecimal():
            raise ConfigError(f"sbatch: answered {' '.join(done.stdout.split())!r} instead of a job's number; see slurm.options")
        after = str(submission.after.folder) if submission.after else None
        nodes = submission.config.resources.nodes
        facts = {"job_id": job, "submitted": sent, "user": getpass.getuser(), "nodes": nodes, "after": after}
        keep(run, made, {**facts, "tasks": len(folders) if submission.array else 0})
        for number, task in enumerate(run.tasks):
            keep(task, made, {**facts, "job_id": f"{job}_{number}"})
    return run


def status(run: Run) -> Status:
    """How the run stands: while it is in the queue by squeue, afterwards by what the nodes wrote. Needs no accounting."""
    if run.tasks:
        return _together([status(task) for task in run.tasks])
    job = run.job["job_id"]
    done = _slurm("squeue", "--noheader", "--job", job, "--format=%T|%r|%N")
    if done.returncode and _GONE not in done.stderr:
        raise UnreachableError(f"squeue: {' '.join(done.stderr.split())}; try again when the controller answers")
    if line := done.stdout.strip():
        state, reason, nodes = line.splitlines()[0].split("|")
        if state == "PENDING":
            return Status("pending", f"job {job} waits: {reason}")
        return Status("running", f"job {job} {state.lower()} on {nodes}")
    return run.outcome(f"job {job}")


def cancel(run: Run, now: bool = False) -> str:
    """Cancel the job: Slurm gives the ranks its KillWait to save. `now` kills them. Returns a line for the user."""
    job = run.job["job_id"]
    if status(run).state not in ACTIVE:
        return f"job {job} is not running"
    if now:
        _slurm("scancel", "--signal=KILL", f"{job}.0")  # the step; of a whole job Slurm makes a plain cancel of it
    _slurm("scancel", job)
    return f"killed job {job}" if now else f"asked job {job} to save and stop; see trainer status {run.folder}"


def _flags(submission: Submission, run_dir: str) -> list[str]:
    config = submission.config
    resources, slurm = config.resources, config.slurm
    options: dict[str, str | int | bool | None] = {name.replace("_", "-"): value for name, value in slurm.options.items()}
    for name, value in options.items():
        if name in _REFUSED:
            raise ConfigError(f"slurm.options.{name}={value}: {_REFUSED[name]}")
    if "\\" in run_dir:
        raise ConfigError(f"run_dir={run_dir}: Slurm cannot name a log below a backslash; use another folder")
    flags: dict[str, str | int | bool | None] = {
        "job-name": config.name,
        "nodes": resources.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": resources.gpus_per_node or None,
        "cpus-per-task": resources.cpus_per_node,
        "mem": f"{max(1, int(resources.memory_gb_per_node * 1024))}M" if resources.memory_gb_per_node else None,
        "time": resources.slurm_minutes,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "signal": f"B:USR1@{slurm.signal_seconds}",
        "array": f"0-{len(submission.configs) - 1}" if submission.array else None,
        "dependency": _dependency(submission),
        "kill-on-invalid-dep": "yes" if submission.after else None,
        "output": f"{run_dir.replace('%', '%%')}{'/%a' if submission.array else ''}/logs/slurm-%j.log",
        "export": "ALL",
        **options,
    }
    found = []
    for name, value in flags.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None and value is not False:
            found.append(f"--{name}={value}")
    return found


def _image(config: Config, run_dir: str) -> dict[str, str]:
    """What job.sbatch is told about Python and the image."""
    container = config.container
    if container.runtime == "none":
        return {"PYTHON": sys.executable, "RUNTIME": "none"}
    for folder in (run_dir, os.getcwd()):
        if set(":,") & set(folder):
            raise ConfigError(
                f"container.runtime={container.runtime}: {folder} has a colon or comma and cannot be mounted; move it"
            )
    image = pinned()
    return {
        "PYTHON": container.python,
        "RUNTIME": container.runtime,
        "IMAGE": container.image or image.name,
        "IMAGE_CUDA": container.cuda_version or ("" if container.image else image.cuda),
        "KIT": "" if container.image else str(PACKAGE),
        "MOUNTS": ",".join(container.mounts),
    }


def _dependency(submission: Submission) -> str | None:
    """sbatch's word for the run that has to end well first; None if there is none or it has."""
    if submission.after is None:
        return None
    name = f"--after {submission.after.folder}"
    if "dependency" in submission.config.slurm.options:
        raise ConfigError(f"{name}: slurm.options.dependency is set too; give one of the two")
    if submission.after.job["backend"] != "slurm":
        raise ConfigError(f"{name}: is no run on Slurm; name one that is")
    now = status(submission.after)
    if now.state not in (*ACTIVE, "done"):
        raise ConfigError(f"{name}: has not ended well ({now.detail}); submit it again first")
    return f"afterok:{submission.after.job['job_id']}" if now.state in ACTIVE else None


def _together(tasks: list[Status]) -> Status:
    """An array goes on while one of its tasks does, and ends well if all do."""
    states = [task.state for task in tasks]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    for state in ("running", "pending", "failed", "lost", "stopped"):
        if state in states:
            first = tasks[states.index(state)]
            return Status(state, f"{counted}; {first.detail}" if len(tasks) > 1 else first.detail)
    return Status("done", counted)


def _slurm(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, env=_clean())
    except FileNotFoundError:
        raise ConfigError(f"{argv[0]}: not on PATH; run this on a login host of the cluster") from None


def _clean() -> dict[str, str]:
    """This environment without another job's: sbatch inside an allocation would inherit options that exclude each other.

    What says which cluster this is, and the user's own defaults (SBATCH_*), stay.
    """
    inside = "SLURM_JOB_ID" in os.environ
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PET_") and not (inside and name.startswith("SLURM_") and name not in _CLUSTER)
    }
