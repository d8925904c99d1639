"""Node 0's side of the roll call: it keeps the register of who is here, judges, and gives all the same verdict.

One connection and three messages from each node (a few more where a way is slow), and nobody but node 0 reads what all have told.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trainer.errors import ExitCode, Fault, FaultError
from trainer.node.claim import is_answer, is_claim, is_fault
from trainer.node.identity import Identity
from trainer.node.line import Line, Message
from trainer.node.rollcall import LEAVE_SECONDS, Pause, Terms

_TICK_SECONDS = 0.1
_SAY_SECONDS = 15.0


@dataclass(eq=False)
class _Caller:
    """One connection, and what has come over it."""

    line: Line
    claim: Message | None = None
    said: list[Message] = field(default_factory=list)  # after the claim
    gone: bool = False

    @property
    def name(self) -> str:
        """The node, as a person would name it."""
        return f"node {self.claim['node_rank']} ({self.claim['host']})" if self.claim else "nobody"


class Register:
    """All connections to node 0 during the roll call, and the fault that was found, if one was."""

    def __init__(self, node: Identity, terms: Terms, listener: socket.socket, say: Callable[[str], None], pause: Pause) -> None:
        """
        Args:
            listener: node 0's port, which stays open.
            say: told every 15 s who is missing.
            pause: called often; a fault that it raises is that of all.
        """
        self.node, self.terms, self.say, self.pause = node, terms, say, pause
        self.fault: Fault | None = terms.trouble
        self._deadline = 0.0
        self._callers: dict[int, _Caller] = {}  # by node rank, in the order they came
        self._strangers: set[_Caller] = set()  # not heard yet, or turned down
        self._listener = listener
        listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Register:
        return self

    def __exit__(self, *error: object) -> None:
        self._selector.close()
        for caller in self._all:
            caller.line.close()
        self._listener.setblocking(True)

    @property
    def missing(self) -> list[int]:
        """Node ranks that nobody has claimed."""
        return [rank for rank in range(1, self.node.nnodes) if rank not in self._callers]

    @property
    def claims(self) -> dict[int, dict[str, Any]]:
        """Node rank -> what it has told, in order; node 0's own among them. `seen` is its address as node 0 sees it."""
        node, terms = self.node, self.terms
        own = {"node_rank": 0, "host": node.host, "pid": os.getpid(), "warnings": list(terms.warnings)}
        first = next(iter(self._callers.values()), None)
        route = first.line.connection.getsockname()[0] if first else ""
        place = {"address": terms.address or route, "route": route, "seen": route}
        found = {0: {**own, **place, "facts": terms.facts, "traits": terms.traits}}
        for rank in sorted(self._callers):
            caller = self._callers[rank]
            found[rank] = {**(caller.claim or {}), "seen": caller.line.connection.getpeername()[0]}
        return found

    def gather(self, deadline: float) -> None:
        """Wait for all nodes, at most until a deadline (time.monotonic()); once there is a fault, a few seconds more."""
        started, said, self._deadline = time.monotonic(), time.monotonic(), deadline
        while len(self._callers) + 1 < self.node.nnodes and time.monotonic() < deadline:
            if self.fault:
                deadline = min(deadline, time.monotonic() + LEAVE_SECONDS)
            try:
                turned = self._turn()
            except FaultError as error:
                self.fault, turned = self.fault or error.fault, []
            if any(caller.gone for caller in turned):  # a rank is free again: a scheduler may start it anew
                self._callers = {rank: caller for rank, caller in self._callers.items() if not caller.gone}
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                self.say(f"{len(self._callers) + 1} of {self.node.nnodes} nodes are here; waiting for node rank {self._names()}")
        if self.missing and not self.fault:
            here, waited = len(self._callers) + 1, time.monotonic() - started
            cause = f"{here} of {self.node.nnodes} nodes joined in {waited:.0f} s; missing: node rank {self._names()}"
            fix = "look at the missing nodes' logs; a node that is slow to start needs a larger watch.join_seconds"
            self.fault = Fault("A12", self.node.host, cause, fix, ExitCode.JOIN, node_rank=self.missing[0])

    def ask(self, messages: dict[int, Message]) -> None:
        """Send each node its own message."""
        for rank, message in messages.items():
            self._tell(self._callers[rank], message)

    def answers(self, ranks: list[int], seconds: float) -> dict[int, Message]:
        """What each of these nodes says next. A node that ends instead, or is silent for so long, is the job's fault."""
        callers = {rank: self._callers[rank] for rank in ranks}
        self._hear({caller for caller in callers.values() if not caller.gone}, seconds)
        for rank, caller in callers.items():
            if not caller.said:
                how = "ended" if caller.gone else f"said nothing for {seconds:.0f} s"
                cause = f"{caller.name} {how} during the roll call"
                host = caller.claim["host"] if caller.claim else ""
                fault = Fault("C3", host, cause, "look at its log", ExitCode.NODE_LOST, node_rank=rank)
                self.fault = self.fault or fault
        return {rank: said for rank, caller in callers.items() if caller.said and "probed" in (said := caller.said.pop(0))}

    def dismiss(self, verdict: Message) -> None:
        """Give the verdict to all who are here, and let them go together."""
        told = [caller for caller in self._all if caller.claim and not caller.gone]
        for caller in told:
            caller.said.clear()
            self._tell(caller, verdict)
        self._hear({caller for caller in told if not caller.gone}, LEAVE_SECONDS)

    @property
    def _all(self) -> list[_Caller]:
        return [*self._callers.values(), *self._strangers]

    def _hear(self, silent: set[_Caller], seconds: float) -> None:
        """Wait until each of these has said something or has ended."""
        until = time.monotonic() + seconds
        silent = {caller for caller in silent if not caller.said}
        while silent and time.monotonic() < until:
            silent -= {caller for caller in self._turn() if caller.said or caller.gone}

    def _turn(self) -> list[_Caller]:
        """Serve those who are ready, and return them."""
        self.pause(0)
        ready = [key.data for key, _ in self._selector.select(_TICK_SECONDS)]
        for caller in ready:
            if caller is None:
                self._accept()
            else:
                self._serve(caller)
        return [caller for caller in ready if caller]

    def _accept(self) -> None:
        with suppress(OSError):  # all who wait
            while True:
                caller = _Caller(Line(self._listener.accept()[0]))
                self._strangers.add(caller)
                self._selector.register(caller.line.connection, selectors.EVENT_READ, caller)

    def _serve(self, caller: _Caller) -> None:
        try:
            caller.line.flush()
            while (message := caller.line.receive()) is not None:
                if caller.claim is None:
                    self._admit(caller, message)
                elif message.get("read") is True or is_answer(message.get("probed")):
                    caller.said.append(message)
                elif is_fault(message.get("trouble")):
                    self.fault = self.fault or Fault.from_json(message["trouble"])
                    caller.said.append(message)
                else:
                    raise ConnectionError("no answer")
            self._watch(caller)
        except ConnectionError:
            self._lose(caller)

    def _tell(self, caller: _Caller, message: Message) -> None:
        if caller.gone:
            return
        with suppress(ConnectionError):  # its end is noticed when it is read
            caller.line.send(message)
        self._watch(caller)

    def _watch(self, caller: _Caller) -> None:
        """What does not fit into the kernel's buffer follows when there is room."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if caller.line.unsent else 0)
        if self._selector.get_key(caller.line.connection).events != events:
            self._selector.modify(caller.line.connection, events, caller)

    def _admit(self, caller: _Caller, claim: Message) -> None:
        if not is_claim(claim):
            raise ConnectionError("no claim")
        if claim["job"] and self.terms.job and claim["job"] != self.terms.job:
            caller.line.send({"other": f"job {self.terms.job}"})
            raise ConnectionError("another job's")
        caller.claim = claim
        rank, host = claim["node_rank"], claim["host"]
        self._strangers.remove(caller)
        if self.fault is None and claim.get("trouble"):
            self.fault = Fault.from_json(claim["trouble"])
        if claim["nnodes"] != self.node.nnodes:
            cause = f"{caller.name} says {claim['nnodes']} nodes, node 0 ({self.node.host}) says {self.node.nnodes}"
            self._turn_down(caller, Fault("A13", host, cause, "make the two agree", ExitCode.REFUSED, node_rank=rank))
        elif rank == 0 or (rank in self._callers and not self._callers[rank].gone):
            holder = self._callers[rank].claim if rank else {"host": self.node.host, "pid": os.getpid()}
            first = f"{holder['host']} (pid {holder['pid']})" if holder else ""
            cause = f"node rank {rank} is claimed by {first} and {host} (pid {claim['pid']})"
            fix = "give each node a PET_NODE_RANK of its own"
            self._turn_down(caller, Fault("A11", host, cause, fix, ExitCode.REFUSED, node_rank=rank))
        else:
            self._callers[rank] = caller
        caller.line.send({"here": max(0.0, self._deadline - time.monotonic())})  # how long node 0 waits for others

    def _turn_down(self, caller: _Caller, fault: Fault) -> None:
        self.fault = self.fault or fault
        self._strangers.add(caller)

    def _lose(self, caller: _Caller) -> None:
        caller.gone = True
        self._selector.unregister(caller.line.connection)
        caller.line.close()
        self._strangers.discard(caller)

    def _names(self) -> str:
        missing, hosts = self.missing, self.node.hosts
        shown = ", ".join(f"{number} ({hosts[number]})" if hosts else str(number) for number in missing[:10])
        return shown + (f" and {len(missing) - 10} more" if len(missing) > 10 else "")
