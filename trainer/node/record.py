"""What a node leaves in the run folder about its own end, and what the others have left about theirs: where nothing else connects
them yet, or any more, this is how one fault ends them all."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from trainer.errors import ExitCode, Fault, KitError, error_from
from trainer.node.logs import RunFolder

EXIT_CODES = "TRAINER_EXIT_CODES"  # folder where a batch script looks, as srun tells only by which signal it ended the tasks
_RECENT = 50
_EARLIER_SECONDS = 2.0  # nodes that are started together
_ASK_SECONDS = 2.0


def leave_code(code: int | None) -> None:
    """Leave this node's exit code for the batch script, in a file of its own; None: a sign that the node came up."""
    if folder := os.environ.get(EXIT_CODES):
        with suppress(OSError):
            (Path(folder) / f"{socket.gethostname()}-{os.getpid()}").write_text("" if code is None else f"{int(code)}\n")


class Record:
    """One node's start and end in events.jsonl."""

    def __init__(self, folder: RunFolder, environ: Mapping[str, str] = os.environ) -> None:
        self.folder, self.born = folder, time.time()
        self.attempt = folder.attempts()
        self.job = environ.get("SLURM_JOB_ID", "")
        self.start = f"{self.job}.{environ.get('SLURM_RESTART_COUNT', '0')}" if self.job else ""  # the scheduler's number of it
        self.silent = False  # another node 0 has the run folder: nothing is written there

    def begin(self, node_rank: int, host: str, nnodes: int, identity: str) -> None:
        """This node starts its ranks."""
        facts = {"attempt": self.attempt, "node_rank": node_rank, "host": host}
        self.folder.event("node_start", **facts, pid=os.getpid(), nnodes=nnodes, identity=identity)

    def end(self, node_rank: int, host: str, code: int, fault: str | None) -> None:
        """How this node ended, the reason in one line."""
        if not self.silent:
            with suppress(OSError):  # a node that does not know its place may be the first one here
                self.folder.folder.mkdir(parents=True, exist_ok=True)
            facts = {"attempt": self.attempt, "node_rank": node_rank, "host": host, "start": self.start}
            self.folder.event("node_end", **facts, exit_code=int(code), fault=fault)

    def restart(self, node_rank: int, host: str, number: int, fault: Fault) -> None:
        """This node's ranks are started again, the reason in one line."""
        facts = {"attempt": self.attempt, "node_rank": node_rank, "host": host, "number": number}
        self.folder.event("restart", **facts, exit_code=int(fault.exit_code), fault=fault.line())

    def other_end(self) -> KitError | None:
        """Why another node of this start has ended, so that this one need not wait for it.

        Without a scheduler's number of the start, only an end counts that is final, from before any ranks, and no older than this
        node.
        """
        try:
            lines = (self.folder.folder / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()[-_RECENT:]
        except OSError:
            return None
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):  # a line that somebody else wrote
                event = json.loads(line)
                if event["event"] != "node_end" or event["start"] != self.start or not event["fault"]:
                    continue
                code = ExitCode(event["exit_code"])
                fresh = event["time"] > self.born - _EARLIER_SECONDS and event["attempt"] >= self.attempt
                if self.start or (fresh and not code.retryable):
                    return error_from(event["fault"], code)
        return None


class Attentive:
    """Sleeps as `pause` does, and now and then asks whether another node has ended: the answer is in a file on storage that many
    share."""

    def __init__(self, pause: Callable[[float], None], other_end: Callable[[], KitError | None]) -> None:
        self._pause, self._other_end, self._next = pause, other_end, time.monotonic() + _ASK_SECONDS

    def __call__(self, seconds: float) -> None:
        """Sleep.

        Raises:
            KitError: the other's end, once.
        """
        self._pause(seconds)
        if time.monotonic() > self._next:
            self._next = time.monotonic() + _ASK_SECONDS
            if ended := self._other_end():
                self._next = float("inf")
                raise ended
