"""An image that stands in for NVIDIA's NGC PyTorch image, made without a registry: Debian by mmdebstrap, the CPU build of torch by pip,
and what a job can meet in the real one: variables, a constraint file for pip, an entrypoint that leaves a trace. No torchvision.

    python -m tests.lab.base_image      builds it on the engine that runs unless it is there, and prints its tag
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import shlex
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.lab.engine import PIP, Engine
from tests.lab.machines import LabError, run

BASE = "local/pytorch-cpu"
DEBIAN, PYTHON, TORCH, NUMPY = "bookworm", "3.11", "2.13.0", "2.4.6"
PACKAGES = "ca-certificates,iproute2,iptables,passwd,procps,python-is-python3,python3-pip,python3-venv,tini"
CERTIFICATES = Path(os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt")

# What an NGC image sets and a job can meet. Names and values as in the history of pytorch:25.10-py3, but for PyTorch's version;
# PIP_CERT is this machine's. CMD is not set there either. NGC images on Ubuntu 24.04 have its user ubuntu: uid 1000 is taken
# when a derived image wants to add a user.
DOCKERFILE = f"""\
FROM {{stage}}
ENV PATH=/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \\
    LD_LIBRARY_PATH=/usr/local/cuda/compat/lib:/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \\
    SHELL=/bin/bash BASH_ENV=/etc/bash.bashrc LC_ALL=C.UTF-8 PYTHONIOENCODING=utf-8 \\
    CUDA_VERSION=13.0.2.006 CUDA_DRIVER_VERSION=580.95.05 CUDA_HOME=/usr/local/cuda NCCL_VERSION=2.27.7 CUDNN_VERSION=9.14.0.64 \\
    NVIDIA_PRODUCT_NAME=PyTorch NVIDIA_PYTORCH_VERSION=25.10 NVIDIA_REQUIRE_CUDA="cuda>=9.0" \\
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility,video \\
    PYTORCH_VERSION={TORCH} PYTORCH_BUILD_VERSION={TORCH} PYTORCH_BUILD_NUMBER=0 PYTORCH_HOME=/opt/pytorch/pytorch \\
    OPAL_PREFIX=/opt/hpcx/ompi OMPI_MCA_coll_hcoll_enable=0 JUPYTER_PORT=8888 TENSORBOARD_PORT=6006 \\
    PIP_CONSTRAINT=/etc/pip/constraint.txt PIP_BREAK_SYSTEM_PACKAGES=1 PIP_DEFAULT_TIMEOUT=100 \\
    PIP_CERT=/etc/ssl/certs/ca-certificates.crt
LABEL com.nvidia.pytorch.version={TORCH} com.nvidia.volumes.needed=nvidia_driver
RUN useradd --create-home --uid 1000 ubuntu && python3 /opt/nvidia/ddp_step.py
EXPOSE 8888 6006
WORKDIR /workspace
RUN chmod a+w .
ENTRYPOINT ["/opt/nvidia/nvidia_entrypoint.sh"]
"""

ENTRYPOINT = """\
#!/bin/bash
# Stands in for NGC's: a banner on stdout, a trace in the environment, then the command in this shell's place.
printf '\\n=============\\n== PyTorch ==\\n=============\\n\\nNVIDIA Release %s (stand-in, CPU)\\nPyTorch Version %s\\n\\n' \\
    "$NVIDIA_PYTORCH_VERSION" "$PYTORCH_VERSION"
export NVIDIA_ENTRYPOINT_RAN=1
if [ $# -eq 0 ]; then exec /bin/bash; else exec "$@"; fi
"""

# A user who is not root can't keep .pyc files in the image, and without them each start compiles for 10 s and more. All of torch
# takes as long to compile as the rest of the build, so a real step compiles what steps import; DDP and optimizers import late.
DDP_STEP = """\
import torch, torch.distributed as dist, torch.distributed.run, torch.utils.data
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(2, 2))
for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.AdamW(model.parameters())):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def base_image(engine: Engine) -> str:
    """Build the stand-in if this recipe's is not there, a minute or two, and drop those of other recipes; return its tag."""
    engine.check()
    recipe = Path(__file__).read_bytes() + CERTIFICATES.read_bytes() + _pip_config().encode()
    tag = f"{BASE}:{hashlib.sha256(recipe).hexdigest()[:12]}"
    with engine.locked():
        if engine.docker("image", "inspect", tag, check=False).returncode:
            work = engine.folder / "work"
            shutil.rmtree(work, ignore_errors=True)
            try:
                _build_base(engine, tag, work)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            tags = engine.docker("images", "--format", "{{.Repository}}:{{.Tag}}", BASE).stdout.split()
            engine.docker("rmi", *(other for other in tags if other != tag), check=False)
    return tag


