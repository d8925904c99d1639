"""Jobs whose nodes run in an image: really, by the lab's stand-in for pyxis; by argv for the other runtimes, whose stand-ins on PATH
record what they were called with and then run the command on the node itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import DIGITS, ROOT, wait_until
from tests.jobs import SHORT, TRAINER, command, equal, losses, overrides, saved
from tests.lab.slurm import Cluster
from tests.slurm_jobs import TWO_BY_TWO, batch_log, exit_code, follow, queue, slurm, submit
from trainer.errors import ConfigError, ExitCode
from trainer.image import pinned
from trainer.launch.plan import Submission
from trainer.launch.slurm import plan
from trainer.settings import load_config

pytestmark = pytest.mark.slurm

# Tells where a rank woke up, in the folder of its config.
PROBE = """
import json, os, resource, sys
import trainer
names = ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "WANDB_MODE", "NCCL_DEBUG", "PYTHONPATH", "PYTHONNOUSERSITE"]
seen = {name: os.environ.get(name) for name in names}
seen |= {"kit": trainer.__file__, "cwd": os.getcwd(), "image": os.path.exists("/etc/image"), "world": os.environ["WORLD_SIZE"]}
seen |= {"memlock": resource.getrlimit(resource.RLIMIT_MEMLOCK), "shm": os.path.ismount("/dev/shm"), "data": os.listdir("/data")}
open(f"seen-{os.environ['RANK']}.json", "w").write(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def cuda() -> str:
    """The CUDA version of this environment's torch."""
    code = "import torch; print(torch.version.cuda or '')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def image(cluster: Cluster, shared: Path) -> Iterator[list[str]]:
    """The pinned image as far as the lab has it: a root with variables of its own, and `python3` is this environment's. Returns the
    settings for it: what it lacks of a system is mounted."""
    root = cluster.images / re.sub("[/:]", "+", pinned().name)
    for folder in ("etc", "opt/bin", "tmp"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    (root / "etc" / "image").write_text("")
    variables = ["PATH=/opt/bin:/usr/bin", "PET_NNODES=77", "PET_MASTER_ADDR=image", "WANDB_MODE=image", "NCCL_DEBUG=image"]
    (root / "etc" / "environment").write_text("\n".join([*variables, "PYTHONPATH=/nowhere"]) + "\n")
    (root / "opt" / "bin" / "python3").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    (root / "opt" / "bin" / "python3").chmod(0o755)
    (shared / "data").mkdir()
    (shared / "data" / "set").write_text("")
    folders = {"/usr", sys.prefix, sys.base_prefix, str(ROOT)}
    mounts = [f"{folder}:{folder}:ro" for folder in sorted(folders)] + [f"{shared}/data:/data:ro"]
    yield ["container.runtime=pyxis", f"container.mounts={json.dumps(mounts)}"]


def probe(shared: Path, *settings: str) -> list[dict[str, Any]]:
    """Run the probe on two nodes; returns what its ranks saw."""
    (shared / "probe.py").write_text(PROBE)
    (shared / "probe.yaml").write_text("name: probe\nbackend: slurm\nentrypoint: probe.py\nresources: {nodes: 2}\n")
    run = shared / "run"
    code, output = command(*TRAINER, "submit", "probe.yaml", *settings, overrides(run), cwd=shared)
    assert code == 0, output
    job = str(json.loads((run / "job.json").read_text())["job_id"])
    assert wait_until(lambda: not queue(job), 90), queue(job)
    assert exit_code(run) == 0, batch_log(run)
    return [json.loads((shared / f"seen-{rank}.json").read_text()) for rank in (0, 1)]


def test_nodes_run_in_the_image_and_its_variables_do_not_win(image: list[str], shared: Path, cuda: str) -> None:
    wanted = [f"container.cuda_version='{cuda}'"] if cuda else ["container.image=nvcr.io/nvidia/pytorch:26.09-py3"]
    seen = probe(shared, *image, *wanted, "container.env={WANDB_MODE: offline, PATH: '/opt/bin:/usr/bin:/bin:/nowhere'}")
    for rank, told in enumerate(seen):
        assert told["image"] and told["cwd"] == str(shared) and told["data"] == ["set"] and told["shm"], told
        assert (told["PET_NNODES"], told["PET_NODE_RANK"], told["PET_MASTER_ADDR"]) == ("2", str(rank), "node1")
        assert told["WANDB_MODE"] == "offline" and told["NCCL_DEBUG"] == "image", "only what is named beats the image"
        assert told["memlock"][0] == told["memlock"][1] and told["PYTHONNOUSERSITE"] == "1" and told["world"] == "2"
    if cuda:
        assert all(told["PYTHONPATH"] == "/opt/ddp-job-kit:/nowhere" for told in seen), "the image's own comes after"
        assert all(told["kit"].startswith("/opt/ddp-job-kit/trainer/") for told in seen), "the pinned image has the kit mounted"
    assert f"image nvcr.io#nvidia/pytorch:{pinned().tag} by pyxis" in batch_log(shared / "run")


def test_digits_learn_the_same_in_an_image(image: list[str], shared: Path, reference: Path) -> None:
    run = shared / "run"
    submit(run, *SHORT, *TWO_BY_TWO, *image, "container.image=nvcr.io/nvidia/pytorch:26.09-py3")
    assert "ended well" in follow(run), batch_log(run)
    assert losses(run) == losses(reference) and equal(saved(run), saved(reference))


def test_an_image_with_another_cuda_is_refused_by_every_node_in_one_line(image: list[str], shared: Path) -> None:
    run = shared / "run"
    job = submit(run, *SHORT, "resources.nodes=2", *image, "container.cuda_version='1.0'")
    assert wait_until(lambda: not queue(job), 60), queue(job)
    lines = [line for line in batch_log(run).splitlines() if line.startswith("FAULT B3")]
    assert len(lines) == 2 and len(set(lines)) == 1 and " host=node" in lines[0], batch_log(run)
    assert all("the job wants CUDA 1.0; fix: start the image that has it" in line for line in lines)
    assert "requeueing" not in batch_log(run) and f"ExitCode={int(ExitCode.REFUSED)}:0" in slurm("scontrol", "show", "job", job)


def test_an_image_that_is_not_there_ends_the_job_with_the_runtimes_words(shared: Path) -> None:
    run = shared / "run"
    job = submit(run, *SHORT, "container.runtime=pyxis", "container.image=docker.io/nobody/nothing:1")
    assert wait_until(lambda: not queue(job), 60), queue(job)
    assert "container: no such image: docker.io#nobody/nothing:1" in batch_log(run) and "requeueing" not in batch_log(run)


RECORDER = r"""#!/usr/bin/env python3
# Records its argv, then runs what comes after the image as the node's own process.
import json, os, sys
words = sys.argv[1:]
names = ["NCCL_DEBUG", "ON_NODE_WANDB_MODE", "ON_NODE_PET_NODE_RANK", "ON_NODE_PYTHONNOUSERSITE"]
seen = {"argv": [os.path.basename(sys.argv[0]), *words], "env": {name: os.environ.get(name) for name in names}}
with open(f"{os.environ['RUN_DIR']}/called-{os.environ['SLURM_NODEID']}", "a") as file:
    file.write(json.dumps(seen) + "\n")
if words[0] != "rm":
    image = next(i for i, word in enumerate(words) if word.startswith(IMAGES))
    os.execvp(words[image + 1], words[image + 1 :])
"""
IMAGES = (
    "registry.example.com:5000/team/kit",
    "docker://registry.example.com:5000/team/kit",
    "/images/kit.sqsh",
    "/images/kit.sif",
)


@pytest.fixture
def recorders(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (shared / "bin").mkdir()
    for name in ("docker", "podman", "enroot", "apptainer"):
        path = shared / "bin" / name
        path.write_text(RECORDER.replace("IMAGES", repr(IMAGES)))
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{shared}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("SECRET", "not to be passed on")


def overrides_in_sh(run: Path) -> str:
    """The run's folder as the batch file quotes it for YAML."""
    return "run_dir='" + str(run).replace("'", "''") + "'"


DIGEST = f"sha256:{'ab' * 32}"
RUNTIMES = {
    "docker": (f"{IMAGES[0]}:1@{DIGEST}", f"{IMAGES[0]}:1@{DIGEST}"),
    "podman": (f"{IMAGES[0]}:1", f"{IMAGES[0]}:1"),
    "apptainer": (f"{IMAGES[0]}:1@{DIGEST}", f"docker://{IMAGES[0]}@{DIGEST}"),
    "enroot": ("/images/kit.sqsh", "/images/kit.sqsh"),
}


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.usefixtures("recorders")
def test_other_runtimes_are_called_as_their_manuals_say(runtime: str, shared: Path, reference: Path) -> None:
    given, named = RUNTIMES[runtime]
    run = shared / "run"
    container = {
        "runtime": runtime,
        "image": given,
        "python": sys.executable,
        "mounts": ["/usr:/data:ro"],
        "env": {"WANDB_MODE": "offline"},
    }
    code, output = command(
        *TRAINER, "submit", *SHORT, *TWO_BY_TWO, "backend=slurm", f"container={json.dumps(container)}", overrides(run), cwd=shared
    )
    assert code == 0, output
    assert "ended well" in follow(run), batch_log(run)
    assert losses(run) == losses(reference) and equal(saved(run), saved(reference))
    for node in (0, 1):
        first, *rest = [json.loads(line) for line in (run / f"called-{node}").read_text().splitlines()]
        argv, env = first["argv"], first["env"]
        start, after = argv[: argv.index(named)], argv[argv.index(named) + 1 :]
        assert env == {
            "NCCL_DEBUG": "WARN",
            "ON_NODE_WANDB_MODE": "offline",
            "ON_NODE_PET_NODE_RANK": str(node),
            "ON_NODE_PYTHONNOUSERSITE": "1",
        }
        node_argv = [sys.executable, "-m", "trainer", "node", f"{run}/config.yaml", overrides_in_sh(run), "resources.nodes=2"]
        assert after[:2] == ["bash", "-c"] and after[3:] == ["node", *node_argv]
        assert not any("SECRET" in word or "offline" in word for word in argv), "no value on a command line"
        job = json.loads((run / "job.json").read_text())["job_id"]
        if runtime in ("docker", "podman"):
            assert {"--network=host", "--ipc=host", "--rm", f"--name=trainer-{job}-0-{node}", f"--workdir={shared}"} <= set(start)
            assert {f"--volume={shared}:{shared}", "--volume=/usr:/data:ro"} <= set(start)
            assert {"--env=ON_NODE_PET_NODE_RANK", "--env=ON_NODE_WANDB_MODE", "--env=NCCL_DEBUG", "--env=SLURM_JOB_ID"} <= set(
                start
            )
            assert [call["argv"] for call in rest] == [[runtime, "rm", "--force", f"trainer-{job}-0-{node}"]]
        if runtime == "docker":
            assert {"--ulimit=memlock=-1", '--gpus="device=0,1"', f"--user={os.getuid()}:{os.getgid()}"} <= set(start)
        if runtime == "podman":
            assert {"--ulimit=host", "--device=nvidia.com/gpu=0", "--device=nvidia.com/gpu=1", "--userns=keep-id"} <= set(start)
        if runtime == "apptainer":
            assert {"--nv", f"--bind={shared}:{shared}", "--bind=/usr:/data:ro", f"--pwd={shared}"} <= set(start)
        if runtime == "enroot":
            assert f"--mount={shared}:{shared}:none:x-create=auto,rbind,rw" in start
            assert "--mount=/usr:/data:none:x-create=auto,rbind,ro" in start
            assert {"--env=ON_NODE_PET_NODE_RANK", "--env=ON_NODE_WANDB_MODE", "--env=CUDA_VISIBLE_DEVICES"} <= set(start)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["container.runtime=enroot"], "container.image=null: enroot starts the file of an image; make one with enroot import"),
        (["container.runtime=enroot", "container.image=a/b:1"], "container.image=a/b:1: enroot starts the file"),
        (["container.runtime=dockr"], "container.runtime=dockr: must be one of pyxis, enroot, apptainer, docker, podman, none"),
        (["container.mounts=[data]"], "container.mounts.0=data"),
        (["container.mounts=['/a:/b:rx']"], "container.mounts.0=/a:/b:rx"),
        (["container.mounts=['/a,b:/c']"], "container.mounts.0=/a,b:/c"),
        (["container.image='a b'"], "container.image=a b"),
        (["container.cuda_version='13'"], "container.cuda_version="),
        (["container.env={A-B: x}"], "container.env.A-B"),
        (["container.env={PET_NNODES: '3'}"], "container.env.PET_NNODES=3: is set by the kit"),
    ],
)
def test_settings_of_an_image_are_checked(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(DIGITS, "backend=slurm", *settings)
    assert str(error.value).startswith(words) and len(str(error.value).splitlines()) == 1


def test_a_folder_that_cannot_be_mounted_is_refused(folder: Path) -> None:
    config = load_config(DIGITS, "backend=slurm", "container.runtime=pyxis")
    with pytest.raises(ConfigError, match="has a colon or comma and cannot be mounted"):
        plan(Submission([config]), f"{folder}/a,b")


def test_the_batch_file_and_the_table_agree() -> None:
    batch = (ROOT / "slurm" / "job.sbatch").read_text()
    assert f"\nPINNED_IMAGE={pinned().name} PINNED_CUDA={pinned().cuda}\n" in batch
