"""The roll call, as the nodes other than node 0 see it: report in, be probed, hear the one verdict, leave together.

It needs no collective, no GPU and no torch. Node 0's side is `judge` with its `register`; both speak over one connection to node
0's port, which torch's store takes over once all may start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from trainer.errors import ExitCode, Fault, FaultError
from trainer.node.identity import Identity
from trainer.node.line import Line, Message
from trainer.node.logs import RunFolder
from trainer.node.probe import Probe, Task
from trainer.node.rendezvous import reach

RETRY_SECONDS = 0.5
LEAVE_SECONDS = 5.0  # all who came hear the verdict before the first one leaves: a scheduler then ends the others
_LATE_SECONDS = 60.0  # after the last could come: for the probe, and ways that are measured again
_TICK_SECONDS = 0.1

Pause = Callable[[float], None]


@dataclass(frozen=True)
class Terms:
    """What a node brings to the roll call."""

    attempt: int = 0  # its count of attempts; node 0's word counts
    facts: Mapping[str, str] = field(default_factory=dict)  # what has to be the same on every node
    traits: Mapping[str, str] = field(default_factory=dict)  # what may differ, and is told if it does
    warnings: Sequence[str] = ()  # what this node finds doubtful about itself
    may_differ: bool = False  # node 0's: only warn where facts are not the same
    trouble: Fault | None = None  # what this node finds wrong with itself: all are to end with this line
    job: str = ""  # the scheduler's number of the job, where there is one
    folder: RunFolder | None = None  # which all are to share
    address: str = ""  # of the interface that the user has named, if one was


@dataclass(frozen=True)
class Place:
    """What a node takes from a roll call that went well."""

    attempt: int
    address: str  # of this node, as the others reach it
    master: str  # node 0's address, in numbers
    hosts: tuple[str, ...]  # on node 0: the nodes' names by node rank, as they told them; elsewhere node 0's


def join(
    node: Identity,
    terms: Terms,
    deadline: float,
    pause: Pause = time.sleep,
    is_store: Callable[[str, int], bool] = lambda address, port: False,
) -> Place:
    """Reach node 0, report in and wait for its verdict.

    A roll call that is over already is one of an earlier start whose node 0 has not ended yet (a scheduler may restart the other
    nodes sooner): the next one is waited for.

    Args:
        deadline: time.monotonic() at which to give up, and node 0 stops waiting.
        pause: sleeps between looks; a fault that it raises is told to node 0, if that can be, and ends this node.
        is_store: whether torch's store answers at an address.

    Raises:
        FaultError: node 0 cannot be reached; somebody is missing or differs, or two nodes claim one rank: then the same on every
            node that came.
    """
    lost: FaultError | None = None  # node 0 was there, so that is the cause and not what is met at its port now
    while True:
        found = attempt(node, terms, deadline, pause, is_store)
        if isinstance(found, Place):
            return found
        lost = found if found.exit_code is ExitCode.NODE_LOST else lost
        if time.monotonic() + RETRY_SECONDS > deadline:
            raise lost or found
        pause(RETRY_SECONDS)


def attempt(
    node: Identity,
    terms: Terms,
    deadline: float,
    pause: Pause = time.sleep,
    is_store: Callable[[str, int], bool] = lambda address, port: False,
) -> Place | FaultError:
    """One try: this node's place, or what is wrong for now.

    Raises:
        FaultError: node 0's verdict.
    """
    try:
        connection = reach(node)
    except FaultError as error:
        return error
    try:
        attendance = _Attendance(node, terms, Line(connection), deadline, pause)
    except OSError as error:  # the other end has closed already; or the address of the named interface has just gone
        connection.close()
        return _who_answers(node, False, error.strerror or str(error))
    with attendance:
        try:
            return attendance.attend()
        except (_NoAnswerError, _LostError) as error:
            if attendance.trouble:
                raise attendance.trouble from None
            if isinstance(error, _LostError):
                cause = f"lost node 0 during the roll call: {node.address} does not answer any more"
                return node.fault("C3", cause, "look at node 0's log", ExitCode.NODE_LOST)
            return _who_answers(node, is_store(attendance.master, node.master_port), str(error))


def _who_answers(node: Identity, is_store: bool, said: str) -> FaultError:
    if is_store:
        cause = f"the roll call at {node.address} is over; nodes of an earlier start or of another job still run there"
        return node.fault("A21", cause, "end them, or give each job a port of its own", ExitCode.JOIN)
    cause = f"what listens at {node.address} is not this job's roll call ({said})"
    return node.fault("A4", cause, "see what listens there and node 0's log, or choose another port", ExitCode.JOIN)


class _NoAnswerError(Exception):
    """What listens there has not said that it is our node 0."""


class _LostError(Exception):
    """Node 0 had answered, and is gone."""


class _Attendance:
    """One try to attend: a connection, and a port of this node's own that the others try to reach."""

    def __init__(self, node: Identity, terms: Terms, line: Line, deadline: float, pause: Pause) -> None:
        self.node, self.terms, self.line, self.deadline, self.pause = node, terms, line, deadline, pause
        self.master = line.connection.getpeername()[0]
        self.route = line.connection.getsockname()[0]
        self.probe = Probe(terms.address or self.route)
        self.trouble: FaultError | None = None  # that came while this node waited

    def __enter__(self) -> _Attendance:
        return self

    def __exit__(self, *error: object) -> None:
        self.line.close()
        self.probe.close()

    def attend(self) -> Place:
        """See it through."""
        try:
            self.line.send(self._claim())
            message = self._next(self.deadline)
            if "other" in message:
                raise ConnectionError(f"it is that of {message['other']}")
            if "here" not in message:
                raise ConnectionError("it does not know us")
            deadline = max(self.deadline, time.monotonic() + float(message["here"])) + _LATE_SECONDS
        except ConnectionError as error:
            raise _NoAnswerError(str(error)) from None
        except TimeoutError:
            raise _NoAnswerError("it says nothing") from None
        try:
            while "probe" in (message := self._next(deadline)):
                try:
                    self.line.send({"probed": self._probed(message["probe"])})
                except FaultError as error:
                    self._tell(error)
            return self._verdict(message)
        except ConnectionError:
            raise _LostError from None
        except TimeoutError:
            late = self.node.fault("A12", "node 0 gave no verdict in time", "look at node 0's log", ExitCode.JOIN)
            raise self.trouble or late from None

    def _claim(self) -> dict[str, Any]:
        node, terms = self.node, self.terms
        own = {"node_rank": node.node_rank, "nnodes": node.nnodes, "host": node.host, "pid": os.getpid(), "job": terms.job}
        told = {"facts": dict(terms.facts), "traits": dict(terms.traits), "warnings": list(terms.warnings)}
        trouble = terms.trouble.to_json() if terms.trouble else None
        return {**own, "address": self.probe.address, "route": self.route, "port": self.probe.port, **told, "trouble": trouble}

    def _next(self, deadline: float) -> Message:
        while (message := self.line.receive()) is None:
            try:
                self.pause(0)
            except FaultError as error:
                self._tell(error)
                deadline = min(deadline, time.monotonic() + 2 * LEAVE_SECONDS)
            if time.monotonic() > deadline:
                raise TimeoutError
            self.line.wait(_TICK_SECONDS)
        return message

    def _tell(self, trouble: FaultError) -> None:
        self.trouble = trouble
        self.line.send({"trouble": trouble.fault.to_json()})

    def _probed(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        clock, folder = time.time(), self.terms.folder
        result = self.probe.run(Task(**asked["task"]), self.pause)
        return {**asdict(result), "clock": clock, "mark": not folder or not asked["mark"] or folder.has(asked["mark"])}

    def _verdict(self, message: Message) -> Place:
        if not message.keys() & {"fault", "go"}:
            raise ConnectionError("no verdict")
        with suppress(ConnectionError, TimeoutError):
            self.line.send({"read": True})
            self._next(time.monotonic() + LEAVE_SECONDS)  # until node 0 closes
        if "fault" in message:
            raise FaultError(Fault.from_json(message["fault"]))
        return Place(int(message["go"]), self.probe.address, self.master, (str(message["host"]),))
