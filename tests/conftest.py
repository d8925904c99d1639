"""What all tests share: one thread a process, a folder whose name has a space and quotes, and a small config."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.lab.base_image import base_image
from tests.lab.engine import Engine
from tests.lab.engine import missing as missing_tools
from tests.lab.machines import LOGIN
from tests.lab.slurm import USER, Cluster, missing

if TYPE_CHECKING:
    from tests.machines import Nodes

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share this machine's cores
for name in [n for n in os.environ if n.startswith(("PET_", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_"))]:
    del os.environ[name]  # the tests are their own job

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "configs" / "digits.yaml"
STARTED: list[subprocess.Popen[str]] = []  # by the test that runs


@pytest.fixture(autouse=True)
def _nothing_runs_on() -> Iterator[None]:
    """What a failed test has left running is not to disturb the next ones."""
    yield
    while STARTED:
        with STARTED.pop() as process:  # closes its output and waits for its end
            process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place to work in, with the characters that break careless scripts."""
    made = tmp_path / 'it\'s a "run" folder'
    made.mkdir()
    return made


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Slurm cluster of two nodes, for all tests of a session."""
    if why := missing():
        pytest.skip(why)
    made = Cluster(Path(f"/var/lib/slurmlab-{os.getpid()}"), nodes=2, gpus=8, shared=[])
    made.up()
    yield made
    made.down()


@pytest.fixture
def shared(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that all nodes see (their /tmp is their own), with awkward characters; the cluster's commands are on PATH."""
    monkeypatch.setenv("PATH", f"{cluster.bin}:{os.environ['PATH']}")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as parent:
        folder = Path(parent) / 'it\'s a "run" 100% folder'
        folder.mkdir()
        yield folder
        for user in ("root", USER):
            cluster.on(LOGIN, "scancel", f"--user={user}")
        left = "" if wait_until(cluster.idle, 60) else cluster.on(LOGIN, "sh", "-c", "squeue; sinfo -N -o '%N %T %E'").stdout
        if left:  # the tests after this one are not to suffer for it
            cluster.on(LOGIN, "scontrol", "update", f"nodename={','.join(cluster.nodes)}", "state=resume", check=False)
        assert not left, left


@pytest.fixture
def place(cluster: Cluster) -> Iterator[Path]:
    """A folder that both machines see; their networks are whole again afterwards."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)
    for node in cluster.nodes:
        cluster.heal(node)


@pytest.fixture
def nodes(cluster: Cluster, place: Path) -> Iterator[Nodes]:
    """Both machines."""
    from tests.machines import Nodes  # it brings torch

    made = Nodes(cluster, place)
    yield made
    for rank in list(made.started):
        made.kill(rank)


class Docker:
    """The lab's engine with the project's own image on it."""

    def __init__(self, engine: Engine) -> None:
        self.environ = engine.environ
        self.base = base_image(engine)
        self.image = "ddp-job-kit:test"
        done = self.build("--build-arg", "CUDA_VERSION=none", "--tag", self.image)
        assert done.returncode == 0, done.stdout + done.stderr

    def __call__(self, *argv: str, check: bool = True, stdin: str | None = None, **environ: str) -> str:
        """Run docker; returns what it printed."""
        done = subprocess.run(
            ["docker", *argv],
            env={**os.environ, **self.environ, **environ},
            capture_output=True,
            text=True,
            input=stdin,
            timeout=280,
        )
        assert not check or done.returncode == 0, f"docker {' '.join(argv)}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def build(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Build the project's image on the stand-in base."""
        argv = ["docker", "build", "--build-arg", f"BASE_IMAGE={self.base}", *options, str(ROOT)]
        return subprocess.run(argv, env={**os.environ, **self.environ}, capture_output=True, text=True)


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """A container engine for all tests of a session; what it has built is kept for the next."""
    if os.geteuid():
        pytest.skip("the container engine of the tests needs root")
    if absent := missing_tools():
        pytest.skip(f"not installed: {', '.join(absent)} (make docker-packages)")
    engine = Engine()
    engine.up()
    yield Docker(engine)
    engine.down()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `SHORT` with four ranks on this machine, which a cluster has to equal."""
    from tests.jobs import SHORT, TRAINER, command, overrides  # they bring torch
    from tests.slurm_jobs import TWO_BY_TWO

    run = tmp_path_factory.mktemp("local") / "run"
    code, output = command(*TRAINER, "run", *SHORT, *TWO_BY_TWO, overrides(run))
    assert code == 0, output
    return run


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of `slow` that nobody has disturbed, which a disturbed one has to equal."""
    from tests.jobs import TRAINER, command
    from tests.test_runs import slow

    run = tmp_path_factory.mktemp("uninterrupted") / "run"
    code, output = command(*TRAINER, "node", *slow(run, 0.0))
    assert code == 0, output
    return run


def wait_until(condition: Callable[[], object], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
