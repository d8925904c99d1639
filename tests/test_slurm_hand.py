"""What befalls job.sbatch where nobody looks: warnings at bad moments, logs that cannot be written, one node that never starts, the
user's own environment. Most nodes here run a stand-in for Python that only waits, so that a test takes seconds."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT, wait_until
from tests.jobs import SHORT, TRAINER, command, metrics, overrides
from tests.lab.machines import LOGIN
from tests.lab.slurm import Cluster
from tests.slurm_jobs import batch_log, exit_code, let_start_now, queue, slurm, submit
from tests.test_runs import slow
from trainer.errors import ExitCode
from trainer.launch.job import Job, submit_array
from trainer.settings import load_config

pytestmark = pytest.mark.slurm
BATCH = str(ROOT / "slurm" / "job.sbatch")

# Stands in for the nodes' Python: says that it came up as the kit does, then does what the test wants. A node ends only after the
# other one came: srun kills the rest of a step of which a node failed, at times before the other node came up, and once only after --wait.
NODE = """#!/bin/bash
up() { : >"$TRAINER_EXIT_CODES/$PET_NODE_RANK"; }
end() { echo "$1" >"$TRAINER_EXIT_CODES/$PET_NODE_RANK"; exit "$1"; }
stop() { end 160; }
trap stop USR1 TERM
nap() { sleep "$1" & wait $!; }
came() { until [ -e "$TRAINER_EXIT_CODES/$1" ]; do sleep 0.1; done; }
%s
"""


def send(shared: Path, what: str, *flags: str, **environ: str) -> tuple[str, Path]:
    """sbatch by hand with the stand-in; returns the job's id and its run folder."""
    python = shared / "python"
    python.write_text(NODE % what)
    python.chmod(0o755)
    run = shared / "run"
    argv = ["sbatch", "--parsable", "--nodes=2", f"--output={shared.parent}/%j.log", *flags, BATCH, "config.yaml"]
    inherited = {**os.environ, "PYTHON": str(python), "RUN_DIR": str(run), **environ}
    done = subprocess.run(argv, cwd=shared, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), run


def told(shared: Path, job: str) -> str:
    log = shared.parent / f"{job}.log"
    return log.read_text() if log.exists() else ""


def ended(shared: Path, job: str) -> str:
    assert wait_until(lambda: queue(job) in ("", "PENDING BeginTime"), 90), queue(job)  # longer than srun's --wait
    return told(shared, job)


def running(job: str) -> bool:
    return queue(job).startswith("RUNNING")


def test_a_warning_while_python_still_starts_is_a_stop(shared: Path) -> None:
    job, run = send(shared, "trap - USR1 TERM; sleep 30")
    assert wait_until(lambda: running(job) and "node 0 at" in told(shared, job))
    time.sleep(1)
    slurm("scancel", "--batch", "--signal=USR1", job)
    assert "ended with 160; requeueing (1 of 3)" in ended(shared, job) and exit_code(run) == 160


@pytest.mark.parametrize("moment", ["scontrol show", "srun --nodes=2", "scontrol requeue"])
@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_warning_while_the_job_starts_or_leaves_is_a_stop(name: str, moment: str, shared: Path) -> None:
    """Before there is a step, before it has tasks, and after all of them ended: Slurm's own commands are slow there, as on a busy site."""
    tool, word = moment.split()
    slow, at = shared / "slow", shared / "at"
    slow.mkdir()
    (slow / tool).write_text(
        f'#!/bin/sh\n[ "$1" != {word} ] || {{ : >{shlex.quote(str(at))}; sleep 3; }}\nexec {shutil.which(tool)} "$@"\n'
    )
    (slow / tool).chmod(0o755)
    ends = "up; came 0; came 1; end 160" if tool + word == "scontrolrequeue" else "up; nap 60"
    job, run = send(shared, ends, PATH=f"{slow}:{os.environ['PATH']}")
    assert wait_until(at.exists, 20), told(shared, job)
    slurm("scancel", "--batch", f"--signal={name}", job)
    assert wait_until(lambda: queue(job) == "PENDING BeginTime", 30), queue(job) + told(shared, job)
    assert "ended with 160; requeueing (1 of 3)" in told(shared, job) and exit_code(run) == 160


def test_a_node_on_which_the_kit_does_not_start_is_final_and_no_good_stop(shared: Path) -> None:
    job, run = send(shared, '[ "$PET_NODE_RANK" = 0 ] || { came 0; exit 127; }; up; nap 60')
    log = ended(shared, job)
    assert "the kit came up on 1 of 2 nodes; the lines above say why" in log and "requeueing" not in log
    assert exit_code(run) == 1


