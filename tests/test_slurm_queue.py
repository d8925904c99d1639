"""What a submission can ask the queue for: job arrays, one run after another, a preemption to try things out; and who may submit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, wait_until
from tests.jobs import SHORT, TRAINER, command, equal, logs, losses, metrics, overrides, saved
from tests.lab.machines import LOGIN
from tests.lab.slurm import UID, USER, Cluster
from tests.slurm_jobs import TWO_BY_TWO, batch_log, exit_code, follow, let_start_now, queue, slurm, submit
from tests.test_runs import slow
from trainer.errors import ConfigError
from trainer.launch.job import JobFailedError, submit_array, variants
from trainer.settings import load_config

pytestmark = pytest.mark.slurm
SITE = str(ROOT / "slurm" / "site.yaml")


def test_an_array_is_a_run_folder_for_each_value(shared: Path) -> None:
    run = shared / "array"
    rates = ["--array", "optimizer.args.lr=0.1,0.2", "--array", "training.seed=1,2"]
    code, output = command(*TRAINER, "submit", *rates, SITE, *SHORT, "resources.nodes=2", overrides(run))
    assert code == 0 and f"{run}/2: optimizer.args.lr=0.2 training.seed=1" in output, output
    code, output = command(*TRAINER, "logs", "--follow", str(run / "3"))
    assert code == 0 and "done: job" in output, output + logs(run)
    assert wait_until(lambda: command(*TRAINER, "status", str(run))[1].startswith(f"{run}: done: 4 done"), 60), logs(run)
    seen = [load_config(run / str(task) / "config.yaml") for task in range(4)]
    assert [(c.optimizer.args["lr"], c.training.seed) for c in seen] == [(0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)]
    assert len({tuple(losses(run / str(task))) for task in range(4)}) == 4, "four different runs"
    ports = {line.split("node 0 at ")[1].split(",")[0] for line in logs(run).splitlines() if "node 0 at" in line}
    assert len({port.split(":")[1] for port in ports}) == 4, ports
    assert "is a job array; name one of its tasks" in command(*TRAINER, "logs", str(run))[1]
    assert "is not running" in command(*TRAINER, "cancel", str(run))[1]


def test_a_task_of_an_array_stops_and_goes_on_by_itself(shared: Path) -> None:
    run = shared / "array"
    configs = [load_config(*slow(run, 0.02), "backend=slurm", f"training.seed={seed}") for seed in (1, 2)]
    array = submit_array(configs)
    first, second = array.tasks
    assert wait_until(lambda: all(len(metrics(run / task)) > 3 for task in "01")), logs(run)
    slurm("scancel", "--signal=USR1", first.run.job["job_id"])
    let_start_now(str(first.run.job["job_id"]), first.folder)
    assert array.wait(90).detail == "2 done" and second.status().state == "done"
    assert [step for step, _ in losses(first.folder)] == list(range(1, 51)) and "attempt 1" in batch_log(first.folder)
    assert "attempt 1" not in batch_log(second.folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["--array", "resources.nodes=1,2"], "--array resources: the tasks of an array run on the same machines"),
        (["--array", "training.seed"], "--array training.seed: write section.key=V1,V2"),
        (["--array", "training.sed=1,2"], "training.sed=1: no such setting; did you mean training.seed?"),
        (["--array", "training.seed=1,2", "slurm.options={array: 0-9}"], "slurm.options.array=0-9: the kit numbers the tasks"),
        (["--after", "nowhere"], "RUN=nowhere: no such run folder"),
        (["--array", "training.seed=1,2", "backend=local"], "--array: backend=local has no queue for it"),
        (["--simulate-preemption-after", "5", "backend=local"], "--simulate-preemption-after: backend=local has no queue"),
    ],
)
def test_what_cannot_be_sent_is_one_line(settings: list[str], words: str, folder: Path) -> None:
    code, output = command(*TRAINER, "render", SITE, *SHORT, *settings, cwd=folder)
    assert code == 2 and output.startswith(f"error: {words}") and len(output.splitlines()) == 1, output


def test_variants_are_read_as_yaml() -> None:
    assert variants(["model.args={a: 1, b: [2, 3]},null", "name=x,'y,z'"]) == [
        ['model.args={"a": 1, "b": [2, 3]}', 'name="x"'],
        ['model.args={"a": 1, "b": [2, 3]}', 'name="y,z"'],
        ["model.args=null", 'name="x"'],
        ["model.args=null", 'name="y,z"'],
    ]
    with pytest.raises(ConfigError):
        variants(["a=[1"])


def test_one_run_after_another(shared: Path) -> None:
    first, second = shared / "first", shared / "second"
    job = submit(first, *slow(first, 0.02))
    submit(second, "--after", str(first), *SHORT)
    assert "Dependency" in command(*TRAINER, "status", str(second))[1]
    assert "done: " in follow(second)
    assert not queue(job) and metrics(first)[-1]["step"] == 50
    third = shared / "third"
    submit(third, "--after", str(first), *SHORT)
    assert "--dependency" not in (third / "plan.txt").read_text(), "what has ended well needs no waiting"
    follow(third)


def test_a_run_that_fails_takes_those_after_it_along(shared: Path) -> None:
    (shared / "train.py").write_text("import time\ntime.sleep(4)\nraise ValueError('bad sample')\n")
    (shared / "run.yaml").write_text("name: faulty\nbackend: slurm\nentrypoint: train.py\n")
    for name, more in {"first": [], "second": ["--after", str(shared / "first")]}.items():
        code, output = command(*TRAINER, "submit", *more, "run.yaml", overrides(shared / name), cwd=shared)
        assert code == 0, output
    code, output = command(*TRAINER, "logs", "--follow", str(shared / "second"))
    assert code == 2 and "no log" in output, output
    status = command(*TRAINER, "status", str(shared / "second"))[1]
    assert ": lost: job" in status and "never started: it was to come after" in status, status
    code, output = command(*TRAINER, "submit", "--after", str(shared / "first"), "run.yaml", cwd=shared)
    assert code == 2 and "has not ended well (FAULT C1" in output, output


def test_a_simulated_preemption_shows_what_a_real_one_does(shared: Path) -> None:
    run = shared / "run"
    job = submit(run, "--simulate-preemption-after", "6", *slow(run, 0.2, resources__nodes=2, resources__ranks_per_node=1))
    let_start_now(job, run)
    assert wait_until(lambda: not queue(job), 60), queue(job)
    told = batch_log(run)
    assert told.count("got USR1") == 1 and told.count("requeueing (1 of 3)") == 1 and "attempt 1" in told, told
    assert [step for step, _ in losses(run)] == list(range(1, 51))


def test_a_job_sent_from_inside_another_one(cluster: Cluster, shared: Path) -> None:
    """Slurm's own variables of the outer job exclude some of the inner one's."""
    run = shared / "run"
    inner = ["sbatch", "--wait", "--nodes=2", "--mem=200", str(ROOT / "slurm" / "job.sbatch"), *SHORT]
    done = subprocess.run(
        ["salloc", "--quiet", "--nodes=1", "--mem-per-cpu=50", *inner],
        cwd=shared,
        env={**os.environ, "PYTHON": sys.executable, "RUN_DIR": str(run)},
        capture_output=True,
        text=True,
    )
    told = "".join(path.read_text() for path in shared.glob("slurm-*.log"))
    assert done.returncode == 0 and exit_code(run) == 0, done.stderr + told
    assert "exclusive" not in told


def test_a_plain_user_trains(cluster: Cluster, shared: Path, reference: Path) -> None:
    """alice exists on the machines only and has no right to this user's files, so that her Python is Debian's with our packages."""
    packages = Path(sys.prefix) / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    as_alice = cluster.enter(LOGIN, USER)[len(cluster.enter(LOGIN)) :]
    home = cluster.folder / "home" / USER
    environ = ["env", f"PATH={cluster.bin}:/usr/bin:/bin", f"PYTHONPATH={packages}:{ROOT}", "OMP_NUM_THREADS=1"]
    trainer = [*as_alice, *environ, "/usr/bin/python3", "-m", "trainer"]
    tried = cluster.on(LOGIN, *trainer, "check", SHORT[0], check=False)
    if tried.returncode:
        pytest.skip(f"a plain user cannot run this checkout with Debian's Python: {tried.stdout.strip().splitlines()[-1]}")
    run = home / "it's her run"
    done = cluster.on(LOGIN, *trainer, "submit", SITE, *SHORT, *TWO_BY_TWO, overrides(run))
    assert "submitted digits to slurm job" in done.stdout
    assert wait_until(lambda: not queue(json.loads((run / "job.json").read_text())["job_id"]), 90)
    assert "done: job" in cluster.on(LOGIN, *trainer, "status", str(run)).stdout, batch_log(run)
    assert losses(run) == losses(reference) and equal(saved(run), saved(reference))
    assert {path.stat().st_uid for path in run.rglob("*")} == {UID}


def test_waiting_for_an_array_that_fails_tells_which_and_why(shared: Path) -> None:
    (shared / "train.py").write_text("import sys\nif sys.argv[1] == '2':\n    raise ValueError('bad sample')\n")
    (shared / "run.yaml").write_text("name: faulty\nbackend: slurm\nentrypoint: train.py\n")
    run = shared / "array"
    settings = ["--array", "entrypoint_args=['1'],['2']", "run.yaml", overrides(run)]
    code, output = command(*TRAINER, "submit", *settings, cwd=shared)
    assert code == 0, output
    from trainer.launch.job import Job

    with pytest.raises(JobFailedError, match=r"1 done, 1 failed; FAULT C1 host=node\d rank=0: ValueError: bad sample"):
        Job.of(str(run)).wait(60)
