"""Whole runs on a real two-node Slurm that the lab brings up."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from submitit.core.utils import FailedJobError

from tests.conftest import DIGITS, ROOT
from tests.jobs import SHORT, TRAINER, command, equal, losses, metrics, overrides, processes_of, saved, wait_until
from tests.lab.machines import LOGIN
from tests.lab.slurm import UID, Cluster
from tests.slurm_jobs import TWO_BY_TWO, batch_log, exit_code, follow, let_start_now, queue, slurm, submit
from tests.test_runs import SCRIPT, slow
from trainer.errors import ExitCode
from trainer.launch.job import Job, JobFailedError
from trainer.launch.job import submit as submit_job
from trainer.launch.plan import Submission, write_plan
from trainer.launch.slurm import plan
from trainer.settings import load_config

pytestmark = pytest.mark.slurm


def test_submit_trains_on_two_nodes_as_one_machine_does(shared: Path, reference: Path) -> None:
    run = shared / "run"
    job = submit(run, *SHORT, *TWO_BY_TWO)
    assert f"done: job {job} ended well" in follow(run), batch_log(run)
    assert {path.name.split(".")[1] for path in run.glob("logs/attempt-000/*.log")} == {"node1", "node2"}
    assert losses(run) == losses(reference) and equal(saved(run), saved(reference))


def test_a_roll_call_alone_on_an_allocation(shared: Path) -> None:
    settings = [str(ROOT / "slurm" / "site.yaml"), *SHORT, *TWO_BY_TWO, overrides(shared / "run")]
    code, output = command(*TRAINER, "rollcall", *settings)
    table = [line.split() for line in output.splitlines()]
    assert code == 0 and [row[:2] for row in table if row[:1] in (["0"], ["1"])] == [["0", "node1"], ["1", "node2"]], output
    assert re.search(r"the job can start: 2 nodes, roll call in [\d.]+ s", output) and not metrics(shared / "run"), output
    rates = [node["received"] for node in json.loads((shared / "run" / "rollcall.json").read_text())["nodes"]]
    assert all(rate > 1e6 for rate in rates), rates
    argv = ["srun", "--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=2", "--overlap", *TRAINER, "rollcall", *settings[1:]]
    done = subprocess.run([*argv, "backend=slurm"], capture_output=True, text=True, cwd=shared)
    assert done.returncode == 0 and "the job can start: 2 nodes, roll call in " in done.stderr, done.stdout + done.stderr


def test_render_is_to_the_letter_what_was_sent(shared: Path) -> None:
    settings = [
        str(ROOT / "slurm" / "site.yaml"),
        *SHORT,
        *TWO_BY_TWO,
        overrides(shared / "run"),
        "slurm.options={exclusive: true, comment: a b}",
    ]
    code, rendered = command(*TRAINER, "render", *settings)
    assert code == 0, rendered
    code, output = command(*TRAINER, "submit", *settings)
    assert code == 0, output
    assert rendered == (shared / "run" / "plan.txt").read_text()
    assert (shared / "run" / "job.sbatch").read_text() == (ROOT / "slurm" / "job.sbatch").read_text()
    assert "ended well" in follow(shared / "run"), batch_log(shared / "run")


def test_sbatch_by_hand_gives_the_same_job(shared: Path, reference: Path) -> None:
    flags = ["--parsable", "--nodes=2", "--gpus-per-node=2", "--time=5", "--job-name=by-hand", f"--output={shared.parent}/%j.log"]
    done = subprocess.run(
        ["sbatch", *flags, str(ROOT / "slurm" / "job.sbatch"), *SHORT, *TWO_BY_TWO],
        cwd=shared,
        env={**os.environ, "PYTHON": TRAINER[0], "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    job = done.stdout.strip()
    assert wait_until(lambda: not queue(job), 90), done.stderr
    run = shared / "runs" / f"by-hand-{job}"
    assert exit_code(run) == 0, (shared.parent / f"{job}.log").read_text()
    assert losses(run) == losses(reference) and equal(saved(run), saved(reference))


def test_both_ways_start_the_same_argv_with_the_same_variables(shared: Path) -> None:
    """An interpreter that only tells what it was started with."""
    fake = shared / "python"
    fake.write_text('#!/bin/sh\n{ printf "%s\\n" "$@"; env | grep ^PET_ | sort; } >"$RUN_DIR/seen-$SLURM_NODEID"\n')
    fake.chmod(0o755)
    seen = {}
    for way in ("submit", "hand"):
        run = shared / way
        run.mkdir()
        argv = ["sbatch", "--parsable", "--wait", "--nodes=2", str(ROOT / "slurm" / "job.sbatch"), f"{run}/config.yaml"]
        environ = {**os.environ, "PYTHON": str(fake), "RUN_DIR": str(run)}
        if way == "submit":
            made = plan(Submission([load_config(DIGITS, "backend=slurm", "resources.nodes=2")]), str(run))
            write_plan(made)
            argv = ["sbatch", "--wait", *made.commands[0].argv[1:]]
            environ = {**os.environ, **made.commands[0].environ, "PYTHON": str(fake)}
        done = subprocess.run(argv, cwd=shared, env=environ, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr + batch_log(run)
        job = int(done.stdout.split()[0])
        told = [
            (run / f"seen-{node}").read_text().replace(str(20000 + job % 9000), "PORT").replace(f"/{way}", "/WAY")
            for node in (0, 1)
        ]
        seen[way] = told
    assert seen["submit"] == seen["hand"]
    assert "PET_NODE_RANK=0" in seen["hand"][0] and "PET_NODE_RANK=1" in seen["hand"][1]
    assert all("PET_MASTER_ADDR=node1\nPET_MASTER_PORT=PORT\nPET_NNODES=2\n" in told for told in seen["hand"])


DELIVERIES = {
    "to the steps": ["scancel", "--signal=USR1"],
    "to the batch shell": ["scancel", "--batch", "--signal=USR1"],
    "to both": ["scancel", "--full", "--signal=USR1"],
    "USR2 to both": ["scancel", "--full", "--signal=USR2"],
    "TERM to the batch shell": ["scancel", "--batch", "--signal=TERM"],
}


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_every_delivery_of_a_stop_is_one_save_one_requeue_and_no_step_lost(
    delivery: str, shared: Path, uninterrupted: Path
) -> None:
    run = shared / "run"
    job = submit(run, *slow(run, 0.02, resources__nodes=2, resources__ranks_per_node=1))
    assert wait_until(lambda: metrics(run) and metrics(run)[-1]["step"] >= 7), batch_log(run)
    slurm(*DELIVERIES[delivery], job)
    slurm(*DELIVERIES[delivery], job)  # and again, as a scheduler may
    let_start_now(job, run)
    step = metrics(run)[-1]["step"]
    assert 7 <= step < 50 and (run / "checkpoints" / "latest").resolve().name == f"step-{step:08d}"
    assert wait_until(lambda: not queue(job), 60), queue(job)
    told = batch_log(run)
    assert told.count("requeueing (1 of 3)") == 1 and "attempt 0" in told and "attempt 1" in told, told
    assert "stopped by" in told and f"resuming at step {step}" in told, "the first attempt's log is still there"
    assert [step for step, _ in losses(run)] == list(range(1, 51))
    assert losses(run) == losses(uninterrupted) and equal(saved(run), saved(uninterrupted))


def test_the_budget_of_requeues_ends(shared: Path) -> None:
    run = shared / "run"
    job = submit(run, *slow(run, 0.02), "slurm.max_requeues=0")
    assert wait_until(lambda: len(metrics(run)) > 3), batch_log(run)
    slurm("scancel", "--signal=USR1", job)
    assert wait_until(lambda: not queue(job), 40), queue(job)
    assert "no requeue is left (MAX_REQUEUES=0)" in batch_log(run)
    assert ": stopped: " in command(*TRAINER, "status", str(run))[1]


def test_cancel_saves_and_is_not_requeued(shared: Path) -> None:
    run = shared / "run"
    job = submit(run, *slow(run, 0.02))
    assert wait_until(lambda: len(metrics(run)) > 3), batch_log(run)
    assert "asked job" in command(*TRAINER, "cancel", str(run))[1]
    assert wait_until(lambda: not queue(job), 40), queue(job)
    assert "requeueing" not in batch_log(run) and "saved" in batch_log(run), batch_log(run)
    assert ": stopped: " in command(*TRAINER, "status", str(run))[1]


@pytest.mark.parametrize(
    ("what", "rank", "code", "words"),
    [
        ("sys.exit(7)", 1, ExitCode.RANK_FAILED, "exited with 7 (train.py:6)"),
        ("raise ValueError('bad sample')", 0, ExitCode.RANK_FAILED, "ValueError: bad sample (train.py:6)"),
    ],
)
def test_a_failing_task_ends_the_job_soon_and_for_good(what: str, rank: int, code: ExitCode, words: str, shared: Path) -> None:
    (shared / "train.py").write_text(SCRIPT.format(what=what, rank=rank))
    (shared / "run.yaml").write_text("name: faulty\nbackend: slurm\nentrypoint: train.py\nresources: {nodes: 2}\n")
    run = shared / "run"
    found, output = command(*TRAINER, "submit", "run.yaml", overrides(run), cwd=shared)
    assert found == 0, output
    job = str(json.loads((run / "job.json").read_text())["job_id"])
    assert wait_until(lambda: exit_code(run) is not None, 60), batch_log(run)
    assert wait_until(lambda: not queue(job), 10), "the whole job is over within 10 s"
    lines = [line for line in batch_log(run).splitlines() if line.startswith("FAULT ")]
    assert lines and all(line.startswith(f"FAULT C1 host=node{rank + 1} rank={rank}: {words}") for line in lines), batch_log(run)
    assert exit_code(run) == code
    assert "requeueing" not in batch_log(run)
    assert f"ExitCode={int(code)}:0" in slurm("scontrol", "show", "job", job)
    assert f"failed: {lines[0]}" in command(*TRAINER, "status", str(run))[1]


def test_submit_from_python_gives_the_same_job(shared: Path, reference: Path) -> None:
    job = submit_job(load_config(ROOT / "slurm" / "site.yaml", *SHORT, *TWO_BY_TWO, overrides(shared / "run")))
    assert job.active()
    assert job.wait(120).state == "done", batch_log(job.folder)
    assert "step 20/20" in list(job.logs())[-2]
    assert losses(job.folder) == losses(reference) and equal(saved(job.folder), saved(reference))
    known = job.submitit_job
    assert (known.job_id, known.state, known.done(), known.exception()) == (job.run.job["job_id"], "COMPLETED", True, None)
    assert known.result() == job.status() and "step 20/20" in known.stdout()
    assert Job.of(str(job.folder)).status() == job.status()


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by signal 9 (SIGKILL)"),
        ("os._exit(9)", "vanished with exit code 9"),
        ("sys.exit(7)", "exited with 7"),
    ],
)
def test_waiting_needs_no_accounting_and_tells_the_cause(
    what: str, words: str, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shared / "train.py").write_text(SCRIPT.format(what=what, rank=0))
    monkeypatch.chdir(shared)
    (shared / "run.yaml").write_text("name: faulty\nbackend: slurm\nslurm: {max_requeues: 0}\nentrypoint: train.py\n")
    job = submit_job(load_config(shared / "run.yaml", overrides(shared / "run")))
    with pytest.raises(JobFailedError) as error:
        job.wait(60)
    assert words in str(error.value) and str(error.value).startswith("FAULT C1 host=node"), batch_log(job.folder)
    known = job.submitit_job
    assert known.state == "FAILED" and str(known.exception()) == str(error.value)
    with pytest.raises(FailedJobError, match="FAULT C1"):
        known.result()


def test_preemption_by_a_higher_partition_is_one_save_and_one_requeue(shared: Path, uninterrupted: Path) -> None:
    run = shared / "run"
    two = {"resources__nodes": 2, "resources__ranks_per_node": 1, "slurm__partition": "low"}
    job = submit(run, *slow(run, 0.05, **two), "slurm.options={exclusive: true}")
    assert wait_until(lambda: metrics(run) and metrics(run)[-1]["step"] >= 5), batch_log(run)
    urgent = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", f"--output={shared.parent}/urgent.log"]
    done = subprocess.run([*urgent, "--wrap=sleep 3"], capture_output=True, text=True, cwd=shared)
    assert wait_until(lambda: queue(job).startswith("PENDING"), 60), queue(job) + batch_log(run)
    assert wait_until(lambda: not queue(done.stdout.strip()), 60), slurm("squeue")
    let_start_now(job, run)
    assert wait_until(lambda: not queue(job), 90), queue(job)
    assert batch_log(run).count("stopped by") == 1 and "attempt 1" in batch_log(run) and "attempt 2" not in batch_log(run), (
        batch_log(run)
    )
    assert losses(run) == losses(uninterrupted) and equal(saved(run), saved(uninterrupted))


def test_the_time_limit_is_a_warning_a_save_and_a_requeue(shared: Path, uninterrupted: Path) -> None:
    run = shared / "run"
    limits = {"resources__time_minutes": 2, "slurm__signal_seconds": 90, "slurm__max_requeues": 9}
    job = submit(run, *slow(run, 0.2, **limits))
    stops = []
    while True:  # Slurm looks at limits every half minute, so that the warning comes 0 to 30 s into each attempt
        assert wait_until(lambda: queue(job) in ("", "PENDING BeginTime"), 100), queue(job) + batch_log(run)
        if not queue(job):
            break
        stops.append(metrics(run)[-1]["step"] if metrics(run) else 0)  # a first warning may come before the first step
        let_start_now(job, run)
    assert stops and batch_log(run).count("got USR1") == len(stops), batch_log(run)
    assert all(f"resuming at step {step}" in batch_log(run) for step in stops if step)
    assert losses(run) == losses(uninterrupted) and equal(saved(run), saved(uninterrupted))


def test_two_jobs_on_the_same_nodes_do_not_meet(shared: Path) -> None:
    runs = [shared / "a", shared / "b"]
    for run in runs:
        submit(run, *slow(run, 0.0, resources__nodes=2, resources__ranks_per_node=1), "training.max_steps=10")
    for run in runs:
        assert "ended well" in follow(run), batch_log(run)
    assert losses(runs[0]) == losses(runs[1])


def test_a_rank_that_hangs_ends_the_job_with_its_stack(shared: Path) -> None:
    """The exit code says that another try may help, so that it is tried, as often as is allowed."""
    run, rank = shared / "run", random.randrange(2)
    fault = json.dumps({"rank": rank, "number": 30, "what": "time.sleep(1000)"})
    settings = ["model.target=tests.targets:faulty_model", f"model.args={fault}", "watch.stall_seconds=6"]
    short = [*SHORT, "resources.nodes=2", "resources.ranks_per_node=1", "training.max_steps=60", "slurm.max_requeues=0"]
    job = submit(run, *short, *settings)
    assert wait_until(lambda: exit_code(run) is not None, 60), batch_log(run)
    assert wait_until(lambda: not queue(job), 10) and exit_code(run) == ExitCode.STALLED
    lines = {line for line in batch_log(run).splitlines() if line.startswith("FAULT ")}
    assert len(lines) == 1 and lines.pop().startswith(f"FAULT C2 host=node{rank + 1} rank={rank}: sleeps in targets.py:"), lines
    told = command(*TRAINER, "explain", str(run))[1]
    assert "1 of 2 (rank 0):" in told and "1 of 2 (rank 1):" in told and "in forward" in told, told
    assert "gloo:all_reduce" in told, "torch's own record of the last collectives"
    assert not processes_of(run)


def test_a_node_that_loses_power_is_requeued_and_the_result_is_the_same(
    cluster: Cluster, shared: Path, uninterrupted: Path
) -> None:
    run = shared / "run"
    job = submit(run, *slow(run, 0.05, resources__nodes=2, resources__ranks_per_node=1))
    assert wait_until(lambda: metrics(run) and metrics(run)[-1]["step"] >= 7), batch_log(run)
    cluster.off("node2")
    assert wait_until(lambda: "PENDING" in queue(job), 90), queue(job) + batch_log(run)
    cluster.power_on("node2")
    assert wait_until(cluster.idle, 60), slurm("sinfo", "-N")
    let_start_now(job, run)
    assert wait_until(lambda: not queue(job), 90), queue(job)
    assert "resuming at step" in batch_log(run)
    assert losses(run) == losses(uninterrupted) and equal(saved(run), saved(uninterrupted))


def test_a_lost_node_that_comes_back_brings_no_orphan(cluster: Cluster, shared: Path, uninterrupted: Path) -> None:
    """Its cable is pulled and later plugged in again: what ran there must not run beside the next attempt, nor write its files."""
    run = shared / "run"
    job = submit(run, *slow(run, 0.05, resources__nodes=2, resources__ranks_per_node=1))
    assert wait_until(lambda: metrics(run) and metrics(run)[-1]["step"] >= 7), batch_log(run)
    before = set(processes_of(run))
    cluster.link("node2", "down")
    try:
        assert wait_until(lambda: not set(processes_of(run)) & before, 60), "no side waits for the cable"
        assert wait_until(lambda: "PENDING" in queue(job), 90), queue(job) + batch_log(run)
    finally:
        cluster.heal("node2")
    assert wait_until(cluster.idle, 150), slurm("sinfo", "-N")
    # The next attempt's step has the number of the one that still ends on node2; left alone, it would start two minutes later.
    assert wait_until(lambda: cluster.on("node2", "pgrep", "slurmstepd", check=False).returncode == 1, 200)
    let_start_now(job, run)
    assert wait_until(lambda: not queue(job), 90), queue(job) + batch_log(run)
    assert losses(run) == losses(uninterrupted) and equal(saved(run), saved(uninterrupted))


def test_a_storm_of_signals_is_one_save(shared: Path, uninterrupted: Path) -> None:
    """From before the save until after it, to the steps and to the batch shell."""
    run = shared / "run"
    job = submit(run, *slow(run, 0.02, resources__nodes=2, resources__ranks_per_node=1))
    assert wait_until(lambda: metrics(run) and metrics(run)[-1]["step"] >= 7), batch_log(run)
    for _ in range(30):
        for whom in ([], ["--batch"]):  # scancel tries again for minutes while a job is requeued, and would hit the next start
            subprocess.run(["timeout", "10", "scancel", *whom, "--signal=USR1", job], capture_output=True)
        if "ended with" in batch_log(run):
            break
    let_start_now(job, run)
    assert wait_until(lambda: not queue(job), 60), queue(job)
    assert batch_log(run).count("stopped by") == 1 and batch_log(run).count("requeueing") == 1, batch_log(run)
    assert losses(run) == losses(uninterrupted) and equal(saved(run), saved(uninterrupted))


def test_what_slurm_refuses_comes_back_in_its_own_words(shared: Path) -> None:
    settings = [str(ROOT / "slurm" / "site.yaml"), *SHORT, overrides(shared / "run"), "slurm.partition=nowhere"]
    code, output = command(*TRAINER, "submit", *settings)
    assert code == ExitCode.CONFIG and "error: sbatch: " in output and "invalid partition" in output.lower(), output


def test_a_plain_user_can_submit(cluster: Cluster, shared: Path) -> None:
    """alice exists on the machines only, and has no right to this user's files: the batch file and Debian's Python do."""
    home = cluster.folder / "home" / "alice"
    fake = home / "python"
    fake.write_text('#!/bin/sh\necho "$(id -un) $PET_NODE_RANK" >"$HOME/seen-$SLURM_NODEID"\n')
    fake.chmod(0o755)
    batch = home / "job.sbatch"
    shutil.copy(ROOT / "slurm" / "job.sbatch", batch)
    submit = f"cd && PYTHON={fake} sbatch --parsable --wait --nodes=2 {batch} config.yaml"
    done = cluster.on(LOGIN, *cluster.enter(LOGIN, "alice")[len(cluster.enter(LOGIN)) :], "sh", "-c", submit)
    assert [(home / f"seen-{node}").read_text() for node in (0, 1)] == ["alice 0\n", "alice 1\n"]
    assert (home / "runs" / f"ddp-{done.stdout.split()[0]}").stat().st_uid == UID


def test_the_batch_file_refuses_what_it_cannot_run() -> None:
    script = str(ROOT / "slurm" / "job.sbatch")
    for argv, words in (([script], "CONFIG: missing"), ([script, "config.yaml"], "start this file with sbatch")):
        done = subprocess.run(["bash", *argv], capture_output=True, text=True, env={"PATH": os.environ["PATH"]})
        assert done.returncode == 2 and words in done.stderr
