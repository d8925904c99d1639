"""What a node process sees of one rank while it lives: its pulse, how long it has been at what it does, and how long it may."""

from __future__ import annotations

import math
import mmap
import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from trainer.process import memory_file
from trainer.pulse import ASKING, PULSE, SIZE, Beat, Phase, answer, ask, leaving, read

STACKS = "TRAINER_STACKS_FD"  # where a rank and its loader workers write their stacks when asked to
_STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.BETWEEN)
_OWN = (Phase.DATA, Phase.FORWARD, Phase.OPTIMIZER)
_LOOKS = 150  # half a minute
_SLOWEST_TIMES, _LEAST_SECONDS = 20, 120.0  # what is learned: a step may take so many times the slowest before it, but so long
_QUIET_SECONDS = 60.0  # for a rank that was stopped by a signal, or is on its way out
_SCRIPT_SECONDS = 600.0  # for a script that says nothing and is seen by its collectives only: an evaluation may have none


@dataclass(frozen=True)
class Limits:
    """How long a rank may show no progress."""

    stall_seconds: float | None = None  # in a step; None: learned
    phase_seconds: float = 1800.0  # in its start, its first step, a save, the first batch of its evaluations


class Vitals:
    """Made before the rank is started, which inherits both descriptors."""

    def __init__(self, limits: Limits, world_size: int, now: float) -> None:
        """
        Args:
            now: by time.monotonic(), here and below.
        """
        self.pulse_fd, self.stacks_fd = memory_file("pulse"), memory_file("stacks")
        os.ftruncate(self.pulse_fd, SIZE)
        self._memory = mmap.mmap(self.pulse_fd, SIZE)
        self.limits, self.world_size = limits, world_size
        self.beat, self.since = Beat(), now  # the last progress
        self._step_since, self._slowest = now, 0.0
        self._slowest_evaluated = 0.0  # batch
        self._looks: Counter[Phase] = Counter()
        self._stopped: float | None = None  # since when, by a signal

    @property
    def fds(self) -> tuple[int, int]:
        """What the rank must inherit."""
        return self.pulse_fd, self.stacks_fd

    @property
    def environ(self) -> dict[str, str]:
        """How the rank finds them."""
        return {PULSE: str(self.pulse_fd), STACKS: str(self.stacks_fd)}

    def ask(self) -> None:
        """Have the rank tell what it knows."""
        ask(self._memory)

    @property
    def told(self) -> dict[str, Any] | None:
        """Its last collectives and the error it has in hand; None if it has not yet, as where a thread keeps Python's lock."""
        return answer(self._memory)

    @property
    def leaving(self) -> bool:
        """It has failed, left its reason, and only has to end."""
        return leaving(self._memory)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
        for fd in self.fds:
            os.close(fd)

    def look(self, now: float, state: str, excused: bool = False) -> Beat:
        """Read the pulse.

        Args:
            state: the kernel's letter for the process.
            excused: no progress was to be expected, as this node was stopped itself.
        """
        beat, before = read(self._memory), self.beat
        excused = excused or state == "t"  # by a debugger
        self._stopped = (self._stopped or now) if state == "T" and not excused else None
        if excused or beat.progress != before.progress or (beat.sequence != before.sequence and beat.phase not in ASKING):
            if before.phase == beat.phase == Phase.EVALUATION and not excused:
                self._slowest_evaluated = max(self._slowest_evaluated, now - self.since)
            self.since = now
        if beat.done != before.done:
            if before.done and not excused:  # the first step compiles, and fills caches
                self._slowest = max(self._slowest, (now - self._step_since) / (beat.done - before.done))
            self._step_since = now
        if excused or before.phase not in _STEP or beat.phase not in _STEP:
            self._step_since = now  # an evaluation or a save is no part of a step
        self.beat = beat
        self._count(beat.phase)
        return beat

    def _count(self, phase: Phase) -> None:
        """Where its steps go, sampled."""
        if phase in _STEP:
            self._looks[phase] += 1
            if sum(self._looks.values()) > _LOOKS:  # what was long ago counts less and less
                self._looks = Counter({phase: count // 2 for phase, count in self._looks.items()})

    @property
    def busy(self) -> tuple[float, Phase] | None:
        """The share of its steps that this rank spends on its own part (data, forward, optimizer), and on what most; None as long
        as too little is known. In the rest it waits for others, at least in part."""
        total = sum(self._looks.values())
        if total < _LOOKS // 2:
            return None
        own = {phase: self._looks[phase] / total for phase in _OWN}
        return sum(own.values()), max(own, key=lambda phase: own[phase])

    def age(self, now: float) -> float:
        """Seconds since the last progress."""
        return now - self.since

    def left(self, now: float) -> float:
        """Seconds that it may go on like this; below 0 it is overdue."""
        if self._stopped:
            return (self.limits.stall_seconds or _QUIET_SECONDS) - (now - self._stopped)
        return self._limit - self.age(now)

    @property
    def _limit(self) -> float:
        beat, set_by_user = self.beat, self.limits.stall_seconds
        if beat.phase in (Phase.TEARDOWN, Phase.DONE):
            return set_by_user or _QUIET_SECONDS
        if beat.phase in (Phase.START, Phase.SCRIPT):
            if beat.done or (beat.sequence and self.world_size > 1):  # a script of the user's
                return set_by_user or _SCRIPT_SECONDS
            return self.limits.phase_seconds if self.world_size > 1 else math.inf
        if beat.phase == Phase.EVALUATION and self._slowest_evaluated:
            return max(_LEAST_SECONDS, _SLOWEST_TIMES * self._slowest_evaluated)
        if beat.phase not in _STEP or not beat.done:
            return self.limits.phase_seconds
        return set_by_user or max(_LEAST_SECONDS, _SLOWEST_TIMES * self._slowest)
