"""What both sides that start processes need to know of them: a death that spreads to children, and an identity that no pid reuse
can fake."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent's thread ends (Linux; elsewhere the guard process does it).

    Args:
        parent: the parent's pid; if it is gone already, this process ends now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def started_at(pid: int) -> str | None:
    """When a process started, in the kernel's own words; None if there is none. With the pid it names one process for ever."""
    if sys.platform != "linux":
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        return "unknown"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else fields[19]


def process_state(pid: int) -> str | None:
    """The kernel's letter for a process: R running, S sleeping, D waiting for a device, T stopped, Z dead (Linux; else None)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name but their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def usable_cores() -> int:
    """Cores that this process may run on (its affinity mask, not the machine's count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
