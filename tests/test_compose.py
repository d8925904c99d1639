"""Two containers, one job: the smoke test that `docker compose up` is, its faults, and the compose backend."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, Docker, wait_until
from tests.jobs import TRAINER, command, losses, metrics, overrides, roll_call
from trainer.launch.job import Job, JobFailedError, submit
from trainer.settings import load_config

pytestmark = pytest.mark.docker
STEPS = "training.max_steps=40"


class Project:
    """docker-compose.yml as it stands, with a run folder on this machine."""

    def __init__(self, docker: Docker, folder: Path) -> None:
        self.docker, self.run = docker, folder / "smoke"
        self.environ = {"IMAGE": docker.image, "RUNS": str(folder), "RUN_AS": "10001:10001"}
        self.file = folder / "docker-compose.yml"
        shutil.copy(ROOT / "docker-compose.yml", self.file)

    def change(self, old: str, new: str) -> None:
        text = self.file.read_text()
        assert old in text
        self.file.write_text(text.replace(old, new))

    def settings(self, *settings: str) -> None:
        """More settings for both nodes."""
        self.change("resources.ranks_per_node=1]", f"resources.ranks_per_node=1, {', '.join(json.dumps(s) for s in settings)}]")

    def __call__(self, *argv: str, check: bool = True) -> str:
        return self.docker("compose", "--file", str(self.file), *argv, check=check, **self.environ)

    def up(self, *services: str) -> None:
        self("up", "--detach", "--no-build", *services)

    def states(self) -> dict[str, tuple[str, int]]:
        """State and exit code of each service's container."""
        lines = self("ps", "--all", "--format", "{{.Service}} {{.State}} {{.ExitCode}}").splitlines()
        return {name: (state, int(code)) for name, state, code in map(str.split, lines)}

    def ended(self) -> bool:
        return all(state == "exited" for state, _ in self.states().values())

    def container(self, service: str) -> str:
        return self("ps", "--all", "--quiet", service).strip()


@pytest.fixture
def project(docker: Docker, tmp_path: Path) -> Iterator[Project]:
    tmp_path.chmod(0o777)
    made = Project(docker, tmp_path)
    yield made
    made("down", "--timeout", "1", "--volumes")


def test_two_containers_learn_what_one_machine_does(project: Project) -> None:
    """The local backend in the same image: another torch rounds otherwise."""
    project.settings(STEPS, "training.log_every_steps=1")
    project("up", "--no-build", "--abort-on-container-failure")
    assert project.states() == {"node0": ("exited", 0), "node1": ("exited", 0)}
    assert (told := roll_call(project.run))["nodes"] == 2 and not told["fault"] and not told["warnings"], told
    local = project.run.parent / "local"
    argv = ["run", "--rm", "--user", "10001:10001", f"--volume={local.parent}:{local.parent}", project.docker.image]
    settings = ["training.log_every_steps=1", STEPS, f"run_dir={local}"]
    project.docker(*argv, "trainer", "run", "configs/digits.yaml", *settings)
    assert len(losses(local)) == 40 and losses(project.run) == losses(local)


@pytest.mark.parametrize("first", ["node0", "node1"])
def test_either_container_may_come_first(first: str, project: Project) -> None:
    project.settings("training.max_steps=5")
    project.up(first)
    assert wait_until(lambda: project.states()[first][0] == "running")
    time.sleep(3)
    project.up()
    assert wait_until(project.ended, 60), project("logs")
    assert {code for _, code in project.states().values()} == {0}, project("logs")


def test_a_container_is_healthy_while_its_node_lives(project: Project) -> None:
    project.change("  init: true ", "  healthcheck: {interval: 1s}\n  init: true ")
    project.settings("data.target=trainer.train.data:digits", "training.epochs=4000")
    project.up()
    health = ["inspect", "--format", "{{.State.Health.Status}}", project.container("node1")]
    assert wait_until(lambda: project.docker(*health).strip() == "healthy", 60), project("logs")


HANGING = """
import os, time, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
        self.counted = 0

    def forward(self, images):
        self.counted += 1
        if self.counted == 30 and os.environ["RANK"] == "1":
            time.sleep(1000)
        return self.layer(images.flatten(1))

def model():
    return Model()
"""
Fault = Callable[[Project], None]


def kill(project: Project) -> None:
    project("kill", "--signal", "KILL", "node1")


def pause(project: Project) -> None:
    project("pause", "node1")
    assert wait_until(lambda: project.states()["node0"][0] == "exited", 60), project("logs")
    project("unpause", "node1")


def disconnect(project: Project) -> None:
    project.docker("network", "disconnect", "ddp-job-kit_nodes", project.container("node1"))


