"""Watching the ranks of this node, in one thread: output, signals, ends, and the other nodes' faults. One verdict comes out."""

from __future__ import annotations

import json
import os
import re
import selectors
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainer.errors import ExitCode, Fault
from trainer.node.guard import Guard
from trainer.node.logs import Tail, last_lines, say
from trainer.node.ranks import Rank
from trainer.node.rollcall import Roll

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_TICK_SECONDS = 0.2
_SETTLE_SECONDS = 1.0  # after a first failure: ranks of this node may be failing too, and the one at fault may write last
_PEER_SECONDS = 5.0  # a rank that lost its peer waits so long for the peer's own fault
# What a survivor says of a peer that is gone: never a root cause.
_PEER_LOSS = re.compile(
    r"Connection (closed|reset) by|Broken pipe|Socket (closed|Timeout)|Connection refused|remote process exited|Timed out waiting"
    r"|ncclRemoteError|ncclSystemError|failed to connect|Failed to recv|recvValue failed|sendBytes failed|Connect timeout",
    re.IGNORECASE,
)


@dataclass
class Running:
    """One rank of this node."""

    rank: Rank
    pid: int
    status: int | None = None  # exit code, or minus the signal that killed it
    ended: float = 0.0
    reason: dict[str, object] = field(default_factory=dict)  # what it left in its error file

    @property
    def failed(self) -> bool:
        """It ended, and neither well nor on request."""
        return self.status not in (None, ExitCode.DONE, ExitCode.STOPPED)

    @property
    def lost_a_peer(self) -> bool:
        """It failed, but only because another rank was gone."""
        return bool(_PEER_LOSS.search(str(self.reason.get("message", ""))))


