"""What the nodes tell each other once all have joined: faults, goodbyes, and where their ranks are, by keys in node 0's store."""

from __future__ import annotations

import json
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from trainer.errors import ExitCode, Fault
from trainer.node.identity import Identity
from trainer.node.store import ANSWER_SECONDS, REQUEST_SECONDS

_POLL_SECONDS = 0.2
_Answer = TypeVar("_Answer")


@dataclass
class Roll:
    """What the nodes tell each other once all have joined. Requests that node 0 does not answer raise `ConnectionError`."""

    node: Identity
    store: Store
    sockets: Sequence[int] = ()  # of the line to it
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

    def all_arrived(self, hosts: Sequence[str]) -> Fault | None:
        """On node 0: wait until all nodes have reached the store after the verdict; the fault of one that has not, told to all.

        Args:
            hosts: the nodes' names by node rank, as they told them.
        """
        self.beat("")
        if self.node.node_rank:
            return None
        keys, until = self._keys("beat"), time.monotonic() + ANSWER_SECONDS
        while not self.ask(lambda: self.store.check(keys)):
            if time.monotonic() > until:
                absent = [rank for rank, key in enumerate(keys) if not self.ask(lambda key=key: self.store.check([key]))]  # type: ignore[misc]
                cause = f"node {absent[0]} ({hosts[absent[0]]}) ended between the roll call and the start of the ranks"
                fault = Fault("C3", hosts[absent[0]], cause, "look at its log", ExitCode.NODE_LOST, node_rank=absent[0])
                fault = self.report(fault)
                self.linger(absent=len(absent))
                return fault
            time.sleep(0.05)
        return None

    def beat(self, text: str) -> None:
        """Tell node 0 that this node lives, and where its ranks are."""
        self.ask(lambda: self.store.set(f"beat/{self.node.node_rank}", text))

    def beats(self) -> list[str]:
        """On node 0: what each node has told last, by node rank."""
        return [text.decode() for text in self.ask(lambda: self.store.multi_get(self._keys("beat")))]

    def first_beat(self) -> str:
        """What node 0 has told last."""
        return str(self.ask(lambda: self.store.multi_get(["beat/0"]))[0].decode())

    def mark(self, name: str) -> None:
        """Say something to all nodes, once. `inquest`: all are to tell what the processes of their ranks are at. `doubt`: ranks
        have lost a peer, and nobody says why."""
        self.ask(lambda: self.store.set(name, "1"))

    def marked(self, name: str) -> bool:
        """Whether any node has said that."""
        return bool(self.ask(lambda: self.store.check([name])))

    def testify(self, text: str) -> None:
        """Tell it."""
        self.ask(lambda: self.store.set(f"finding/{self.node.node_rank}", text))

    def testimonies(self, seconds: float) -> list[str]:
        """On node 0: what the others told within so many seconds."""
        keys, until = self._keys("finding")[1:], time.monotonic() + seconds
        while not self.ask(lambda: self.store.check(keys)) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        there = [key for key in keys if self.ask(lambda key=key: self.store.check([key]))]  # type: ignore[misc]
        return [self.ask(lambda key=key: self.store.get(key)).decode() for key in there]  # type: ignore[misc]

    def _keys(self, name: str) -> list[str]:
        return [f"{name}/{node_rank}" for node_rank in range(self.node.nnodes)]

    def linger(self, absent: int = 0) -> None:
        """After a fault: say goodbye; node 0 keeps the store a little longer, so that all can read it.

        Args:
            absent: how many nodes are known to be gone.
        """
        with suppress(ConnectionError):
            self.say_goodbye(self.node.node_rank * self.node.nproc_per_node)
            until, expected = time.monotonic() + REQUEST_SECONDS / 2, self.node.nnodes - absent
            while self.node.node_rank == 0 and time.monotonic() < until:
                if int(self.ask(lambda: self.store.add("goodbye", 0))) >= expected:
                    return
                time.sleep(0.1)

    def outlive(self) -> None:
        """Wait until the store is gone."""
        select.select(self.sockets[:1], [], [], REQUEST_SECONDS)

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
