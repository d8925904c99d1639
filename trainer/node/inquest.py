"""How nodes keep an eye on each other's ranks: each tells node 0 where its ranks are, and node 0 sees who is lost or holds the
job up. Then all look at the stacks of their ranks, and one verdict falls."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from trainer.errors import ExitCode, Fault
from trainer.node.logs import RunFolder, say
from trainer.node.roll import Roll
from trainer.node.stacks import Stack, collect
from trainer.node.stall import Finding, Sight, holding_up, stragglers, suspects, verdict
from trainer.node.verdict import Running, left_early
from trainer.process import process_state
from trainer.pulse import Phase

_BEAT_SECONDS = 2.0
_WARN_BEATS = 8  # how often node 0 looks for stragglers
_OVERDUE = "!"  # what a node tells begins with it, if one of its ranks is
LOST_SECONDS = 20.0  # a node that tells nothing for so long is gone
_WAITING_SECONDS = 5.0  # with a rank that shows no progress for so long, a node asks whether node 0 wants to know more
_ASLEEP_SECONDS = 5.0  # with no tick for so long, this process was stopped itself
GONE = "see whether that machine and its network are up, then start again to go on from the last checkpoint"
_FINDING_SECONDS = 8.0  # how long node 0 waits for all nodes' findings
_RECORD_SECONDS = 0.7  # for ranks to tell what they know
_PEER_SECONDS = 5.0  # a rank that lost its peer waits so long for the peer's own fault
_DOUBT_SECONDS = 8.0  # where ranks have lost a peer and nobody says why, a node that tells nothing for so long is gone


class Inquest:
    """One node's part in it."""

    def __init__(
        self, roll: Roll, hosts: Sequence[str], ranks: Sequence[Running], folder: RunFolder, factor: float | None
    ) -> None:
        """
        Args:
            hosts: the nodes' names by node rank; node 0's is enough on others.
            ranks: of this node; others may be added.
            folder: where what is found out is kept.
            factor: of which ranks to warn, see `stragglers`.
        """
        self.roll, self.node, self.hosts, self.ranks, self.folder = roll, roll.node, hosts, ranks, folder
        self._factor, self._slow = factor, set[int]()  # ranks that have been warned of
        self._beats = 0
        self._next, self._ticked = 0.0, time.monotonic()
        self._told: list[str] = [""] * len(hosts)  # by each node, the last time
        self._since = [time.monotonic()] * len(hosts)  # when that changed
        self._testified = self._examined = False

    def tick(self) -> Fault | None:
        """Look at this node's ranks, and at times talk to the others; returns the fault if there is one.

        Raises:
            ConnectionError: node 0 does not answer.
        """
        now = time.monotonic()
        asleep, self._ticked = now - self._ticked > _ASLEEP_SECONDS, now
        sights = self.look(now, asleep)
        if asleep:
            self._since = [now] * len(self.hosts)
        if self.node.nnodes == 1:
            self._warn(sights)
            return self._decide(sights, holding_up) if holding_up(sights) else None
        if now < self._next:
            return None
        self._next, self._beats = now + _BEAT_SECONDS, self._beats + 1
        self.roll.beat(self._told_of(sights))
        if self.node.node_rank == 0:
            return self._preside(now)
        text = self.roll.first_beat()  # its store may answer while it stands still itself
        if text != self._told[0]:
            self._told[0], self._since[0] = text, now
        elif now - self._since[0] > LOST_SECONDS:
            return self._lost(0, now - self._since[0])
        if not self._testified and any(sight.age > _WAITING_SECONDS for sight in sights) and self.roll.marked("inquest"):
            self._testified = True
            self.roll.testify(self._told_of(self._examine(self.look(time.monotonic()))))
        return None

    def look(self, now: float, asleep: bool = False) -> list[Sight]:
        """This node's ranks.

        Args:
            asleep: this process was stopped until now, such as by a scheduler that suspends the job.
        """
        found = []
        for running in self.ranks:
            state = f"exit {running.status}" if running.status is not None else process_state(running.pid) or "gone"
            vitals = running.vitals
            beat = vitals.look(now, state, asleep)
            where = (beat.step, beat.place, beat.phase, beat.sequence)
            who = (running.rank.rank, self.node.host, self.node.node_rank, running.pid, state)
            busy, mostly = vitals.busy or (None, Phase.START)
            found.append(Sight(*who, *where, vitals.age(now), vitals.left(now), busy=busy, mostly=mostly))
        return found

    def _told_of(self, sights: Sequence[Sight]) -> str:
        mark = _OVERDUE if any(sight.left < 0 for sight in sights if sight.alive) else ""
        return mark + json.dumps({"beat": self._beats, "ranks": [asdict(sight) for sight in sights]})

    def crashed(self) -> None:
        """Keep where this node's ranks were when one failed, here or elsewhere; not after a closer look at them."""
        if not self._examined:
            self._keep("crash", self.look(time.monotonic()), {})

    def missing(self, pause: Callable[[], None]) -> Fault | None:
        """Why ranks of this node have lost a peer: what another node reports, that it is gone, or who holds the others up.

        Args:
            pause: waits a little, and sees who has ended.

        Raises:
            ConnectionError: node 0 does not answer.
        """
        if self.node.nnodes == 1:
            sights = self.look(time.monotonic())
            return self._decide(sights, suspects) if suspects(sights) else None
        begun, doubting = time.monotonic(), False
        while time.monotonic() < begun + _PEER_SECONDS + LOST_SECONDS:
            if fault := self.roll.fault() or self.tick():
                return fault
            if not doubting and time.monotonic() > begun + _PEER_SECONDS:
                if left := self.roll.left_early():
                    return left_early(left[1], left[2], left[0])
                self.roll.mark("doubt")
                doubting = True
            pause()
        return None

    def _preside(self, now: float) -> Fault | None:
        told, doubted = self.roll.beats(), self.roll.marked("doubt")
        for node_rank, text in enumerate(told):
            silent = now - self._since[node_rank]
            if text != self._told[node_rank]:
                self._told[node_rank], self._since[node_rank] = text, now
            elif silent > (_DOUBT_SECONDS if doubted else LOST_SECONDS):
                return self._lost(node_rank, silent)
        look_at_all = doubted or self._beats % _WARN_BEATS == 0
        if not look_at_all and not any(text.startswith(_OVERDUE) for text in told):  # to read them all takes its time
            return None
        sights = [sight for text in told for sight in _sights(text)]
        if look_at_all:
            self._warn(sights)
        if holding_up(sights):
            return self._decide(sights, holding_up)
        heard = now - min(self._since) < _WAITING_SECONDS
        return self._decide(sights, suspects) if doubted and heard and suspects(sights) else None

    def _warn(self, sights: Sequence[Sight]) -> None:
        """Of ranks that the others wait for in each step, once of each."""
        for sight, times in stragglers(sights, self._factor) if self._factor else ():
            if sight.rank not in self._slow:
                self._slow.add(sight.rank)
                what = f"its own part of a step takes {times:.1f} times the others', most of it {sight.mostly.words}"
                say(f"[{self.node.host}] warning: rank {sight.rank} ({sight.host}) holds the others up: {what}")
                self.folder.event("straggler", rank=sight.rank, host=sight.host, factor=round(times, 2), phase=sight.mostly.words)

    def _lost(self, node_rank: int, silent: float) -> Fault:
        host, ranks = self.hosts[node_rank], [sight.rank for sight in _sights(self._told[node_rank])]
        those = f" with rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
        cause = f"lost node {node_rank} ({host}){those}: no sign of life for {silent:.0f} s"
        return self.roll.report(Fault("C3", host, cause, GONE, ExitCode.NODE_LOST, node_rank=node_rank))

    def _decide(self, sights: Sequence[Sight], held: Callable[[Sequence[Sight]], list[Sight]]) -> Fault:
        """Have all nodes look closer, then name the rank at fault.

        Args:
            held: finds the ranks that hold the job up.
        """
        if self.node.nnodes > 1:
            self.roll.mark("inquest")
        found = {sight.rank: sight for sight in self._examine([s for s in sights if s.node_rank == self.node.node_rank])}
        if self.node.nnodes > 1:
            for text in self.roll.testimonies(_FINDING_SECONDS):
                found |= {sight.rank: sight for sight in _sights(text)}
        # what they are at is told by the findings, how far they were by what led here
        sights = [replace(s, finding=found[s.rank].finding) if s.rank in found else s for s in sights]
        return self.roll.report(verdict(sights, held(sights)))

    def _examine(self, sights: Sequence[Sight]) -> list[Sight]:
        alive = [running for running in self.ranks if not running.ended]
        for running in alive:
            running.vitals.ask()
        stacks = {running.rank.rank: collect(running.pid, running.vitals.stacks_fd) for running in alive}
        until = time.monotonic() + _RECORD_SECONDS
        while any(running.vitals.told is None for running in alive) and time.monotonic() < until:
            time.sleep(0.05)
        told = {running.rank.rank: running.vitals.told or {} for running in alive}
        examined = [replace(s, finding=_finding(stacks.get(s.rank, []), told.get(s.rank, {}))) for s in sights]
        self._keep("hang", examined, stacks)
        self._examined = True
        return examined

    def _keep(self, kind: str, sights: Sequence[Sight], stacks: dict[int, list[Stack]]) -> None:
        with suppress(OSError):  # a full disk must not hide what happened
            folder = self.folder.evidence(kind, self.roll.attempt)
            table = [{**asdict(sight), "phase": sight.phase.words, "mostly": sight.mostly.words} for sight in sights]
            (folder / f"node-{self.node.node_rank:04d}.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
            for rank, processes in stacks.items():
                text = "\n\n".join(stack.text() for stack in processes) + "\n"
                (folder / f"rank-{rank:04d}.{self.node.host}.txt").write_text(text, encoding="utf-8")


def _finding(processes: Sequence[Stack], knows: Mapping[str, Any]) -> Finding:
    if not processes:
        return Finding()
    own = processes[0]
    workers = [each for each in processes[1:] if each.loader_worker]
    told = (f"pid {each.pid} {_words(each)}" for each in workers if not each.idle or all(other.idle for other in workers))
    writer = "".join(f"pid {each.pid} {_words(each)}" for each in processes if each.writes and not each.idle)
    operation, error = _operation(knows.get("collectives", ())), knows.get("error", "")
    return Finding(own.place, own.waits, own.collective, own.loads, tuple(told), writer, operation, error)


def _operation(collectives: Sequence[Mapping[str, Any]]) -> str:
    if not collectives:
        return ""
    last = collectives[-1]
    sizes = ", ".join("x".join(map(str, size)) for size in last["sizes"])
    return f"{last['name']} {last['number']}{f' of {sizes}' if sizes else ''}, {'done' if last['done'] else 'not done'}"


def _words(stack: Stack) -> str:
    if stack.state == "Z":
        status = stack.status or 0
        return f"has ended with exit code {status}" if status >= 0 else f"was killed by signal {-status}"
    if stack.state in "TD":
        return f"is in state {stack.state}"
    return f"{stack.waits} in {stack.place}"


def _sights(text: str) -> list[Sight]:
    """What a node told of its ranks."""
    return [_sight(values) for values in json.loads(text.removeprefix(_OVERDUE))["ranks"]] if text else []


def _sight(values: dict[str, Any]) -> Sight:
    finding = Finding(**{**values["finding"], "workers": tuple(values["finding"]["workers"])})
    phases = {name: Phase(values[name]) for name in ("phase", "mostly")}
    return Sight(**{**values, **phases, "finding": finding})
