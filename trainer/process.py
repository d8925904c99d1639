"""What both sides that start processes need to know of them: a death that spreads to children, and an identity that no pid reuse
can fake."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1  # prctl(2)
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent's thread ends (Linux; elsewhere the guard process does it).

    Args:
        parent: the parent's pid; if it is gone already, this process ends now.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def leave_at_once(code: int) -> Callable[[int, FrameType | None], NoReturn]:
    """A handler of the stop signals for a process whose work is over: a late one cannot change what it ends with."""
    return lambda number, frame: os._exit(code)


def leave(code: int) -> NoReturn:
    """End this process as the interpreter does, but without taking the interpreter apart: a thread of torch's that lets go of a
    tensor in that moment aborts the process. gloo has such threads, and DDP keeps gloo's group for ever.

    Args:
        code: the exit code, or minus the signal to die of.
    """
    if code >= 0:
        for number in STOP_SIGNALS:
            signal.signal(number, leave_at_once(code))
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads of Python that are no daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)


def leave_after(main: Callable[[], int]) -> NoReturn:
    """Call what returns the exit code, and leave with it: 1 after an exception, which is told as usual."""
    try:
        code = main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    leave(code)


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


def exit_status(pid: int) -> int | None:
    """Of a dead process that nobody has reaped yet: its exit code, or minus the signal that killed it (Linux; else None)."""
    try:
        return os.waitstatus_to_exitcode(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[49]))
    except (OSError, IndexError, ValueError):
        return None


def descendants(pid: int) -> list[int]:
    """All that a process has started, and what they have, oldest first (Linux; else none)."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found, at = [pid], 0
    while at < len(found):
        found += sorted(parents.get(found[at], []))
        at += 1
    return found[1:]


def memory_file(name: str) -> int:
    """A descriptor of memory that processes can share; where the system has no such thing, of a file without a name."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def signal_name(number: int) -> str:
    """SIGKILL for 9; real-time signals have no name but their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def usable_cores(environ: Mapping[str, str] = os.environ, cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Cores that this process may use: by its affinity mask, its cgroups' quotas and Slurm's share, not the machine's count."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = environ.get("SLURM_CPUS_PER_TASK", "")
    limits = [float(share)] if share.isdecimal() and int(share) else []
    return max(1, int(min([cores, *limits, *(quota for folder in own_cgroups("cpu", cgroups, own) for quota in _quota(folder))])))


def own_cgroups(controller: str, cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> Iterator[Path]:
    """The folders of this process's cgroup, and of those above it, for a controller such as cpu: v1's and v2's."""
    with suppress(OSError):
        for entry in own.read_text().splitlines():
            _, controllers, path = entry.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = cgroups / controllers if controllers else cgroups
            below = root / path.strip("/")
            for folder in [below, *below.parents]:  # in a container the path may be the host's: its root is then the container's
                if folder.is_relative_to(root):
                    yield folder


_UNLIMITED = 1 << 60  # v1 tells no limit as nearly 2^63


def memory_limit(cgroup: Path) -> int | None:
    """The bytes that a memory cgroup may hold, or None: memory.max (v2) or memory.limit_in_bytes (v1)."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            limit = int((cgroup / name).read_text())
            return limit if limit < _UNLIMITED else None
    return None


def _quota(folder: Path) -> Iterator[float]:
    with suppress(OSError, ValueError, ZeroDivisionError):
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if quota != "max" and int(quota) > 0:
            yield int(quota) / int(period)
