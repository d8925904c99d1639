"""A pod's sandbox: network, host name and IPC, held by a process that sleeps, as Kubernetes' pause container holds them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.machines import LabError, run

NETWORK = "10.244.0"
GATEWAY = f"{NETWORK}.1"
BRIDGE = "br0"

_CLONE_NEWPID = 0x20000000  # linux/sched.h

_HOLD = """\
echo "$1" >/proc/sys/kernel/hostname
echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6 || true
ip link set lo up
echo ready
exec sleep infinity
"""


def make_bridge() -> None:
    """The node network, in the emulator's own network namespace: nothing leads out of it."""
    _ip(
        "link set lo up",
        f"link add {BRIDGE} type bridge forward_delay 0",
        f"addr add {GATEWAY}/24 dev {BRIDGE}",
        f"link set {BRIDGE} up",
    )


class Sandbox:
    """One pod's namespaces; they end with `close`."""

    def __init__(self, number: int, hostname: str) -> None:
        self.address, self._port = f"{NETWORK}.{number}", f"pod{number}"
        argv = ["unshare", "--net", "--uts", "--ipc", "sh", "-euc", _HOLD, "sh", hostname]
        self._holder = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True)
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != b"ready\n":
            raise LabError(f"no sandbox for {hostname}")
        self.pid = self._holder.pid
        _ip(f"link add {self._port} type veth peer name eth0 netns {self.pid}", f"link set {self._port} master {BRIDGE} up")
        inside = [f"addr add {self.address}/24 dev eth0", "link set eth0 up", f"route add default via {GATEWAY}"]
        _ip(*inside, prefix=["nsenter", f"--target={self.pid}", "--net", "--"])

    def link(self, state: str) -> None:
        """Pull (down) or plug (up) the pod's cable: a peer gets no word of it."""
        _ip(f"link set {self._port} {state}")

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._holder.wait()
        assert self._holder.stdout is not None
        self._holder.stdout.close()
        run("ip", "link", "del", self._port, check=False)  # the kernel would get to it, later


def _ip(*lines: str, prefix: list[str] | None = None) -> None:
    argv = [*(prefix or []), "ip", "-batch", "-"]
    done = subprocess.run(argv, input="\n".join(lines), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise LabError(f"{' '.join(argv)}: exit code {done.returncode}\n{done.stdout}")


@contextmanager
def new_pid_namespace() -> Iterator[None]:
    """A process started in the block is PID 1 of a PID namespace, and a child of this process all the same.

    unshare --fork would stand between the two, and that of util-linux 2.38 makes exit code 1 of a death by signal.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.unshare(_CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), "unshare")
        try:
            yield
        finally:
            if libc.setns(own, _CLONE_NEWPID):
                raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(own)
