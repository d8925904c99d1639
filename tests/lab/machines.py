"""Machines on one machine: each with its own network, host name, processes, /run, /dev/shm and (but for login) /tmp.

They hang on a bridge in a namespace of its own, the switch, which has no way out: nothing can leave, and several labs with the same
addresses run side by side. Needs root, Linux namespaces, iproute2, and iptables for faults.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

NET = "198.18.7"  # RFC 2544: a range for tests; it exists inside the lab's namespaces only
LOGIN = "login"
_INIT = Path(__file__).with_name("machine-init.sh")


class LabError(RuntimeError):
    """The lab could not do what it was asked to; the text has the command and its output."""


def run(*argv: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command; its output is in the error if it fails."""
    done = subprocess.run([str(a) for a in argv], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if check and done.returncode:
        raise LabError(f"{' '.join(map(str, argv))}: exit code {done.returncode}\n{done.stdout}")
    return done


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise LabError(f"no {what} after {seconds:.0f} s")
        time.sleep(0.1)


class Machines:
    """The machines `login` and node1 to nodeN of one lab, kept in one folder."""

    def __init__(self, folder: Path, nodes: int, gpus: int, shared: list[Path]) -> None:
        """
        Args:
            folder: the lab's own folder, /var/lib/NAME; NAME also begins the names of its network namespaces.
            gpus: fake GPUs of each node.
            shared: folders below /tmp or /run that all machines see; elsewhere all see all.
        """
        self.folder, self.name = folder, folder.name
        self.nodes = [f"node{i}" for i in range(1, nodes + 1)]
        self.gpus, self.shared = gpus, shared

    @property
    def all(self) -> list[str]:
        return [LOGIN, *self.nodes]

    def namespace(self, machine: str) -> str:
        return f"{self.name}-{machine}"

    def address(self, machine: str) -> str:
        return f"{NET}.1" if machine == LOGIN else f"{NET}.{10 + int(machine.removeprefix('node'))}"

    def pid(self, machine: str) -> int | None:
        """The machine's first process, as this host counts it; None if the machine is off."""
        try:
            pid = int((self.folder / "m" / machine / "pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if f"{_INIT.name}\0{machine}\0{self.folder}\0".encode() in command else None

    def enter(self, machine: str, user: str | None = None, folder: str | None = None) -> list[str]:
        """The start of a command that runs on a machine."""
        pid = self.pid(machine)
        if pid is None:
            raise LabError(f"{machine} is not running")
        argv = ["nsenter", "-t", str(pid), "-m", "-u", "-i", "-n", "-p", *([f"--wd={folder}"] if folder else [])]
        if user and user != "root":  # inside: only the machines' own /etc/passwd knows the name
            argv += ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]
            argv += ["env", f"HOME={self.folder}/home/{user}", f"USER={user}", f"LOGNAME={user}"]
        return argv

    def on(self, machine: str, *argv: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on a machine."""
        return run(*self.enter(machine), *argv, check=check)

    def wire(self) -> None:
        """Make the switch, the cables and the addresses."""
        switch = self.namespace("sw")
        run("ip", "netns", "add", switch)
        run("ip", "-n", switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        run("ip", "-n", switch, "link", "set", "br0", "up")
        for machine in self.all:
            namespace, port = self.namespace(machine), f"p-{machine}"
            run("ip", "netns", "add", namespace)
            run("ip", "-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            run("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            run("ip", "-n", namespace, "addr", "add", f"{self.address(machine)}/24", "dev", "eth0")
            run("ip", "-n", namespace, "link", "set", "eth0", "up")
            run("ip", "-n", namespace, "link", "set", "lo", "up")

    def boot(self, machine: str) -> None:
        """Power on."""
        own = self.folder / "m" / machine
        own.mkdir(parents=True, exist_ok=True)
        (own / "booted").unlink(missing_ok=True)
        environ = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG": "C.UTF-8",
            "TMP_SIZE": "1g",
            "SHM_SIZE": "512m",
            "GPUS": str(0 if machine == LOGIN else self.gpus),
        }
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        argv = ["ip", "netns", "exec", self.namespace(machine), *unshare, "bash", str(_INIT), machine, str(self.folder)]
        with open(own / "boot.log", "ab") as log:
            parent = subprocess.Popen(
                argv, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", start_new_session=True
            )
        wait_for(lambda: (own / "booted").exists() or parent.poll() is not None, 20, f"start of {machine}")
        if parent.poll() is not None:
            raise LabError(f"{machine} did not boot\n{(own / 'boot.log').read_text()}")
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        (own / "pid").write_text(children[0])
        parent.returncode = 0  # it lives as long as the machine

    def off(self, machine: str) -> None:
        """Power loss: the cable first, so that no peer gets a word, then every process at once."""
        self.link(machine, "down")
        self._kill(machine)

    def link(self, machine: str, state: str) -> None:
        """Pull (down) or plug (up) the cable, at the switch."""
        run("ip", "-n", self.namespace("sw"), "link", "set", f"p-{machine}", state)

    def cut(self, first: str, second: str) -> None:
        """Drop all between two machines, both ways; each still reaches the others."""
        for here, there in ((first, second), (second, first)):
            rule = ["-A", "INPUT", "-s", self.address(there), "-j", "DROP"]
            run("ip", "netns", "exec", self.namespace(here), "iptables", "-w", *rule)

    def heal(self, machine: str) -> None:
        """Plug the cable and drop all rules."""
        self.link(machine, "up")
        run("ip", "netns", "exec", self.namespace(machine), "iptables", "-w", "-F", check=False)

    def down(self) -> None:
        """End everything and remove every trace; also of a lab that was killed while it came up."""
        machines = [path.name for path in (self.folder / "m").glob("*")] or self.all
        for machine in machines:
            self._kill(machine)
        for process in Path("/proc").glob("[0-9]*/cmdline"):  # what an interrupted start did not write down
            try:
                if f"\0{self.folder}\0".encode() in process.read_bytes() and _INIT.name.encode() in process.read_bytes():
                    os.kill(int(process.parent.name), signal.SIGKILL)
            except OSError:
                continue
        for machine in [*machines, "sw"]:
            run("ip", "netns", "del", self.namespace(machine), check=False)
        wait_for(lambda: shutil.rmtree(self.folder, ignore_errors=True) or not self.folder.exists(), 10, "clean folder")

    def _kill(self, machine: str) -> None:
        pid = self.pid(machine)
        if pid:
            os.kill(pid, signal.SIGKILL)  # the first process: its whole PID namespace goes
            wait_for(lambda: self.pid(machine) is None, 10, f"end of {machine}")
