"""The roll call on node 0's store: who is there, one verdict for all, one fault for all, and a counted goodbye."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistError

from trainer.errors import ExitCode, Fault
from trainer.node import parity
from trainer.node.identity import Identity
from trainer.node.signals import STOP_SIGNALS
from trainer.process import die_with_parent

_STORE_SECONDS = 10.0  # limit of one request
_POLL_SECONDS = 0.2
_SAY_SECONDS = 15.0
_GO = "go"
_Answer = TypeVar("_Answer")


@dataclass
class Roll:
    """The nodes' common ground once all have joined. Requests that node 0 does not answer raise `ConnectionError`."""

    node: Identity
    store: Store
    attempt: int = 0
    lost: bool = False  # node 0 has left a request unanswered: no second one waits for it

    def report(self, fault: Fault) -> Fault:
        """Report a fault; returns the job's fault, which is the first that anyone reported."""
        return self._fault(self._ask(lambda: self.store.compare_set("fault", "", fault.to_json())))

    def fault(self) -> Fault | None:
        """The job's fault, if there is one by now."""
        if not self._ask(lambda: self.store.check(["fault"])):
            return None
        return self._fault(self._ask(lambda: self.store.get("fault")))

    def say_goodbye(self, first_rank: int) -> None:
        """This node has no more to do with the others: all its ranks have ended."""
        self._ask(lambda: self.store.set(f"left/{self.node.node_rank}", json.dumps([self.node.host, first_rank])))
        self._ask(lambda: self.store.add("goodbye", 1))

    def leave(self) -> None:
        """After the goodbyes: node 0 waits until the others have seen that all is well, then its store may go."""
        if self.node.node_rank > 0:
            self._ask(lambda: self.store.add("gone", 1))
            return
        until = time.monotonic() + _STORE_SECONDS
        while int(self._ask(lambda: self.store.add("gone", 0))) < self.node.nnodes - 1 and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def left_early(self) -> tuple[int, str, int] | None:
        """Node rank, host and first rank of a node that has left, if any has."""
        others = [rank for rank in range(self.node.nnodes) if rank != self.node.node_rank]
        left = self._ask(lambda: [rank for rank in others if self.store.check([f"left/{rank}"])])
        if not left:
            return None
        host, first_rank = json.loads(self._ask(lambda: self.store.get(f"left/{left[0]}")))
        return left[0], host, first_rank

    def all_said_goodbye(self) -> bool:
        """Whether node 0 may take the store away."""
        return int(self._ask(lambda: self.store.add("goodbye", 0))) >= self.node.nnodes

    @staticmethod
    def _fault(answer: bytes) -> Fault:
        return Fault.from_json(answer.decode())

    def _ask(self, request: Callable[[], _Answer]) -> _Answer:
        if self.lost:
            raise ConnectionError("node 0 does not answer")
        try:
            return request()
        except (DistError, RuntimeError) as error:
            self.lost = True
            raise ConnectionError(str(error)) from None


def serve(listener: socket.socket, in_child: Callable[[], None]) -> int:
    """Run the store in a process of its own, so that this one keeps a single thread and can fork; returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        listener.close()
        return pid
    try:
        in_child()
        die_with_parent(parent)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # its end is the node process's end, or its word
        host, port = listener.getsockname()
        store = TCPStore(host, port, is_master=True, master_listen_fd=listener.detach(), wait_for_workers=False)
        while store:
            signal.pause()
    finally:
        os._exit(1)


def connect(node: Identity) -> Store:
    """This node's line to the store."""
    timeout = timedelta(seconds=_STORE_SECONDS)
    before = _sockets()
    store = TCPStore(node.master_addr, node.master_port, is_master=False, timeout=timeout, wait_for_workers=False)
    for fd in _sockets() - before:
        _limit(fd)
    return PrefixStore("nodes", store)


def _sockets() -> set[int]:
    """The sockets that this process has open, where /proc tells."""
    found = set()
    for path in Path("/proc/self/fd").iterdir() if sys.platform == "linux" else []:
        with suppress(OSError):  # the listing's own is closed again
            if stat.S_ISSOCK(os.fstat(int(path.name)).st_mode):
                found.add(int(path.name))
    return found


