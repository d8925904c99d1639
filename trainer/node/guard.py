"""A small process that outlives a killed node process just long enough to end its ranks and all that they started, and to remove
what they leave."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from contextlib import suppress

from trainer.process import STOP_SIGNALS


class Guard:
    """Holds the process groups of the ranks; kills them when the node process is gone, however it went.

    The kernel's parent-death signal ends a rank, but not its loader workers or other children, and not everywhere: this does.
    Make it before any thread exists. Every child forked later must call `forget`, or the guard would wait for it too.
    """

    sockets: str  # a folder for those by which loader workers hand over batches: who is killed leaves them behind; or ""

    def __init__(self) -> None:
        self.sockets = _folder()
        reader, self._writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            _stand_by(reader, self.sockets)
        os.close(reader)

    def add(self, group: int) -> None:
        """Take a process group in."""
        self._tell(f"+{group}")

    def remove(self, group: int) -> None:
        """Let a process group go: it has ended and its number may be given to others."""
        self._tell(f"-{group}")

    def _tell(self, line: str) -> None:
        with suppress(BrokenPipeError):  # somebody killed the guard; the run goes on without it
            os.write(self._writer, f"{line}\n".encode())

    def forget(self) -> None:
        """In a forked child: drop the line by which the guard sees that the node process lives."""
        os.close(self._writer)

    def close(self) -> None:
        """End the guard; groups that are still in are killed."""
        os.close(self._writer)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _folder() -> str:
    try:
        return tempfile.mkdtemp(prefix="trainer-")
    except OSError:  # no place to write, and perhaps no need for one
        return ""


def _stand_by(reader: int, sockets: str) -> None:
    os.setsid()  # signals to the node's process group, such as Ctrl-C, do not reach it
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.closerange(3, reader)  # such as node 0's port, which the node process may want to take again
    os.closerange(reader + 1, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    groups: set[int] = set()
    with os.fdopen(reader) as lines:
        for line in lines:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    if sockets:
        shutil.rmtree(sockets, ignore_errors=True)
    os._exit(0)
