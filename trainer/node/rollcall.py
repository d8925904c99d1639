"""The roll call on node 0's store: who is there, one verdict for all, one fault for all, and a counted goodbye."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from trainer.errors import ExitCode, Fault, FaultError
from trainer.node import parity
from trainer.node.identity import Identity
from trainer.node.network import address_towards
from trainer.node.rendezvous import reach
from trainer.node.store import REQUEST_SECONDS, answers, connect

_POLL_SECONDS = 0.2
_RETRY_SECONDS = 1.0
_SAY_SECONDS = 15.0
_LEAVE_SECONDS = 5.0
_GO = "go"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Terms:
    """What a node brings to the roll call."""

    attempt: int  # its count of attempts; node 0's word counts
    facts: Mapping[str, str]  # what has to be the same on every node
    may_differ: bool = False  # only warn where it is not
    trouble: Fault | None = None  # what this node has found wrong with itself: the others are to end with the same line


@dataclass
class Roll:
    """The nodes' common ground once all have joined. Requests that node 0 does not answer raise `ConnectionError`."""

    node: Identity
    store: Store
    attempt: int = 0
    address: str = ""  # of this node, as the others reach it
    lost: bool = False  # node 0 has left a request unanswered: no second one waits for it

    def report(self, fault: Fault) -> Fault:
        """Report a fault; returns the job's fault, which is the first that anyone reported."""
        return self._fault(self.ask(lambda: self.store.compare_set("fault", "", fault.to_json())))

    def fault(self) -> Fault | None:
        """The job's fault, if there is one by now."""
        if not self.ask(lambda: self.store.check(["fault"])):
            return None
        return self._fault(self.ask(lambda: self.store.get("fault")))

    def is_over(self) -> bool:
        """Whether a verdict was given."""
        return bool(self.ask(lambda: self.store.check(["verdict"])))

    def give(self, verdict: str) -> None:
        """Give the verdict, unless there is one."""
        self.ask(lambda: self.store.compare_set("verdict", "", verdict))

    def say_goodbye(self, first_rank: int) -> None:
        """This node has no more to do with the others: all its ranks have ended."""
        self.ask(lambda: self.store.set(f"left/{self.node.node_rank}", json.dumps([self.node.host, first_rank])))
        self.ask(lambda: self.store.add("goodbye", 1))

    def leave(self) -> None:
        """After the goodbyes: node 0 waits until the others have seen that all is well, then its store may go."""
        if self.node.node_rank > 0:
            self.ask(lambda: self.store.add("gone", 1))
            return
        until = time.monotonic() + REQUEST_SECONDS
        while int(self.ask(lambda: self.store.add("gone", 0))) < self.node.nnodes - 1 and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def left_early(self) -> tuple[int, str, int] | None:
        """Node rank, host and first rank of a node that has left, if any has."""
        others = [rank for rank in range(self.node.nnodes) if rank != self.node.node_rank]
        left = self.ask(lambda: [rank for rank in others if self.store.check([f"left/{rank}"])])
        if not left:
            return None
        host, first_rank = json.loads(self.ask(lambda: self.store.get(f"left/{left[0]}")))
        return left[0], host, first_rank

    def all_said_goodbye(self) -> bool:
        """Whether node 0 may take the store away."""
        return int(self.ask(lambda: self.store.add("goodbye", 0))) >= self.node.nnodes

    @staticmethod
    def _fault(answer: bytes) -> Fault:
        return Fault.from_json(answer.decode())

    def ask(self, request: Callable[[], _Answer]) -> _Answer:
        """One request.

        Raises:
            ConnectionError: node 0 does not answer.
        """
        if self.lost:
            raise ConnectionError("node 0 does not answer")
        try:
            return request()
        except (DistError, RuntimeError) as error:
            self.lost = True
            raise ConnectionError(str(error)) from None


def join(
    node: Identity, terms: Terms, deadline: float, say: Callable[[str], None], pause: Callable[[float], None] = time.sleep
) -> Roll:
    """Reach node 0, report in and wait for its verdict.

    A roll call that is over already is one of an earlier start whose node 0 has not ended yet (a scheduler may restart the other
    nodes sooner): the next one is waited for.

    Args:
        deadline: time.monotonic() at which to give up, and node 0 stops waiting.
        say: told every 15 s who is missing.
        pause: sleeps between looks; what it raises ends the wait.

    Raises:
        FaultError: node 0 cannot be reached; somebody is missing or differs, or two nodes claim one rank: then the same on every
            node that came.
    """
    while True:
        reach(node, deadline, pause)
        try:
            found = _open(node, terms, pause)
            if isinstance(found, Roll):
                return _report_in(found, terms, deadline, say, pause)
            trouble = found
        except (ConnectionError, DistError):
            cause = f"lost node 0 during the roll call: its store at {node.address} does not answer any more"
            trouble = node.fault("C3", cause, "look at node 0's log", ExitCode.NODE_LOST)
        if time.monotonic() > deadline:
            raise trouble
        pause(_RETRY_SECONDS)