@pytest.mark.parametrize(("codes", "verdict", "again"), [("160 3", 3, False), ("4 160", 4, False), ("162 164", 162, True)])
def test_a_final_code_of_any_node_is_the_jobs(codes: str, verdict: int, again: bool, shared: Path) -> None:
    first, second = codes.split()
    job, run = send(
        shared, f'trap "" TERM USR1; up; came 0; came 1; [ "$PET_NODE_RANK" = 0 ] && end {first}; sleep 1; end {second}'
    )
    assert ("requeueing" in ended(shared, job)) == again and exit_code(run) == verdict


def test_the_nodes_learn_when_the_job_has_to_end(shared: Path) -> None:
    job, run = send(shared, 'echo "$TRAINER_END_TIME" >"$RUN_DIR/end"; up; end 0', "--time=10")
    assert wait_until(lambda: not queue(job), 30), told(shared, job)
    assert abs(float((run / "end").read_text()) - time.time() - 600) < 60


def test_a_run_with_a_stop_file_is_not_requeued(shared: Path) -> None:
    job, run = send(shared, 'up; came 0; came 1; : >"$RUN_DIR/stop"; end 160')
    assert f"ended with 160; not requeued while there is {run}/stop" in ended(shared, job)
    assert not queue(job) and exit_code(run) == 160


def test_a_log_that_cannot_be_written_stops_neither_the_job_nor_its_save(shared: Path) -> None:
    job, run = send(shared, "up; nap 60", "--output=/dev/full")
    assert wait_until(lambda: len(list(run.glob("logs/exit-codes-*/*"))) == 2)
    slurm("scancel", "--batch", "--signal=USR1", job)
    assert wait_until(lambda: queue(job).startswith("PENDING"), 30), queue(job)
    assert exit_code(run) == 160


@pytest.mark.parametrize("flag", ["--export=NONE", "--export=RUN_DIR,PYTHON", "--ntasks-per-node=4"])
def test_flags_of_sbatch_that_break_others(flag: str, shared: Path) -> None:
    seen = 'up; echo "$PET_NODE_RANK $PATH" >>"$TRAINER_EXIT_CODES/../seen"; nap 1; end 0'
    python = shared / "python"
    python.write_text(NODE % seen)
    python.chmod(0o755)
    batch = shared / "job.sbatch"  # --export=NONE keeps PYTHON from it
    batch.write_text(Path(BATCH).read_text().replace("PYTHON=${PYTHON:-python3}", f"PYTHON={shlex.quote(str(python))}"))
    argv = ["sbatch", "--wait", "--parsable", "--nodes=2", f"--output={shared.parent}/%j.log", flag, str(batch), "config.yaml"]
    done = subprocess.run(argv, cwd=shared, env={**os.environ, "RUN_DIR": str(shared / "run")}, capture_output=True, text=True)
    job = done.stdout.strip()
    assert done.returncode == 0, done.stderr + told(shared, job)
    (run,) = {path.parents[1] for path in shared.rglob("logs/seen")}
    lines = sorted((run / "logs" / "seen").read_text().splitlines())
    assert [line.split()[0] for line in lines] == ["0", "1"] and all(line.split()[1] for line in lines)


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        ({"MAX_REQUEUES": "abc"}, [], "error: MAX_REQUEUES=abc: is no whole number"),
        ({"STOP_AFTER": "soon"}, [], "error: STOP_AFTER=soon: is no whole number"),
        ({"RUNTIME": "dockr"}, [], "error: RUNTIME=dockr: choose pyxis, enroot, apptainer, docker, podman or none"),
        ({}, ["run_dir=/x"], "error: run_dir=/x: give the run's folder as RUN_DIR="),
        ({}, ["resources.nodes=2"], "error: resources.nodes=2: the job has 1 nodes; give them as sbatch --nodes="),
    ],
)
def test_wrong_input_by_hand_is_one_line(environ: dict[str, str], arguments: list[str], words: str, shared: Path) -> None:
    argv = ["sbatch", "--wait", "--parsable", f"--output={shared.parent}/%j.log", BATCH, "config.yaml", *arguments]
    done = subprocess.run(argv, cwd=shared, env={**os.environ, **environ}, capture_output=True, text=True)
    assert done.returncode == 2 and told(shared, done.stdout.strip()).startswith(words), told(shared, done.stdout.strip())


def test_a_config_of_a_run_goes_on_in_its_folder(shared: Path) -> None:
    run = shared / "old run"
    code, output = command(*TRAINER, "run", *SHORT, "resources.ranks_per_node=1", overrides(run), cwd=shared)
    assert code == 0, output
    argv = [
        "sbatch",
        "--wait",
        "--parsable",
        f"--output={shared.parent}/%j.log",
        BATCH,
        "old run/config.yaml",
        "training.max_steps=30",
    ]
    done = subprocess.run(argv, cwd=shared, env={**os.environ, "PYTHON": TRAINER[0]}, capture_output=True, text=True)
    assert done.returncode == 0 and metrics(run)[-1]["step"] == 30, told(shared, done.stdout.strip())
    assert "resuming at step 20" in told(shared, done.stdout.strip())