def _limit(fd: int) -> None:
    """Let a request end that is never answered. The store's client waits for ever for a node 0 that is frozen or cut off."""
    limit = struct.pack("ll", int(_STORE_SECONDS), 0)  # a struct timeval
    with socket.socket(fileno=os.dup(fd)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def join(
    node: Identity,
    store: Store,
    attempt: int,
    deadline: float,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
    facts: Mapping[str, str] | None = None,
    may_differ: bool = False,
) -> Roll:
    """Report in and wait for node 0's verdict.

    Args:
        attempt: number of this attempt; node 0's word counts.
        deadline: time.monotonic() at which node 0 stops waiting.
        say: told every 15 s who is missing.
        pause: sleeps between looks; what it raises ends the wait.
        facts: what has to be the same on every node.
        may_differ: only warn where it is not.

    Raises:
        FaultError: somebody is missing or differs, or two nodes claim one rank; the same on every node that came.
    """
    roll = Roll(node, store, attempt)
    claim = json.dumps({"host": node.host, "pid": os.getpid(), "facts": dict(facts or {})})
    holder = store.compare_set(f"node/{node.node_rank}", "", claim).decode()
    if holder != claim:
        other = json.loads(holder)
        cause = (
            f"node rank {node.node_rank} is claimed by {other['host']} (pid {other['pid']}) and {node.host} (pid {os.getpid()})"
        )
        fault = node.fault("A11", cause, "give each node a PET_NODE_RANK of its own").fault
        store.compare_set("verdict", "", roll.report(fault).to_json())
    if node.node_rank == 0:
        _decide(roll, deadline, say, pause, may_differ)
    # Node 0 decides by its own clock; the others give it some seconds more before they call it lost.
    while not roll._ask(lambda: store.check(["verdict"])):
        if time.monotonic() > deadline + _STORE_SECONDS:
            raise node.fault("A12", "node 0 gave no verdict in time", "look at node 0's log", ExitCode.JOIN)
        pause(_POLL_SECONDS)
    verdict = store.get("verdict").decode()
    if not verdict.startswith(_GO):
        from_node_0 = Fault.from_json(verdict)
        error = node.fault(from_node_0.code, from_node_0.cause, from_node_0.fix, from_node_0.exit_code)
        error.fault = from_node_0
        raise error
    roll.attempt = int(verdict.removeprefix(_GO))
    return roll


def _decide(roll: Roll, deadline: float, say: Callable[[str], None], pause: Callable[[float], None], may_differ: bool) -> None:
    """Node 0: wait for all, then give the verdict."""
    node, store = roll.node, roll.store
    missing = list(range(1, node.nnodes))
    started = said = time.monotonic()
    while missing and time.monotonic() < deadline:
        missing = [rank for rank in missing if not store.check([f"node/{rank}"])]
        if store.check(["verdict"]):
            return
        if missing and time.monotonic() - said > _SAY_SECONDS:
            said = time.monotonic()
            say(f"{node.nnodes - len(missing)} of {node.nnodes} nodes are here; waiting for node rank {_list(missing)}")
        if missing:
            pause(_POLL_SECONDS)
    if not missing:
        differs = _compare(roll)
        if differs and may_differ:
            say(f"warning: {differs.cause}; going on, as watch.parity=warn says")
        store.compare_set("verdict", "", differs.to_json() if differs and not may_differ else f"{_GO}{roll.attempt}")
        return
    waited = time.monotonic() - started
    cause = f"{node.nnodes - len(missing)} of {node.nnodes} nodes joined in {waited:.0f} s; missing: node rank {_list(missing)}"
    fix = "look at the missing nodes' logs; a node that is slow to start needs a larger watch.join_seconds"
    fault = Fault("A12", node.host, cause, fix, ExitCode.JOIN, node_rank=missing[0])
    store.compare_set("verdict", "", fault.to_json())


def _compare(roll: Roll) -> Fault | None:
    """The fault of the node that is not like the others, if there is one."""
    claims = {rank: json.loads(roll.store.get(f"node/{rank}")) for rank in range(roll.node.nnodes)}
    found = parity.difference({rank: (claim["host"], claim["facts"]) for rank, claim in claims.items()})
    if found is None:
        return None
    code, cause, rank = found
    fix = "start the same image, code and config on every node, or let them differ with watch.parity=warn"
    return Fault(code, claims[rank]["host"], cause, fix, ExitCode.REFUSED, node_rank=rank)


def _list(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:10])
    return shown + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
