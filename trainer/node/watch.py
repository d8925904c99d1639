"""Watching the ranks of this node, in one thread: output, signals, ends, and the other nodes' faults. One verdict comes out."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.errors import ExitCode, Fault
from trainer.node.guard import Guard
from trainer.node.inquest import GONE, Inquest
from trainer.node.logs import RunFolder, Tail, last_lines, say
from trainer.node.memory import MemoryKills
from trainer.node.ranks import Rank
from trainer.node.roll import Roll
from trainer.node.signals import Signals
from trainer.node.verdict import Running, describe, left_early, read_reason
from trainer.node.vitals import Vitals
from trainer.process import process_state

_TICK_SECONDS = 0.2
_SETTLE_SECONDS = 1.0  # after a first failure: ranks of this node may be failing too, and the one at fault may write last


class Watch:
    """Sees this node's ranks to their end."""

    def __init__(
        self,
        roll: Roll,
        guard: Guard,
        signals: Signals,
        clear_line: bool,
        stop_seconds: float,
        hosts: Sequence[str],
        folder: RunFolder,
        straggler_factor: float | None,
    ) -> None:
        """
        Args:
            clear_line: rank 0 draws a progress bar on this console.
            stop_seconds: how long the ranks may take to save and stop.
            hosts: the nodes' names by node rank; node 0's is enough on others.
            straggler_factor: of which ranks to warn.
        """
        self.roll, self.node, self.guard, self.signals = roll, roll.node, guard, signals
        self.clear_line, self.stop_seconds = clear_line, stop_seconds
        self.ranks: list[Running] = []
        self.memory = MemoryKills()
        self.inquest = Inquest(roll, hosts, self.ranks, folder, straggler_factor)
        self.last_words: list[str] = []  # for the console, once the ranks are gone: a paused console blocks whoever writes
        self._tail: Tail | None = None
        self._stop: tuple[signal.Signals, float] | None = None  # the first stop request, and when the ranks' time is up
        self._asked = 0.0

    def add(self, rank: Rank, pid: int, vitals: Vitals) -> None:
        """Take in a rank that was just started; rank 0's output is shown on this console."""
        self.guard.add(pid)
        self.ranks.append(Running(rank, pid, vitals))
        if rank.rank == 0:
            Path(rank.log).touch()
            self._tail = Tail(Path(rank.log), 1, self.clear_line)

    def stopped_before_start(self) -> Fault | None:
        """The end of all nodes, if a stop signal came after the roll call: ranks without a handler yet would just die of it."""
        if not self.signals.waiting:
            return None
        cause = f"{self.signals.waiting[0].name} before the ranks were started"
        return self._own_fault("D8", None, cause, "start again to go on", ExitCode.STOPPED)

    def run(self) -> tuple[ExitCode, Fault | None]:
        """Wait for the end; returns this node's exit code and the job's fault. All ranks are gone then."""
        try:
            fault = self._until_the_end()
        finally:
            self.kill()
            if self._tail:
                self._tail.close()
                if self._tail.mid_line:
                    self.last_words.insert(0, "")  # what follows begins a line of its own
        if fault is None and self.node.nnodes > 1:
            fault = self._unsaved_stop() or self._wait_for_the_others()
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
            failed = [running for running in self.ranks if running.failed or (running.stuck and self.node.world_size > 1)]
            if failed and not self._ended_by_stop(failed):
                return self._judge()
            if all(running.status is not None for running in self.ranks):
                return None
            if fault := self._fault_elsewhere():
                self.inquest.crashed()
            if fault := fault or self._stall():
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
                running.reason = read_reason(Path(running.rank.error_file))
                running.vitals.look(time.monotonic(), "Z")
            elif running.leaving is None and running.vitals.leaving:
                running.leaving, running.reason = time.monotonic(), read_reason(Path(running.rank.error_file))

    def _ended_by_stop(self, failed: list[Running]) -> bool:
        """A script of the user's that does not handle the signal we passed on dies of it: that is a stop, not a fault."""
        return self._stop is not None and all(running.status == -self._stop[0] for running in failed)

    def _unsaved_stop(self) -> Fault | None:
        """The other nodes' ranks would wait for those that died of a stop signal, such as before their handlers were there."""
        died = [running.rank.rank for running in self.ranks if running.failed]
        if not died or self._stop is None:
            return None
        cause = f"died of {self._stop[0].name}, for which it had no handler (yet); the last checkpoint stands"
        return self._own_fault("D8", died[0], cause, "start again to go on", ExitCode.STOPPED)

    def _judge(self) -> Fault:
        """Find the rank at fault, among this node's and by what the other nodes report."""
        self.inquest.crashed()
        until = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < until and any(running.status is None for running in self.ranks):
            self._pause()
        failed = [running for running in self.ranks if running.failed or (running.leaving and running.status is None)]
        failed.sort(key=lambda running: (running.lost_a_peer, running.reason.get("time", running.ended)))
        culprit = failed[0]
        if culprit.lost_a_peer and (fault := self._missing_peer() or self._missing_elsewhere()):
            return self._report(fault)
        if culprit.rank.rank != 0 and (text := last_lines(Path(culprit.rank.log))):
            self.last_words.append(f"[{self.node.host}] end of {culprit.rank.log}:\n{text}")
        return self._report(describe(culprit, self.node.host, self.node.node_rank, self.memory.words()))

    def _missing_peer(self) -> Fault | None:
        """A rank of this node that the failed ones may be missing: stopped by a signal, or gone before its time with code 0."""
        for running in self.ranks:
            if running.status is None and process_state(running.pid) == "T":
                cause = f"stopped by a signal (pid {running.pid} is in state T) while the others waited for it"
                fix = "do not stop single ranks; start again to go on from the last checkpoint"
                return self._own_fault("C2", running.rank.rank, cause, fix, ExitCode.STALLED)
        gone = [running for running in self.ranks if running.status == ExitCode.DONE]
        return left_early(self.node.host, gone[0].rank.rank, self.node.node_rank) if gone else None

    def _missing_elsewhere(self) -> Fault | None:
        try:
            return self.inquest.missing(self._pause)
        except ConnectionError:
            return self._lost_node_0()

    def _pause(self) -> None:
        self.signals.wait(0.05)
        self._reap()

    def _stall(self) -> Fault | None:
        """A rank that holds the others up, or a node that is gone."""
        try:
            return self.inquest.tick()
        except ConnectionError:
            return self._lost_node_0()

    def _fault_elsewhere(self) -> Fault | None:
        """What another node reported, or that node 0 is gone. Asks about twice a second."""
        if self.node.nnodes == 1 or time.monotonic() - self._asked < 0.5:
            return None
        self._asked = time.monotonic()
        try:
            return self.roll.fault()
        except ConnectionError:
            return self._lost_node_0()

    def _own_fault(self, code: str, rank: int | None, cause: str, fix: str, exit_code: ExitCode) -> Fault:
        return self._report(Fault(code, self.node.host, cause, fix, exit_code, rank, self.node.node_rank))

    def _report(self, fault: Fault) -> Fault:
        with suppress(ConnectionError):
            return self.roll.report(fault)
        return fault

    def _wait_for_the_others(self) -> Fault | None:
        """All nodes leave together: a scheduler takes the first that ends as a sign that the rest are stuck, and rank 0 may still
        be writing the last checkpoint. Node 0 holds the store, so it leaves last."""
        try:
            self.roll.say_goodbye(self.node.node_rank * self.node.nproc_per_node)
            while not self.roll.all_said_goodbye():
                self.signals.wait(_TICK_SECONDS)
                if fault := self.roll.fault() or self.inquest.tick():
                    return fault
            self.roll.leave()
        except ConnectionError:
            return self._lost_node_0()
        return None

    def _lost_node_0(self) -> Fault:
        host = self.inquest.hosts[0]
        cause = f"lost node 0 ({host}): its store at {self.node.address} does not answer any more"
        return Fault("C3", host, cause, GONE, ExitCode.NODE_LOST, node_rank=0)