def test_the_last_task_of_an_array_is_not_the_array(shared: Path) -> None:
    """Slurm gives it the array's own number."""
    configs = [load_config(*slow(shared / "array", 0.04), "backend=slurm", f"training.seed={seed}") for seed in (1, 2)]
    array = submit_array(configs)
    first, last = array.tasks
    assert wait_until(lambda: all(len(metrics(task.folder)) > 3 for task in (first, last)), 60)
    slurm("scancel", "--batch", "--signal=USR1", last.run.job["job_id"])
    let_start_now(str(last.run.job["job_id"]), last.folder)
    assert array.wait(90).detail == "2 done"
    assert "attempt 1" in batch_log(last.folder) and "attempt 1" not in batch_log(first.folder)


def test_a_second_job_in_the_folder_changes_nothing_for_the_first(shared: Path) -> None:
    run = shared / "run"
    job = submit(run, *slow(run, 0.05))
    assert wait_until(lambda: len(metrics(run)) > 3, 60), batch_log(run)
    for argv in (["run", str(run / "config.yaml")], ["submit", str(run / "config.yaml"), "backend=local"]):
        code, output = command(*TRAINER, *argv)
        assert code == 2 and "its run is still going on (job" in output, output
    by_hand = ["sbatch", "--wait", "--parsable", f"--output={shared.parent}/%j.log", BATCH, str(run / "config.yaml")]
    done = subprocess.run(by_hand, cwd=shared, env={**os.environ, "PYTHON": TRAINER[0]}, capture_output=True, text=True)
    assert done.returncode == ExitCode.REFUSED and "FAULT G7" in told(shared, done.stdout.strip())
    assert f"running: job {job}" in command(*TRAINER, "status", str(run))[1]
    slurm("scancel", "--batch", "--signal=USR1", job)
    let_start_now(job, run)
    assert wait_until(lambda: not queue(job), 60) and metrics(run)[-1]["step"] == 50, batch_log(run)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["container.cuda_version='1.0'"], "FAULT B3 host="),
        (["model.args.channels=x"], "FAULT C1 host="),
    ],
)
def test_a_failure_before_the_first_step_is_told_by_status(settings: list[str], words: str, shared: Path) -> None:
    run = shared / "run"
    job = submit(run, *SHORT, *settings)
    assert wait_until(lambda: not queue(job), 60), batch_log(run)
    status = command(*TRAINER, "status", str(run))[1]
    assert status.startswith(f"{run}: failed: ") and words in status, status + batch_log(run)


def test_a_controller_that_is_away_for_a_moment_ends_no_wait(cluster: Cluster, shared: Path) -> None:
    run = shared / "run"
    submit(run, *slow(run, 0.1))
    assert wait_until(lambda: len(metrics(run)) > 3, 60), batch_log(run)
    pid = int(cluster.on(LOGIN, "cat", "/run/slurm/slurmctld.pid").stdout)
    cluster.on(LOGIN, "kill", f"-{int(signal.SIGSTOP)}", str(pid))
    try:
        waiting = subprocess.Popen(
            [*TRAINER, "logs", "--follow", str(run)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in (1, 2):  # each takes as long as a client waits; the one that follows asks more often
            assert "error" in slurm("squeue")
        assert waiting.poll() is None
    finally:
        cluster.on(LOGIN, "kill", f"-{int(signal.SIGCONT)}", str(pid))
    output, _ = waiting.communicate(timeout=120)
    assert "done: job" in output and Job.of(str(run)).status().state == "done", output


def test_cancel_now_kills(shared: Path) -> None:
    run = shared / "run"
    job = submit(run, *slow(run, 0.05))
    assert wait_until(lambda: len(metrics(run)) > 3, 60), batch_log(run)
    assert f"killed job {job}" in command(*TRAINER, "cancel", "--now", str(run))[1]
    assert wait_until(lambda: not queue(job), 30), queue(job)
    assert "saved" not in batch_log(run) and "stopped by" not in batch_log(run), batch_log(run)


@pytest.mark.parametrize(
    "name", ["help", "test-only", "wait", "wrap", "array", "export", "no-requeue", "parsable", "nodes", "ntasks_per_node"]
)
def test_options_that_make_no_job_are_refused(name: str, folder: Path) -> None:
    code, output = command(*TRAINER, "render", *SHORT, "backend=slurm", f"slurm.options={{{name}: x}}", cwd=folder)
    assert (
        code == 2 and output.startswith(f"error: slurm.options.{name.replace('_', '-')}=x: ") and len(output.splitlines()) == 1
    ), output


def test_what_else_slurm_cannot_do_is_refused(folder: Path) -> None:
    (folder / "a\nb").mkdir()
    for run, cwd, words in ((folder / "a\\b", folder, "below a backslash"), (Path("run"), folder / "a\nb", "cannot be printed")):
        code, output = command(*TRAINER, "render", *SHORT, "backend=slurm", overrides(run), cwd=cwd)
        assert code == 2 and words in output and len(output.splitlines()) == 1, output
