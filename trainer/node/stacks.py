"""Where the processes of a rank are stuck: the Python stacks of its threads and its loader workers', and what the kernel says.

A rank has Python's own faulthandler answer a signal, from C, so that it answers while it waits in native code; workers that were
forked from it inherit that. What does not (a fresh process, one that is stopped) is read by py-spy, if that is installed and may;
else the kernel's words are all there is.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import own_frame
from trainer.node.vitals import STACKS
from trainer.process import descendants, exit_status, process_state

_SIGNAL: int | None = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
_ANSWER_SECONDS, _SETTLE_SECONDS = 1.0, 0.02
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
_WAITS = {"futex": "waits for a lock", "nanosleep": "sleeps", "pipe_read": "waits for another process", "poll": "waits"}
Frame = tuple[str, int, str]  # file, line, function


@dataclass(frozen=True)
class Stack:
    """One process. `threads`: the frames of each, innermost first, the main thread first; empty if it did not answer."""

    pid: int
    state: str  # the kernel's letter
    kernel: str  # the function of the kernel's that it waits in, or ""
    threads: list[list[Frame]] = field(default_factory=list)
    writes: bool = False  # it is the process that writes its rank's checkpoints
    status: int | None = None  # of one that is dead: its exit code, or minus the signal that killed it

    @property
    def main(self) -> list[Frame]:
        """The main thread's frames."""
        return self.threads[0] if self.threads else []

    @property
    def place(self) -> str:
        """`file:line in function` where it is in the user's code, or "" where that is not known."""
        if not self.main:
            return ""
        name, line, function = own_frame(self.main)
        return f"{Path(name).name}:{line} in {function}"

    @property
    def waits(self) -> str:
        """What it does there, in words: it sleeps, it waits for a lock."""
        found = [words for part, words in _WAITS.items() if part in self.kernel]
        return found[0] if found else "is"

    @property
    def collective(self) -> str | None:
        """The collective that the main thread is in; "backward" for the exchange of gradients, or before it."""
        functions = [(name, function) for name, _, function in self.main]
        called = [f for name, f in functions if name.endswith(_COLLECTIVES) and f not in ("wrapper", "_wait_for")]
        if called:
            return called[-1]
        if functions and functions[0][0].endswith(_WRAPPER) and "broadcast" in functions[0][1]:
            return "broadcast"  # of buffers, before a forward pass
        return "backward" if functions and functions[0][1] == "_engine_run_backward" else None

    @property
    def loads(self) -> bool:
        """Whether the main thread waits for its loader workers."""
        return any(name.endswith("torch/utils/data/dataloader.py") and f == "_get_data" for name, _, f in self.main)

    @property
    def idle(self) -> bool:
        """Whether it is a loader worker or a writer that has nothing to do."""
        if self.writes:
            return self.state not in "TD" and any(call in self.kernel for call in ("poll", "select"))
        functions = [function for _, _, function in self.main]
        return "_worker_loop" in functions and functions[functions.index("_worker_loop") - 1] == "get"

    @property
    def loader_worker(self) -> bool:
        """Whether it is one, as far as can be seen."""
        files = [name for name, _, _ in self.main]
        return any(name.endswith(_WORKER) for name in files) or (not files and self.state in "TDZ" and not self.writes)

    def text(self) -> str:
        """For people."""
        lines = [f"process {self.pid}, state {self.state}" + (f", in the kernel's {self.kernel}" if self.kernel else "")]
        for number, frames in enumerate(self.threads):
            lines.append("main thread" if number == 0 else f"thread {number}")
            lines += [f'  File "{name}", line {line} in {function}' for name, line, function in frames]
        return "\n".join(lines)


_WRITER = b"trainer.train.writer"
_WORKER = "torch/utils/data/_utils/worker.py"
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "torch/distributed/nn/functional.py")
_WRAPPER = "torch/nn/parallel/distributed.py"


def answer_when_asked(environ: Mapping[str, str] = os.environ) -> None:
    """In a rank: have its stacks written on request, and to its log if it crashes."""
    faulthandler.enable()
    if _SIGNAL and STACKS in environ:
        faulthandler.register(_SIGNAL, file=int(environ[STACKS]), all_threads=True)


def collect(rank: int, stacks_fd: int) -> list[Stack]:
    """The rank's process first, then all that it has started.

    Args:
        rank: its pid.
        stacks_fd: where it writes.
    """
    return [_of(pid, stacks_fd) for pid in (rank, *descendants(rank))]


def _of(pid: int, fd: int) -> Stack:
    state, kernel = process_state(pid) or "gone", ""
    command = b""
    with suppress(OSError):
        kernel, command = Path(f"/proc/{pid}/wchan").read_text().strip("0"), Path(f"/proc/{pid}/cmdline").read_bytes()
    if writes := _WRITER in command:
        state, kernel = _in_a_device(pid) or (state, kernel)
    text = _ask(pid, fd) if state in "RSD" and _answers(pid) else ""
    status = exit_status(pid) if state == "Z" else None
    return Stack(pid, state, kernel, list(threads(text)) or _spied(pid), writes, status)


def _in_a_device(pid: int) -> tuple[str, str] | None:
    """State and kernel's function of a thread that waits for a device; one of a writer's writes to the node's own disk."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError, IndexError):
            if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D":
                return "D", (task / "wchan").read_text().strip("0")
    return None


def _spied(pid: int) -> list[list[Frame]]:
    """The threads of a process, the main thread first, read from outside; none if it is not Python's, or that cannot be done."""
    if not (spy := shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")):
        return []
    try:
        done = subprocess.run([spy, "dump", "--nonblocking", "--json", "--pid", str(pid)], capture_output=True, timeout=2)
        threads = sorted(json.loads(done.stdout), key=lambda thread: bool(thread["thread_name"] != "MainThread"))
        return [[(frame["filename"], frame["line"], frame["name"]) for frame in thread["frames"]] for thread in threads]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return []


def _answers(pid: int) -> bool:
    """Whether the process catches the signal: it would die of it otherwise."""
    with suppress(OSError):
        if found := re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return bool(_SIGNAL and int(found[1], 16) >> (_SIGNAL - 1) & 1)
    return False


def _ask(pid: int, fd: int) -> str:
    start = size = os.fstat(fd).st_size
    with suppress(ProcessLookupError):
        os.kill(pid, _SIGNAL or 0)
    until = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < until:
        time.sleep(_SETTLE_SECONDS)
        before, size = size, os.fstat(fd).st_size
        if start < before == size:
            break
    return os.pread(fd, size - start, start).decode("utf-8", "replace")


def threads(text: str) -> Iterator[list[Frame]]:
    """The threads of one answer of faulthandler's, first the one that got the signal: of one from outside, the main thread."""
    parts = re.split(r"^(Current thread|Thread) 0x.*$", text, flags=re.MULTILINE)[1:]
    found = sorted(zip(parts[::2], parts[1::2], strict=True), key=lambda each: each[0] != "Current thread")
    for _, frames in found:
        yield [(each[1], int(each[2]), each[3]) for each in _FRAME.finditer(frames)]
