"""The run folder's record: a log for each rank by global rank, host and attempt; events.jsonl; and what a console shows of it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.table import table

_BLOCK = select.PIPE_BUF
_PATIENCE_SECONDS = 2.0
_LOOKS = 20


@dataclass(frozen=True)
class Report:
    """What came of a roll call, for people and `trainer rollcall`."""

    seconds: float
    fault: str | None
    warnings: list[str]
    nodes: list[dict[str, Any]]  # by node rank: host, address, facts, traits, warnings, bytes/s received


class RunFolder:
    """Where one attempt of a run writes.

    logs/attempt-000/rank-0003.HOST.log    all that a rank printed
    events.jsonl                           starts, ends and faults of all attempts, a JSON object a line
    rollcall.json                          what the nodes told in the last roll call
    hang/attempt-000/, crash/attempt-000/  after a fault: where each rank was, and the stacks of those that hung
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def config_file(self) -> Path:
        """The resolved config, which all ranks read."""
        return self.folder / "config.yaml"

    def keep_config(self, text: str) -> None:
        """Write the resolved config, if it is not the one that is there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.config_file.exists() or self.config_file.read_text(encoding="utf-8") != text:
            temporary = self.config_file.with_suffix(".tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.config_file)

    def attempts(self) -> int:
        """The number of the next attempt."""
        numbers = [int(path.name.rpartition("-")[2]) for path in (self.folder / "logs").glob("attempt-*[0-9]")]
        return max(numbers, default=-1) + 1

    def newest_checkpoint(self) -> int | None:
        """Step of the newest that has its final name."""
        return max((int(path.name[5:]) for path in self.folder.glob("checkpoints/step-*[0-9]")), default=None)

    def logs(self, attempt: int) -> Path:
        """The folder of an attempt's logs; made if missing."""
        folder = self.folder / "logs" / f"attempt-{attempt:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def evidence(self, kind: str, attempt: int) -> Path:
        """The folder of what was found out about the end of an attempt; made if missing.

        Args:
            kind: hang or crash.
        """
        folder = self.folder / kind / f"attempt-{attempt:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def event(self, kind: str, **values: Any) -> None:
        """Append one event. Short lines in append mode do not mix, whichever node writes."""
        record = {"time": round(time.time(), 3), "event": kind, **values}
        try:
            with open(self.folder / "events.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:  # a full disk or a folder that is gone must not hide what happened
            say(f"{self.folder}/events.jsonl: {error.strerror or error}; not written: {kind}")

    def problem(self) -> str | None:
        """Why nothing can be written here; a folder that is not there yet is node 0's to make."""
        if not self.folder.is_dir():
            return None
        try:
            with tempfile.TemporaryFile(dir=self.folder):
                return None
        except OSError as error:
            return error.strerror or str(error)

    def report(self, nnodes: int, show: bool, report: Report) -> None:
        """Keep what came of a roll call: the outcome in the record, the whole in rollcall.json; show it if asked to."""
        if nnodes > 1:
            told = {"seconds": report.seconds, "nodes": len(report.nodes), "warnings": report.warnings, "fault": report.fault}
            self.event("roll_call", **told)
        with suppress(OSError):
            (self.folder / "rollcall.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
        if show:
            say(table(asdict(report), os.isatty(2)))

    @contextmanager
    def marked(self, name: str) -> Iterator[None]:
        """Keep an empty file of that name in the folder, by which others see that it is the same one."""
        mark = self.folder / name
        try:
            mark.touch()
            yield
        finally:
            mark.unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        """Whether a mark is there; network storage may take a moment to show it."""
        for _ in range(_LOOKS):
            if (self.folder / name).exists():
                return True
            time.sleep(0.1)
        return False

    @contextmanager
    def held(self, host: str) -> Iterator[None]:
        """Hold the folder for this node process and all that it forks.

        Raises:
            BlockingIOError: another process holds it; the text names it.
            OSError: it cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise BlockingIOError(lock.read().strip() or "another process") from None
            except OSError as error:  # a file system without locks (Lustre without -o flock): better unguarded than not at all
                say(f"{self.folder}: cannot be locked ({error.strerror or error}); do not start this run twice")
            lock.truncate(0)
            lock.write(f"pid {os.getpid()} on {host}\n")
            lock.flush()
            yield


class Tail:
    """Copies what a growing file gets to a stream, as it comes."""

    def __init__(self, path: Path, stream: int | None, clear_line: bool) -> None:
        """
        Args:
            stream: a file descriptor.
            clear_line: the stream is a terminal with a progress bar in its last line; wipe that before writing.
        """
        self._file, self._stream, self._prefix = open(path, "rb"), stream, b"\r\x1b[K" if clear_line else b""  # noqa: SIM115
        self._waiting = b""
        self.mid_line = False  # what was copied last did not end its line

    def copy(self, patience_seconds: float = 0) -> None:
        """Copy what has come since the last call, but never wait for a console that is paused longer than it is patient."""
        until = time.monotonic() + patience_seconds
        while self._stream is not None:
            if not self._waiting:
                block = self._file.read(_BLOCK)
                if not block:
                    return
                self._waiting = self._prefix + block
            try:
                if not select.select([], [self._stream], [], max(0.0, until - time.monotonic()))[1]:
                    return
                written = os.write(self._stream, self._waiting[:_BLOCK])  # a pipe that is ready takes so much at once
            except OSError:  # nobody watches any more; the log file has it all
                self._stream = None
                return
            self.mid_line = not self._waiting[:written].endswith(b"\n")
            self._waiting = self._waiting[written:]

    def close(self) -> None:
        """Copy the rest and close."""
        self.copy(_PATIENCE_SECONDS)
        self._file.close()


def last_lines(path: Path, count: int = 20) -> str:
    """The end of a log."""
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - (1 << 14)))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-count:])


def say(text: str) -> None:
    """A line for the console of this node, now."""
    with suppress(OSError, ValueError):  # the console may be gone
        print(text, file=sys.stderr, flush=True)