def _build_base(engine: Engine, tag: str, work: Path) -> None:
    root, added, stage = work / "root", work / "added", f"{BASE}:stage"
    (work / "nothing").mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        # In a mount namespace: mmdebstrap mounts this machine's /dev and /sys, which rmtree would meet if it were killed.
        # Unsafe-io: nothing here has to outlive a power cut, and syncing each file takes half of the time.
        argv = ["unshare", "--mount", "mmdebstrap", "--variant=apt", f"--include={PACKAGES}", "--dpkgopt=force-unsafe-io"]
        debian = pool.submit(run, *argv, DEBIAN, root, *_mirrors())
        _add_files(added)
        debian.result()
    run("chmod", "--recursive", "a+rX", added)  # whatever the umask
    run("cp", "--archive", "--link", "--force", f"{added}/.", root)
    pack = f"tar --directory {shlex.quote(str(root))} --numeric-owner --create . | docker import - {stage}"
    run(*engine.settings(), "bash", "-o", "pipefail", "-c", pack)
    (work / "Dockerfile").write_text(DOCKERFILE.format(stage=stage))
    engine.docker("build", "--tag", tag, "--file", work / "Dockerfile", work / "nothing")


def _mirrors() -> list[str]:
    """Where this machine's apt finds that Debian; none leaves it to mmdebstrap."""
    shown = ["--format", "deb $(REPO_URI) $(CODENAME) main", "Created-By: Packages", "Origin: Debian", "Component: main"]
    lines = run("apt-get", "indextargets", *shown, check=False).stdout.splitlines()
    return sorted({line for line in lines if f" {DEBIAN}" in line})


def _pip_config() -> str:
    """Where this machine's pip looks on the network, for pip in a build; a build does not see this machine's disk."""
    lines = ["[global]"]
    for setting in run(*PIP, "config", "list").stdout.splitlines():
        name, _, value = setting.partition("=")
        if name.rpartition(".")[2] in ("index-url", "extra-index-url", "trusted-host"):
            words = [word for word in ast.literal_eval(value).split() if not word.startswith(("/", "file:"))]
            lines += [f"{name.rpartition('.')[2]} = {' '.join(words)}"] if words else []
    return "\n".join(lines) + "\n"


def _add_files(root: Path) -> None:
    """All that Debian does not bring, below `root`."""
    site = root / "usr" / "local" / "lib" / f"python{PYTHON}" / "dist-packages"
    # Without "+cpu" pip would take gigabytes of CUDA where the CPU build is not at hand; now it says so.
    wanted = [f"torch=={TORCH}+cpu", f"numpy=={NUMPY}"]
    run(*PIP, "install", "--no-compile", f"--python-version={PYTHON}", "--only-binary=:all:", "--target", site, *wanted)
    for script in (site / "bin").iterdir():
        script.write_text("#!/usr/bin/python3\n" + script.read_text().partition("\n")[2])
    shutil.move(site / "bin", root / "usr" / "local" / "bin")
    pins = sorted(f"{found.name}=={found.version}\n" for found in importlib.metadata.distributions(path=[str(site)]))
    files = {
        "etc/pip/constraint.txt": "".join(pins),  # as in NGC: pip in a derived image leaves torch alone or fails
        "etc/pip.conf": _pip_config(),
        "etc/ssl/certs/ca-certificates.crt": CERTIFICATES.read_text(),
        "opt/nvidia/nvidia_entrypoint.sh": ENTRYPOINT,
        "opt/nvidia/ddp_step.py": DDP_STEP,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "opt/nvidia/nvidia_entrypoint.sh").chmod(0o755)


if __name__ == "__main__":
    try:
        print(base_image(Engine()))
    except LabError as error:
        sys.exit(f"error: {error}")