class Signals:
    """Catches the stop signals and the ends of children; wakes the watch at once."""

    def __init__(self) -> None:
        self.waiting: list[signal.Signals] = []
        self.reader, writer = os.pipe()
        for end in (self.reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda caught, frame: self.waiting.append(signal.Signals(caught)))
        signal.signal(signal.SIGCHLD, lambda caught, frame: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.reader, selectors.EVENT_READ)

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than to the next signal."""
        if self._selector.select(seconds):
            with suppress(BlockingIOError):
                os.read(self.reader, 4096)


class Watch:
    """Sees this node's ranks to their end."""

    def __init__(self, roll: Roll, guard: Guard, signals: Signals, stop_seconds: float, clear_line: bool) -> None:
        self.roll, self.node, self.guard, self.signals = roll, roll.node, guard, signals
        self.stop_seconds, self.clear_line = stop_seconds, clear_line
        self.ranks: list[Running] = []
        self._tail: Tail | None = None
        self._stop: tuple[signal.Signals, float] | None = None  # the first stop request, and when the ranks' time is up
        self._asked = 0.0

    def add(self, rank: Rank, pid: int) -> None:
        """Take in a rank that was just started; rank 0's output is shown on this console."""
        self.guard.add(pid)
        self.ranks.append(Running(rank, pid))
        if rank.rank == 0:
            Path(rank.log).touch()
            self._tail = Tail(Path(rank.log), open(os.dup(1), "wb"), self.clear_line)  # noqa: SIM115

    def run(self) -> tuple[ExitCode, Fault | None]:
        """Wait for the end; returns this node's exit code and the job's fault. All ranks are gone then."""
        try:
            fault = self._until_the_end()
        finally:
            self.kill()
            if self._tail:
                self._tail.close()
        if fault is None and self.node.node_rank == 0:
            fault = self._wait_for_the_others()
        if fault is not None:
            return fault.exit_code, fault
        stopped = any(running.status == ExitCode.STOPPED or running.failed for running in self.ranks)
        return (ExitCode.STOPPED if stopped else ExitCode.DONE), None

    def kill(self) -> None:
        """End all ranks, and what they started, now."""
        for running in self.ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(running.pid, signal.SIGKILL)
        for running in self.ranks:
            if running.status is None:
                with suppress(ChildProcessError):
                    os.waitpid(running.pid, 0)
            self.guard.remove(running.pid)

    def _until_the_end(self) -> Fault | None:
        while True:
            self.signals.wait(_TICK_SECONDS)
            if fault := self._handle_signals():
                return fault
            self._reap()
            if self._tail:
                self._tail.copy()
            failed = [running for running in self.ranks if running.failed]
            if failed and not self._ended_by_stop(failed):
                return self._judge()
            if all(running.status is not None for running in self.ranks):
                return None
            if fault := self._fault_elsewhere():
                return fault

    def _handle_signals(self) -> Fault | None:
        while self.signals.waiting:
            number = self.signals.waiting.pop(0)
            if self._stop is None:
                self._stop = (number, time.monotonic() + self.stop_seconds)
                say(f"[{self.node.host}] {number.name}: asking the ranks to save and stop (at most {self.stop_seconds:.0f} s)")
                self._forward(number)
            elif number == signal.SIGINT:
                say(f"[{self.node.host}] second {number.name}: stopping now; the last checkpoint stands")
                return self._own_fault("D8", None, "stopped by a second Ctrl-C", "start again to go on", ExitCode.STOPPED)
        if self._stop and time.monotonic() > self._stop[1]:
            alive = [running.rank.rank for running in self.ranks if running.status is None]
            if alive:
                cause = f"did not stop within {self.stop_seconds:.0f} s of {self._stop[0].name}; killed"
                return self._own_fault(
                    "D8", alive[0], cause, "raise watch.stop_seconds above the time of a save", ExitCode.STALLED
                )
        return None

    def _forward(self, number: signal.Signals) -> None:
        for running in self.ranks:
            if running.status is None:
                with suppress(ProcessLookupError):
                    os.kill(running.pid, number)

    def _reap(self) -> None:
        for running in self.ranks:
            if running.status is not None:
                continue
            pid, status = os.waitpid(running.pid, os.WNOHANG)
            if pid:
                running.status, running.ended = os.waitstatus_to_exitcode(status), time.time()
                running.reason = _read_reason(Path(running.rank.error_file))

    def _ended_by_stop(self, failed: list[Running]) -> bool:
        """A script of the user's that does not handle the signal we passed on dies of it: that is a stop, not a fault."""
        return self._stop is not None and all(running.status == -self._stop[0] for running in failed)

    def _judge(self) -> Fault:
        """Find the rank at fault, among this node's and by what the other nodes report."""
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until and any(running.status is None for running in self.ranks):
            self.signals.wait(0.05)
            self._reap()
        failed = [running for running in self.ranks if running.failed]
        failed.sort(key=lambda running: (running.lost_a_peer, running.reason.get("time", running.ended)))
        culprit = failed[0]
        if culprit.lost_a_peer and self.node.nnodes > 1:
            until = time.monotonic() + _PEER_SECONDS
            while time.monotonic() < until:
                if fault := self._fault_elsewhere(now=True):
                    return fault
                self.signals.wait(0.1)
        if culprit.rank.rank != 0:
            say(f"[{self.node.host}] end of {culprit.rank.log}:\n{last_lines(Path(culprit.rank.log))}")
        return self._report(self._describe(culprit))

    def _describe(self, culprit: Running) -> Fault:
        rank, status, reason = culprit.rank.rank, culprit.status or 0, culprit.reason
        if status < 0:
            number = signal.Signals(-status)
            cause = f"killed by signal {-status} ({number.name})"
            fix = "find who sent it (the kernel's memory killer, the scheduler, a person), then start again"
            if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
                fix = f"see the end of {culprit.rank.log}"
            return Fault("C1", self.node.host, cause, fix, ExitCode.RANK_KILLED, rank, self.node.node_rank)
        message, where = str(reason.get("message", "")), str(reason.get("where", ""))
        if "exit_code" in reason:
            problem, _, remedy = message.rpartition("; ")
            code = ExitCode(int(str(reason["exit_code"])))
            return Fault("CONFIG", self.node.host, problem or message, remedy, code, rank, self.node.node_rank)
        cause = f"vanished with exit code {status}, no message" if not reason else f"exited with {status}"
        if message and reason.get("type") != "SystemExit":
            kind = f"{reason['type']}: " if reason.get("type") and not message.startswith(str(reason["type"])) else ""
            cause = f"{kind}{message}"
        cause += f" ({where})" if where else ""
        fix = f"see the traceback in {culprit.rank.log}"
        if culprit.lost_a_peer:
            cause = f"lost another rank, which told nobody why ({message})"
            fix = "look at the other nodes' logs"
            return Fault("C1", self.node.host, cause, fix, ExitCode.NODE_LOST, rank, self.node.node_rank)
        return Fault("C1", self.node.host, cause, fix, ExitCode.RANK_FAILED, rank, self.node.node_rank)

    def _fault_elsewhere(self, now: bool = False) -> Fault | None:
        """What another node reported, or that node 0 is gone. Asks about twice a second."""
        if self.node.nnodes == 1 or (not now and time.monotonic() - self._asked < 0.5):
            return None
        self._asked = time.monotonic()
        try:
            return self.roll.fault()
        except ConnectionError:
            cause = f"lost node 0: its store at {self.node.address} does not answer any more"
            return Fault("C3", self.node.host, cause, "look at node 0's log", ExitCode.NODE_LOST, node_rank=self.node.node_rank)

    def _own_fault(self, code: str, rank: int | None, cause: str, fix: str, exit_code: ExitCode) -> Fault:
        return self._report(Fault(code, self.node.host, cause, fix, exit_code, rank, self.node.node_rank))

    def _report(self, fault: Fault) -> Fault:
        with suppress(ConnectionError):
            return self.roll.report(fault)
        return fault

    def _wait_for_the_others(self) -> Fault | None:
        """Node 0 holds the store, so it leaves last: it says goodbye and counts."""
        self.roll.say_goodbye()
        until = time.monotonic() + self.stop_seconds
        while not self.roll.all_said_goodbye():
            if fault := self.roll.fault():
                return fault
            if time.monotonic() > until:
                cause = f"ended, but not all nodes said goodbye within {self.stop_seconds:.0f} s"
                return self._own_fault("C13", None, cause, "look at the other nodes' logs", ExitCode.NODE_LOST)
            self.signals.wait(0.1)
        return None


def _read_reason(path: Path) -> dict[str, object]:
    """A rank's error file: this kit's, or what torch's `@record` wrote."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    inner = record.get("message")
    if isinstance(inner, dict):  # torch: {"message": {"message": "ValueError: bad", "extraInfo": {"timestamp": "1700000000"}}}
        extra = inner.get("extraInfo", {})
        return {"message": str(inner.get("message", "")), "time": float(extra.get("timestamp", time.time()))}
    return dict(record)
