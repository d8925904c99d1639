"""Node 0 holds the roll call: waits for all, compares them, has them try each other's ports, and gives the verdict."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from trainer.errors import ExitCode, Fault, FaultError
from trainer.node import parity
from trainer.node.identity import Identity
from trainer.node.logs import Report
from trainer.node.probe import LIMIT_SECONDS, Probe, Task, entry
from trainer.node.register import Register
from trainer.node.rollcall import Pause, Place, Terms
from trainer.node.speed import slow_ways

PARTNERS = 1024  # that each node tries: all of them in a job of up to 1,025 nodes, those behind it in the ring in a larger one
_STREAM_SECONDS = {"off": 0.0, "quick": 0.25, "full": 2.0}
_SKEW_SECONDS = 1.0
_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")

Claims = Mapping[int, Mapping[str, Any]]


def preside(
    node: Identity,
    terms: Terms,
    listener: socket.socket,
    deadline: float,
    say: Callable[[str], None],
    pause: Pause = time.sleep,
    probe: str = "quick",
    keep: Callable[[Report], None] = lambda report: None,
) -> Place:
    """Hold the roll call on node 0.

    Args:
        listener: node 0's port, which stays open.
        deadline: time.monotonic() at which to stop waiting.
        say: told every 15 s who is missing, and what is doubtful.
        probe: off, quick or full.
        keep: given what came of it.

    Raises:
        FaultError: the verdict, where it is that the job cannot start.
    """
    started = time.monotonic()
    with Register(node, terms, listener, say, pause) as register:
        register.gather(deadline)
        claims = {rank: dict(claim) for rank, claim in register.claims.items()}
        verdict = _Judge(node, terms, claims, pause)
        if not register.fault:
            register.fault = verdict.compare()
        if not register.fault and node.nnodes > 1 and probe != "off":
            try:
                register.fault = verdict.probe(register, _STREAM_SECONDS[probe])
            except FaultError as error:
                register.fault = error.fault
        fault = register.fault
        for warning in verdict.warnings:
            say(f"warning: {warning}")
        register.dismiss({"fault": fault.to_json()} if fault else {"go": terms.attempt, "host": node.host})
    keep(Report(round(time.monotonic() - started, 3), fault.line() if fault else None, verdict.warnings, list(claims.values())))
    if fault:
        raise FaultError(fault)
    own = listener.getsockname()[0]
    master = own if own not in ("0.0.0.0", "::") else claims[0]["route"]  # noqa: S104
    return Place(terms.attempt, claims[0]["address"], master, tuple(claim["host"] for claim in claims.values()))


class _Judge:
    """What is wrong or doubtful with nodes that are all here."""

    def __init__(self, node: Identity, terms: Terms, claims: dict[int, dict[str, Any]], pause: Pause) -> None:
        self.node, self.terms, self.claims, self.pause = node, terms, claims, pause
        self.warnings: list[str] = []

    def compare(self) -> Fault | None:
        """By what they have told."""
        if same := parity.same_address(self.claims):
            return same
        differs = parity.compare(self.claims)
        if differs and self.terms.may_differ:
            self.warnings.append(f"{differs.cause}; going on, as rollcall.parity=warn says")
            differs = None
        self.warnings += parity.may_differ(self.claims)
        return differs

    def probe(self, register: Register, seconds: float) -> Fault | None:
        """By what they find out about each other."""
        with closing(Probe(self.claims[0]["address"])) as own:
            self.claims[0]["port"] = own.port
            alone = len({claim["host"] for claim in self.claims.values()}) == 1  # no wire to be measured
            mark, folder = f".rollcall-{time.time_ns():x}", self.terms.folder
            with folder.marked(mark) if folder else nullcontext():
                sent = time.time()
                told = self._ask(register, own, self._tasks(0.0 if alone else seconds), mark)
            if fault := register.fault or self._unreached(told) or self._unshared(told):
                return fault
            self._clocks(told, sent)
            return self._speeds(register, own, 0.0 if alone else seconds, told) or register.fault

    def _speeds(self, register: Register, own: Probe, seconds: float, told: Claims) -> Fault | None:
        if not seconds:
            return None
        received = {rank: answer["received"] or 0.0 for rank, answer in told.items()}
        for rank, rate in received.items():
            self.claims[rank]["received"] = rate
        for slow in slow_ways(received, partial(self._measure, register, own, seconds), self._name):
            host = self.claims[slow.node_rank]["host"]
            if slow.dead:
                fix = "look for another MTU on the way (ip link), or a firewall that drops large packets"
                return Fault("A9", host, slow.words, fix, ExitCode.REFUSED, node_rank=slow.node_rank)
            out = f"leave it out (slurm.options.exclude={host})"
            self.warnings.append(f"{slow.words}; fix: look at cable and switch port, or {out}")
        return None

    def _tasks(self, seconds: float) -> dict[int, Task]:
        """For each node: to try those behind it in the ring, as a cut of one table, and to stream to the next."""
        nodes, streams = len(self.claims), seconds > 0
        entries = [entry(claim["address"], claim["port"]) for claim in self.claims.values()]
        table, size, ipv6 = "".join(entries) * 2, len(entries[0]), ":" in self.claims[0]["address"]
        length = min(nodes - 1, PARTNERS) * size
        cuts = {rank: table[(rank + 1) * size : (rank + 1) * size + length] for rank in range(nodes)}
        return {rank: Task(cut, rank + 1, nodes, ipv6, seconds, streams, streams) for rank, cut in cuts.items()}

    def _ask(self, register: Register, own: Probe, tasks: Mapping[int, Task], mark: str = "") -> dict[int, Mapping[str, Any]]:
        """Have the nodes do these tasks; node 0 does its own while they do."""
        others = [rank for rank in tasks if rank]
        register.ask({rank: {"probe": {"task": asdict(tasks[rank]), "mark": mark}} for rank in others})
        told: dict[int, Mapping[str, Any]] = {}
        if 0 in tasks:
            clock = time.time()
            told[0] = {**asdict(own.run(tasks[0], self.pause)), "clock": clock, "mark": True}
        seconds = LIMIT_SECONDS + max(task.seconds for task in tasks.values())
        return told | {rank: answer["probed"] for rank, answer in register.answers(others, seconds).items()}

    def _measure(self, register: Register, own: Probe, seconds: float, sender: int, receiver: int) -> float:
        nodes, target = len(self.claims), self.claims[receiver]
        to, ipv6 = entry(target["address"], target["port"]), ":" in target["address"]
        tasks = {
            sender: Task(to, receiver, nodes, ipv6, seconds, sends=True),
            receiver: Task("", 0, nodes, ipv6, seconds, receives=True),
        }
        return float(self._ask(register, own, tasks).get(receiver, {}).get("received") or 0.0)

    def _unreached(self, told: Claims) -> Fault | None:
        """A port that the kernel chose is not to be reached: from where, to where, and whose side it is."""
        failed = [(rank, to, why) for rank, answer in told.items() for to, why in answer["failed"]]
        if not failed:
            return None
        into, out = Counter(to for _, to, _ in failed), Counter(rank for rank, _, _ in failed)
        (most_to, times_to), (most_from, times_from) = into.most_common(1)[0], out.most_common(1)[0]
        culprit = most_to if times_to >= times_from else most_from
        rank, to, why = next(each for each in failed if culprit in each[:2])
        other, where = self.claims[to], f"{self.claims[to]['address']}:{self.claims[to]['port']}"
        more = f"; {len(failed) - 1} more such connections fail, {self._pattern(culprit, into, out)}" if len(failed) > 1 else ""
        cause = f"{self._name(rank)} gets {_got(why)} from {self._name(to)} at {where}, a port like those of gloo and NCCL"
        if other["seen"] != other["route"]:
            cause += f" (node 0 sees it as {other['seen']}: there is address translation between them)"
            fix = "give the containers the host's network (--network host, hostNetwork)"
            return Fault("A23", other["host"], cause + more, fix, ExitCode.REFUSED, node_rank=to)
        first, last = _PORTS.read_text().split() if _PORTS.exists() else ("32768", "60999")
        cause += f", while {self.node.address} answers" + more
        fix = f"let TCP ports {first}-{last} through between all nodes, in and out (net.ipv4.ip_local_port_range)"
        return Fault("A9", self.claims[culprit]["host"], cause, fix, ExitCode.REFUSED, node_rank=culprit)

    def _pattern(self, culprit: int, into: Counter[int], out: Counter[int]) -> str:
        if into[culprit] > 1 and not out[culprit]:
            return f"all into {self._name(culprit)}" if into[culprit] == into.total() else f"most into {self._name(culprit)}"
        if out[culprit] > 1 and not into[culprit]:
            return f"all out of {self._name(culprit)}" if out[culprit] == out.total() else f"most out of {self._name(culprit)}"
        return "in both directions" if into[culprit] and out[culprit] else "between several nodes"

    def _unshared(self, told: Claims) -> Fault | None:
        blind = [rank for rank, answer in told.items() if not answer["mark"]]
        if not blind:
            return None
        more = f" and {len(blind) - 1} more do" if len(blind) > 1 else " does"
        who = self._name(blind[0]) + more
        cause = f"{who} not see what node 0 ({self.node.host}) writes in the run folder: it is not shared"
        if self.terms.may_differ:
            self.warnings.append(f"{cause}; going on, as rollcall.parity=warn says")
            return None
        fix = "put runs_dir or run_dir on storage that all nodes share"
        return Fault("G8", self.claims[blind[0]]["host"], cause, fix, ExitCode.REFUSED, node_rank=blind[0])

    def _clocks(self, told: Claims, sent: float) -> None:
        """A node reads its clock between being asked and being heard."""
        heard = time.time()
        for rank, answer in told.items():
            ahead = max(answer["clock"] - heard, 0.0) or min(answer["clock"] - sent, 0.0)
            if abs(ahead) > _SKEW_SECONDS:
                order = "ahead of" if ahead > 0 else "behind"
                self.warnings.append(
                    f"the clock of {self._name(rank)} is {abs(ahead):.0f} s {order} node 0's, so times in their logs cannot be "
                    "compared; fix: run chrony or ntpd there"
                )

    def _name(self, rank: int) -> str:
        return f"node {rank} ({self.claims[rank]['host']})"


def _got(why: str) -> str:
    return why if why == "no answer" else f"'{why}'"