@pytest.mark.parametrize("fault", [kill, pause, disconnect])
def test_what_befalls_one_container_ends_both(fault: Fault, project: Project) -> None:
    project.settings("training.epochs=4000", "watch.stall_seconds=10", "checkpoint.every_steps=50")
    project.up()
    latest = project.run / "checkpoints" / "latest"
    assert wait_until(latest.exists, 60), project("logs")
    fault(project)
    assert wait_until(project.ended, 60), project("logs") + project("ps")
    assert all(code for _, code in project.states().values()), project("logs")
    told = project("logs", "node0")
    if fault is kill:
        assert "node 1" in told and "FAULT C3" in told, told
    else:
        assert "FAULT C3 host=node1 node_rank=1: lost node 1 (node1) with rank 1: no sign of life for 20 s" in told, told
    assert latest.exists() and not list(project.run.rglob("*.tmp"))


def test_a_rank_that_hangs_ends_both_containers(project: Project) -> None:
    (project.run.parent / "hanging.py").write_text(HANGING)
    project.change("  OMP_NUM_THREADS:", "  PYTHONPATH: /workspace/runs\n  OMP_NUM_THREADS:")
    project.settings("training.epochs=4000", "watch.stall_seconds=6", "model={target: 'hanging:model', args: {}}")
    project.up()
    assert wait_until(project.ended, 90), project("logs")
    assert project.states() == {"node0": ("exited", 163), "node1": ("exited", 163)}, project("logs")
    told = project("logs", "--no-log-prefix")
    assert told.count("FAULT C2 host=node1 rank=1: sleeps in hanging.py:13 in forward, the others wait for it") == 2, told


def test_a_container_started_alone_gives_up(project: Project) -> None:
    project.settings("watch.join_seconds=8")
    project.up("node0")
    assert wait_until(project.ended, 40), project("logs")
    assert project.states()["node0"] == ("exited", 161) and "missing: node rank 1" in project("logs")


def test_node_1_alone_gives_up(project: Project) -> None:
    project.settings("watch.join_seconds=8")
    project.up("node1")
    assert wait_until(project.ended, 60), project("logs")
    assert project.states()["node1"][1] and "FAULT A" in project("logs"), project("logs")


def test_two_containers_with_the_same_node_rank(project: Project) -> None:
    project.change('PET_NODE_RANK: "1"', 'PET_NODE_RANK: "0"')
    project.settings("watch.join_seconds=15")
    project.up()
    assert wait_until(project.ended, 60), project("logs")
    assert all(code for _, code in project.states().values()), project("logs")
    assert "FAULT" in project("logs")


def test_two_different_images(project: Project) -> None:
    docker, other = project.docker, "ddp-job-kit:other"
    change = "RUN echo '# later' >> $(python3 -c 'import trainer; print(trainer.__file__)')"
    docker("build", "--tag", other, "-", stdin=f"FROM {docker.image}\nUSER root\n{change}\nUSER 10001\n")
    project.change("    hostname: node1\n", f"    hostname: node1\n    image: {other}\n")
    project.up()
    assert wait_until(project.ended, 60), project("logs")
    assert {code for _, code in project.states().values()} == {4}, project("logs")
    assert "FAULT B1 host=node1 node_rank=1: kit: node 1 (node1) has 0.1.0 (" in project("logs")


BIG = """
import torch
from torch.utils.data import Dataset

class Images(Dataset):
    def __len__(self):
        return 640

    def __getitem__(self, index):
        return torch.zeros(1, 128, 128), index % 10

def images():
    return Images(), Images()
"""


def test_too_little_shared_memory_ends_both(project: Project) -> None:
    project.change("shm_size: 1gb", "shm_size: 1mb")
    (project.run.parent / "big.py").write_text(BIG)
    project.change("  OMP_NUM_THREADS:", "  PYTHONPATH: /workspace/runs\n  OMP_NUM_THREADS:")
    settings = ["model.args.image_size=128", "data={target: 'big:images', num_workers: 2}", "watch.stall_seconds=15"]
    project.settings(*settings, "training.batch_size=64")
    project.up()
    assert wait_until(project.ended, 90), project("logs")
    assert all(code for _, code in project.states().values()), project("logs")


def test_docker_stop_saves_within_the_grace_period(project: Project) -> None:
    project.settings("training.epochs=4000", "training.log_every_steps=1")
    project.up()
    assert wait_until(lambda: len(metrics(project.run)) > 5, 60), project("logs")
    project("stop")
    assert {code for _, code in project.states().values()} == {160}, project("logs")
    last = metrics(project.run)[-1]["step"]
    assert (project.run / "checkpoints" / "latest").resolve().name == f"step-{last:08d}"