def _open(node: Identity, terms: Terms, pause: Callable[[float], None]) -> Roll | FaultError:
    """The roll call at node 0's address, or what is there instead of it for now."""
    if node.node_rank and not answers(node, pause):
        cause = f"what listens at {node.address} is not this job's store"
        return node.fault("A4", cause, "see what listens there, or choose another port", ExitCode.JOIN)
    roll = Roll(node, connect(node), terms.attempt, address_towards(node.master_addr) if node.node_rank else "")
    if not roll.is_over():
        return roll
    cause = f"the roll call at {node.address} is over; nodes of an earlier start or of another job still run there"
    return node.fault("A21", cause, "end them, or give each job a port of its own", ExitCode.JOIN)


def _report_in(roll: Roll, terms: Terms, deadline: float, say: Callable[[str], None], pause: Callable[[float], None]) -> Roll:
    node, store, ask = roll.node, roll.store, roll.ask
    claim = json.dumps({"host": node.host, "pid": os.getpid(), "address": roll.address, "facts": dict(terms.facts)})
    holder = ask(lambda: store.compare_set(f"node/{node.node_rank}", "", claim)).decode()
    if holder != claim:
        other = json.loads(holder)
        cause = (
            f"node rank {node.node_rank} is claimed by {other['host']} (pid {other['pid']}) and {node.host} (pid {os.getpid()})"
        )
        fault = node.fault("A11", cause, "give each node a PET_NODE_RANK of its own").fault
        roll.give(roll.report(fault).to_json())
    ask(lambda: store.add("came", 1))
    if terms.trouble:
        told = terms.trouble.to_json()
        ask(lambda: store.compare_set("trouble", "", told))
    if node.node_rank == 0:
        _decide(roll, terms, deadline, say, pause)
    # Node 0 decides by its own clock; the others give it some seconds more before they call it lost.
    while not roll.is_over():
        if time.monotonic() > deadline + REQUEST_SECONDS:
            raise node.fault("A12", "node 0 gave no verdict in time", "look at node 0's log", ExitCode.JOIN)
        pause(_POLL_SECONDS)
    verdict = ask(lambda: store.get("verdict")).decode()
    if not verdict.startswith(_GO):
        _leave_together(roll)
        raise FaultError(Fault.from_json(verdict))
    roll.attempt = int(verdict.removeprefix(_GO))
    return roll


def _leave_together(roll: Roll) -> None:
    """Before a job that cannot start is left, all who came read the verdict: with node 0 the store would go, and a scheduler ends
    the others as soon as one has ended."""
    until = time.monotonic() + _LEAVE_SECONDS
    with suppress(ConnectionError):
        roll.ask(lambda: roll.store.add("read", 1))
        while time.monotonic() < until:
            came, read = (int(roll.ask(lambda key=key: roll.store.add(key, 0))) for key in ("came", "read"))  # type: ignore[misc]
            if read >= came:
                return
            time.sleep(_POLL_SECONDS)


def _decide(roll: Roll, terms: Terms, deadline: float, say: Callable[[str], None], pause: Callable[[float], None]) -> None:
    """Node 0: wait for all, then give the verdict."""
    node = roll.node
    missing = list(range(1, node.nnodes))
    trouble, started = False, time.monotonic()
    said = started
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not roll.ask(lambda rank=rank: roll.store.check([f"node/{rank}"]))]  # type: ignore[misc]
        if roll.is_over():
            return
        if not trouble and roll.ask(lambda: roll.store.check(["trouble"])):
            trouble, deadline = True, min(deadline, time.monotonic() + _LEAVE_SECONDS)  # the job cannot start any more
        if missing and time.monotonic() - said > _SAY_SECONDS:
            said = time.monotonic()
            here = node.nnodes - len(missing)
            say(f"{here} of {node.nnodes} nodes are here; waiting for node rank {_list(missing, node.hosts)}")
        if missing:
            pause(_POLL_SECONDS)
    if roll.ask(lambda: roll.store.check(["trouble"])):
        roll.give(roll.ask(lambda: roll.store.get("trouble")).decode())
        return
    if not missing:
        roll.give(_compared(roll, terms, say))
        return
    here, waited = node.nnodes - len(missing), time.monotonic() - started
    cause = f"{here} of {node.nnodes} nodes joined in {waited:.0f} s; missing: node rank {_list(missing, node.hosts)}"
    fix = "look at the missing nodes' logs; a node that is slow to start needs a larger watch.join_seconds"
    roll.give(Fault("A12", node.host, cause, fix, ExitCode.JOIN, node_rank=missing[0]).to_json())


def _compared(roll: Roll, terms: Terms, say: Callable[[str], None]) -> str:
    """The verdict on nodes that are all here."""
    claims = roll.ask(lambda: {rank: json.loads(roll.store.get(f"node/{rank}")) for rank in range(roll.node.nnodes)})
    roll.address = address_towards(claims[1]["address"]) if len(claims) > 1 else ""
    claims[0]["address"] = roll.address
    if same := parity.same_address(claims):
        return same.to_json()
    differs = parity.compare(claims)
    if differs and terms.may_differ:
        say(f"warning: {differs.cause}; going on, as watch.parity=warn says")
        differs = None
    return differs.to_json() if differs else f"{_GO}{roll.attempt}"


def _list(numbers: list[int], hosts: tuple[str, ...]) -> str:
    shown = ", ".join(f"{number} ({hosts[number]})" if hosts else str(number) for number in numbers[:10])
    return shown + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
