"""The run folder's record: a log for each rank by global rank, host and attempt; events.jsonl; and what a console shows of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO


class RunFolder:
    """Where one attempt of a run writes.

    logs/attempt-000/rank-0003.HOST.log    all that a rank printed
    events.jsonl                           starts, ends and faults of all attempts, a JSON object a line
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def attempts(self) -> int:
        """Attempts so far."""
        return len(list((self.folder / "logs").glob("attempt-*")))

    def logs(self, attempt: int) -> Path:
        """The folder of an attempt's logs; made if missing."""
        folder = self.folder / "logs" / f"attempt-{attempt:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def event(self, kind: str, **values: Any) -> None:
        """Append one event. Short lines in append mode do not mix, whichever node writes."""
        record = {"time": round(time.time(), 3), "event": kind, **values}
        with open(self.folder / "events.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


class Tail:
    """Copies what a growing file gets to a stream, as it comes."""

    def __init__(self, path: Path, stream: BinaryIO, clear_line: bool) -> None:
        """
        Args:
            clear_line: the stream is a terminal with a progress bar in its last line; wipe that before writing.
        """
        self._file, self._stream, self._prefix = open(path, "rb"), stream, b"\r\x1b[K" if clear_line else b""  # noqa: SIM115

    def copy(self) -> None:
        """Copy what has come since the last call."""
        while block := self._file.read(1 << 16):
            try:
                self._stream.write(self._prefix + block)
                self._stream.flush()
            except (BrokenPipeError, ValueError):  # nobody watches any more; the log file has it all
                return

    def close(self) -> None:
        """Copy the rest and close."""
        self.copy()
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
    print(text, file=sys.stderr, flush=True)