def test_make_smoke_says_how_it_went_and_leaves_nothing(docker: Docker) -> None:
    code, output = command("make", "smoke", IMAGE=docker.image, CONFIG="configs/digits.yaml", **docker.environ)
    assert code == 0 and "98.61%" in output and "node1 ended with 0" in output, output
    assert not docker("ps", "--all", "--quiet", "--filter", "name=ddp-job-kit") and not docker("volume", "ls", "--quiet")


def test_without_an_engine_make_smoke_says_what_it_does_instead(docker: Docker, folder: Path) -> None:
    settings = f"SET=training.max_steps=3 {overrides(folder.parent / 'run')}"
    code, output = command("make", "smoke", settings, "VENV=" + str(Path(TRAINER[0]).parents[1]), DOCKER_HOST="unix:///nowhere")
    assert code == 0 and "no container engine with compose answers here: two nodes run as plain processes" in output, output


def test_make_image_says_what_it_has_built(docker: Docker) -> None:
    environ = {"IMAGE": docker.image, "BASE_IMAGE": docker.base, "CUDA_VERSION": "none", **docker.environ}
    code, output = command("make", "image", **environ)
    assert code == 0, output
    assert re.search(rf"{docker.image}: \d+ bytes in \d+ layers, user 10001:10001\nddp-job-kit 0\.1\.0\nPython 3\.", output), (
        output
    )
    assert "torch 2.13.0+cpu" in output


def test_the_compose_backend_runs_any_config_on_any_number_of_nodes(
    docker: Docker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in docker.environ.items():
        monkeypatch.setenv(name, value)
    (folder / "$HOME data").mkdir()
    monkeypatch.chdir(folder / "$HOME data")
    settings = ["backend=compose", f"container.image={docker.image}", "training.max_steps=20", "training.log_every_steps=1"]
    digits = str(ROOT / "configs" / "digits.yaml")
    three = ["resources.nodes=3", "resources.ranks_per_node=1", "training.batch_size=33", overrides(folder / "run")]
    code, rendered = command(*TRAINER, "render", digits, *settings, *three, cwd=Path.cwd())
    assert code == 0, rendered
    code, output = command(*TRAINER, "submit", digits, *settings, *three, cwd=Path.cwd())
    assert code == 0 and rendered == (folder / "run" / "plan.txt").read_text(), output
    job = Job.of(str(folder / "run"))
    assert job.status().detail.endswith("of 3 containers run")
    assert job.wait(120).state == "done", (folder / "run" / "logs" / "compose.log").read_text()
    assert [step for step, _ in losses(folder / "run")] == list(range(1, 21))
    assert {path.name.split(".")[1] for path in (folder / "run" / "logs" / "attempt-000").iterdir()} == {
        "node0",
        "node1",
        "node2",
    }
    assert not docker("ps", "--all", "--quiet", "--filter", "name=digits-"), "the containers are gone"


def test_the_compose_backend_stops_goes_on_and_fails_as_others_do(
    docker: Docker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in docker.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    settings = ["backend=compose", f"container.image={docker.image}", "training.log_every_steps=1", overrides(folder / "run")]
    digits = str(ROOT / "configs" / "digits.yaml")
    job = submit(load_config(digits, *settings))
    assert wait_until(lambda: len(metrics(folder / "run")) > 5, 60)
    assert "asked 1 nodes to save and stop" in job.cancel()
    assert wait_until(lambda: not job.active(), 40)
    assert job.status().state == "stopped"
    job = submit(load_config(digits, *settings, "training.max_steps=400"))
    assert job.wait(60).state == "done" and [step for step, _ in losses(folder / "run")] == list(range(1, 401))
    (folder / "train.py").write_text("raise ValueError('bad sample')\n")
    (folder / "run.yaml").write_text("name: faulty\nbackend: compose\nentrypoint: train.py\n")
    with pytest.raises(JobFailedError, match="FAULT C1 host=node0 rank=0: ValueError: bad sample"):
        submit(load_config("run.yaml", f"container.image={docker.image}", overrides(folder / "faulty"))).wait(60)


def test_an_image_that_is_not_there_is_one_line(docker: Docker, folder: Path) -> None:
    argv = ["submit", str(ROOT / "configs" / "digits.yaml"), "backend=compose", "container.image=nobody/nothing:1"]
    code, output = command(*TRAINER, *argv, cwd=folder, **docker.environ)
    assert code == 2 and output.startswith("error: container.image=nobody/nothing:1: is not on this machine; build it"), output
    code, output = command(*TRAINER, *argv, cwd=folder, DOCKER_HOST="unix:///nowhere")
    assert code == 2 and output.startswith("error: docker version: ") and len(output.splitlines()) == 1, output
