"""One container as real processes: its argv is PID 1 of a PID namespace, in the network, host name and IPC of its pod."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.lab.kube import pod_spec
from tests.lab.kube.pod_root import Room, root_commands
from tests.lab.kube.pod_user import SYSTEM_PATH, User
from tests.lab.kube.sandbox import new_pid_namespace
from tests.lab.kube.workload import Manifest
from tests.lab.machines import LabError, wait_for

NOT_SET_UP = 125
_SETUP_FAILED = "setup-failed"


class Container:
    """One container of a pod through its restarts."""

    def __init__(self, spec: Manifest, room: Room, sink: Callable[[bytes], None]) -> None:
        self.spec, self.name, self.room, self.sink = spec, str(spec["name"]), room, sink
        self.codes: list[int] = []
        self.starts_at = 0.0
        self.backoff_seconds = 10.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        """Begin a run in a new root."""
        room = self.room
        user = User(room.identity.pod.spec, self.spec)
        environ = {**room.image.environ, "HOME": user.home}
        environ |= pod_spec.environment(self.spec, room.identity, room.known)
        argv = pod_spec.argv(self.spec, environ)
        opened = user.needs(argv[0], environ["PATH"], room.note)
        folder = room.folder / f"container-{self.name}"
        folder.mkdir(exist_ok=True)
        commands = root_commands(folder, room, self.spec, opened)
        script = "\n".join(shlex.join(words) for words in commands)
        working = str(self.spec.get("workingDir") or room.image.folder)
        chroot, env = (shutil.which(tool, path=SYSTEM_PATH) or tool for tool in ("chroot", "env"))
        enter = [chroot, str(folder / "root"), env, f"--chdir={working}", *user.prefix, *argv]
        failed = shlex.quote(str(room.folder / _SETUP_FAILED))
        shell = f'( set -eu; PATH={SYSTEM_PATH}\n{script}\n) || {{ : >{failed}; exit {NOT_SET_UP}; }}\nexec "$@"'
        argv = [*_namespaces(room.sandbox), "/bin/sh", "-c", shell, "sh", *enter]
        with new_pid_namespace():
            self._process = subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def reap(self) -> int | None:
        """Pass on what was written; the exit code, if the container has ended since the last call."""
        if self._process is None:
            return None
        status = self._process.poll()  # first: what was written before the end is read below
        assert self._process.stdout is not None
        while True:
            try:
                written = os.read(self._process.stdout.fileno(), 65536)
            except BlockingIOError:
                break
            if not written:
                break
            self.sink(written)
        if status is None:
            return None
        self._process.stdout.close()
        self._process = None
        if status == NOT_SET_UP and (self.room.folder / _SETUP_FAILED).exists():
            raise LabError(f"container {self.name}: its root could not be made")
        self.codes.append(128 - status if status < 0 else status)
        return self.codes[-1]

    def signal(self, number: int, match: str = "") -> int:
        """Signal PID 1, or all processes whose command line has a text; returns how many."""
        if self._process is None:
            return 0
        self._await_start()
        first, sent = self._process.pid, 0
        for pid in _same_namespace(first, match) if match else [first]:
            with suppress(ProcessLookupError):  # it has ended meanwhile
                os.kill(pid, number)
                sent += 1
        return sent

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)  # the rest goes with it

    def _await_start(self) -> None:
        """Wait until PID 1 is in its own root; before, it is the shell that sets it up."""
        assert self._process is not None
        process = self._process
        inside = str(self.room.folder / f"container-{self.name}" / "root")

        def settled() -> bool:
            with suppress(OSError):  # it has ended
                return os.readlink(f"/proc/{process.pid}/root") == inside
            return True

        wait_for(settled, 10, f"start of container {self.name}")


def _namespaces(sandbox: int) -> list[str]:
    nsenter, unshare = (shutil.which(tool, path=SYSTEM_PATH) or tool for tool in ("nsenter", "unshare"))
    return [nsenter, f"--target={sandbox}", "--net", "--uts", "--ipc", "--", unshare, "--mount", "--"]


def _same_namespace(first: int, match: str) -> list[int]:
    """The processes of a container whose command line has a text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            inside = os.readlink(entry / "ns" / "pid") == os.readlink(f"/proc/{first}/ns/pid")
            if inside and match in (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.append(int(entry.name))
    return found
