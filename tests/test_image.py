"""The Dockerfile on the stand-in base, and the files that repeat what trainer/image.yaml pins."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
import yaml

from tests.conftest import ROOT, Docker
from trainer.image import pinned

IMAGE = pinned()


@pytest.mark.parametrize(
    ("file", "pattern", "value"),
    [
        ("Dockerfile", r"^ARG BASE_IMAGE=(\S+)$", IMAGE.name),
        ("Dockerfile", r"^ARG CUDA_VERSION=(\S+)$", IMAGE.cuda),
        ("docker-compose.yml", r"BASE_IMAGE: \$\{BASE_IMAGE:-(\S+)\}", IMAGE.name),
        ("docker-compose.yml", r"CUDA_VERSION: \$\{CUDA_VERSION:-(\S+)\}", IMAGE.cuda),
        ("docker-compose.yml", r"image: \$\{IMAGE:-(\S+)\}", IMAGE.built),
        ("slurm/job.sbatch", r"^PINNED_IMAGE=(\S+)", IMAGE.name),
        ("slurm/job.sbatch", r"PINNED_CUDA=(\S+)$", IMAGE.cuda),
    ],
)
def test_what_is_pinned_stands_in_one_table(file: str, pattern: str, value: str) -> None:
    assert re.findall(pattern, (ROOT / file).read_text(), re.MULTILINE) == [value], f"{file} against trainer/image.yaml"


def test_no_other_file_names_another_tag() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    for file in files:
        text = (ROOT / file).read_bytes().decode("utf-8", "replace")
        assert set(re.findall(r"nvcr\.io[/#]nvidia/pytorch:([\w.-]+)", text)) <= {IMAGE.tag} or file.startswith("tests/"), file


def test_the_compose_files_say_the_same_of_both_nodes() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    told = [
        {**service, "hostname": "", "environment": {**service["environment"], "PET_NODE_RANK": ""}}
        for service in services.values()
    ]
    assert told[0] == told[1]


@pytest.mark.docker
def test_the_compose_files_are_valid(docker: Docker) -> None:
    for files in (["docker-compose.yml"], ["docker-compose.yml", "docker-compose.gpu.yml"]):
        docker("compose", *(word for file in files for word in ("--file", str(ROOT / file))), "config", "--quiet")


@pytest.mark.docker
def test_the_image_keeps_the_bases_torch_and_entrypoint_and_says_what_it_is(docker: Docker) -> None:
    code = "import os, torch; print(torch.__version__, os.getuid(), os.environ['NVIDIA_ENTRYPOINT_RAN'], os.getpid())"
    told = docker("run", "--rm", "--init", docker.image, "python3", "-c", code).splitlines()[-1]
    assert told.split()[:3] == ["2.13.0+cpu", "10001", "1"]
    (facts,) = json.loads(docker("image", "inspect", docker.image))
    labels = facts["Config"]["Labels"]
    assert labels["org.opencontainers.image.base.name"] == docker.base and labels["ddp-job-kit.cuda"] == "none"
    assert labels["org.opencontainers.image.version"] and labels["org.opencontainers.image.revision"]
    assert facts["Config"]["Entrypoint"] == ["/opt/nvidia/nvidia_entrypoint.sh"]
    assert "trainer" in docker("run", "--rm", docker.image)
    assert (
        docker("run", "--rm", docker.image, "python3", "-m", "pip", "check").splitlines()[-1] == "No broken requirements found."
    )


@pytest.mark.docker
def test_a_base_with_another_cuda_is_refused_when_it_is_built(docker: Docker) -> None:
    done = docker.build("--build-arg", "CUDA_VERSION=13.4")
    assert done.returncode and "error: CUDA_VERSION=13.4: the base has torch 2.13.0+cpu cuda none" in done.stdout + done.stderr


@pytest.mark.docker
@pytest.mark.parametrize("user", ["10001:10001", "4711:4711", "1000:1000"])
def test_no_file_can_be_written_but_in_the_run_folder(user: str, docker: Docker) -> None:
    argv = ["run", "--rm", "--user", user, "--entrypoint", "find", docker.image]
    found = docker(*argv, "/", "-xdev", "!", "-type", "l", "-writable", "-print", check=False).splitlines()
    assert set(found) <= {"/tmp", "/var/tmp", "/run/lock", "/workspace/runs"} and "/workspace/runs" in found


@pytest.mark.docker
def test_it_runs_read_only_as_any_user(docker: Docker) -> None:
    argv = ["run", "--rm", "--read-only", "--tmpfs", "/tmp", "--user", "4711:4711", "--cap-drop", "ALL", docker.image]
    settings = ["training.max_steps=3", "resources.ranks_per_node=1", "data.num_workers=1", "run_dir=/tmp/run"]
    assert "evaluation loss" in docker(*argv, "trainer", "run", "configs/digits.yaml", *settings)


@pytest.mark.docker
def test_a_uid_of_ones_own_can_be_built_in(docker: Docker) -> None:
    """1000 is NVIDIA's `ubuntu`, whose home must not stay writable."""
    done = docker.build(
        "--build-arg", "CUDA_VERSION=none", "--build-arg", "UID=1000", "--build-arg", "GID=1000", "--tag", "ddp-job-kit:uid"
    )
    assert done.returncode == 0
    argv = ["run", "--rm", "--entrypoint", "find", "ddp-job-kit:uid"]
    found = docker(*argv, "/home", "/workspace", "-writable", check=False).split()
    assert found == ["/workspace/runs"]
