"""The Slurm backend: sbatch of slurm/job.sbatch, copied into the run folder as it is; every setting is a flag of sbatch."""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import sys
from pathlib import Path

from trainer.config import Config
from trainer.errors import ConfigError, ExitCode
from trainer.launch.run import KIT, Command, Plan, Run, Status, new_run_dir, resolved, submission, write_plan

TEMPLATE = "job.sbatch"
_GONE = "Invalid job id"  # squeue's word for a job that the controller has forgotten


def plan(config: Config, run_dir: str) -> Plan:
    """What `submit` sends for a config: pure, nothing is touched."""
    files = {"config.yaml": resolved(config, run_dir), TEMPLATE: (KIT / "slurm" / TEMPLATE).read_text(encoding="utf-8")}
    environ = {
        "PYTHON": sys.executable,
        "RUN_DIR": run_dir,
        "MAX_REQUEUES": str(config.slurm.max_requeues),
        **config.container.env,
    }
    argv = ["sbatch", "--parsable", *_flags(config, run_dir), f"{run_dir}/{TEMPLATE}", f"{run_dir}/config.yaml"]
    return Plan("slurm", run_dir, files, [Command(argv, environ)])


def render(config: Config, run_dir: str) -> Plan:
    """The plan that `submit` would send."""
    return plan(config, run_dir)


def submit(config: Config) -> Run:
    """Send the job.

    Raises:
        ConfigError: no sbatch here, the run folder has a job that still goes on, or Slurm refused; with Slurm's own words.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError("backend=slurm: no sbatch on PATH; submit from a login host of the cluster, or set backend=local")
    run_dir = new_run_dir(config, make=True)
    with submission(config, run_dir):
        _refuse_if_in_use(run_dir)
        made = plan(config, run_dir)
        run = write_plan(made)
        (command,) = made.commands
        done = subprocess.run(command.argv, env={**_clean(), **command.environ}, capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(f"sbatch: {' '.join(done.stderr.split()) or 'failed without a word'}; correct the setting it names")
        run.keep(made, {"job_id": done.stdout.strip().split(";")[0], "user": getpass.getuser()})
    return run


def status(run: Run) -> Status:
    """How the run stands: while it is in the queue by squeue, afterwards by what the nodes wrote. Needs no accounting."""
    job = run.job["job_id"]
    done = _slurm("squeue", "--noheader", "--job", job, "--format=%T|%r|%N")
    if done.returncode and _GONE not in done.stderr:
        raise ConfigError(f"squeue: {' '.join(done.stderr.split())}; try again when the controller answers")
    if line := done.stdout.strip():
        state, reason, nodes = line.splitlines()[0].split("|")
        if state == "PENDING":
            return Status("pending", f"job {job} waits: {reason}")
        return Status("running", f"job {job} {state.lower()} on {nodes}")
    return _ended(run, job)


def cancel(run: Run, now: bool = False) -> str:
    """Cancel the job: Slurm gives the ranks its KillWait to save. `now` kills them. Returns a line for the user."""
    job = run.job["job_id"]
    if now:
        _slurm("scancel", "--full", "--signal=KILL", job)
    done = _slurm("scancel", job)
    if done.returncode:
        return f"job {job} is not running"
    return f"killed job {job}" if now else f"asked job {job} to save and stop; see trainer status {run.folder}"


def _flags(config: Config, run_dir: str) -> list[str]:
    resources, slurm = config.resources, config.slurm
    flags: dict[str, str | int | bool | None] = {
        "job-name": config.name,
        "nodes": resources.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": resources.gpus_per_node or None,
        "cpus-per-task": resources.cpus_per_node,
        "mem": f"{int(resources.memory_gb_per_node * 1024)}M" if resources.memory_gb_per_node else None,
        "time": resources.time_minutes,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "signal": f"B:USR1@{slurm.signal_seconds}",
        "output": f"{_escaped(run_dir)}/logs/slurm-%j.log",
        "export": "ALL",
        **{name.replace("_", "-"): value for name, value in slurm.options.items()},
    }
    found = []
    for name, value in flags.items():
        if value is True:
            found.append(f"--{name}")
        elif value is not None and value is not False:
            found.append(f"--{name}={value}")
    return found


def _escaped(path: str) -> str:
    """A path in a file name pattern of sbatch, where % and backslash mean something."""
    return path.replace("\\", "\\\\").replace("%", "%%")


def _ended(run: Run, job: str) -> Status:
    """A job that left the queue, by the nodes' own verdict."""
    ends = [event for event in run.events() if event["event"] == "node_end" and event["time"] >= run.job["submitted"]]
    last = [event for event in ends if event["attempt"] == ends[-1]["attempt"]]  # empty if there are none
    faults = [event["fault"] for event in last if event["fault"]]
    codes = {event["exit_code"] for event in last}
    if faults:
        return Status("failed", faults[0])
    if codes == {ExitCode.DONE}:
        return Status("done", f"job {job} ended well")
    if ExitCode.STOPPED in codes:
        return Status("stopped", f"job {job} stopped on request and saved; go on with: trainer submit {run.folder}/config.yaml")
    return Status("lost", f"job {job} left the queue without a word of its nodes; last line: {run.last_word()}")


def _refuse_if_in_use(run_dir: str) -> None:
    run = Run(Path(run_dir))
    if (run.folder / "job.json").exists() and run.job["backend"] == "slurm":
        now = status(run)
        if now.state in ("pending", "running"):
            raise ConfigError(f"run_dir={run_dir}: its run is still going on ({now.detail}); cancel it or use another folder")


def _slurm(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True, env=_clean())
    except FileNotFoundError:
        raise ConfigError(f"{argv[0]}: not on PATH; run this on a login host of the cluster") from None


def _clean() -> dict[str, str]:
    """This environment without another job's: sbatch inside an allocation would inherit options that exclude each other."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_", "PET_"))}
