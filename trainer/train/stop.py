"""A stop request that all ranks obey at the same step, whichever of them it reached: a signal, a file, or the end of the time."""

from __future__ import annotations

import logging
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from trainer.process import STOP_SIGNALS, leave_at_once
from trainer.train.distributed import World

logger = logging.getLogger(__name__)

_EVERY_SECONDS = 0.5  # how often ranks ask each other
_EVERY_STEPS = 64  # and at most so many steps apart, however short they are
_SPARE_SECONDS = 30.0  # besides twice what a save has been seen to take


class StopSignal:
    """Catches the stop signals inside a `with` block and tells, at step boundaries, whether any rank is to stop.

    A signal only sets a flag: a save in progress is never cut short, and a second signal (Slurm sends several) changes nothing.
    Asking costs one collective on two numbers, so ranks ask about twice a second and not at each step; when to ask next follows
    from numbers that are equal on all ranks.
    """

    def __init__(
        self,
        world: World,
        file: Path | None = None,
        end: float = math.inf,
        save_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """
        Args:
            file: rank 0 stops where there is such a file.
            end: when the run is ended from outside, in s since the epoch.
            save_seconds: how long a save has been seen to take.
        """
        self.world, self.file, self.end, self.save_seconds = world, file, end, save_seconds
        self.caught: signal.Signals | None = None
        self._next = 0
        self._asked = (0, time.monotonic())
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignal:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def earned(self, code: int) -> None:
        """All is done and saved: a signal after the block changes nothing either; it ends the process at once, with this code."""
        self._before = dict.fromkeys(STOP_SIGNALS, leave_at_once(code))

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if self.caught is None:
            self.caught = signal.Signals(number)

    @property
    def reason(self) -> str | None:
        """Why this rank is to stop, or None."""
        if self.caught:
            return self.caught.name
        if self.file and self.world.rank == 0 and self.file.exists():
            return f"the file {self.file}"
        left = self.end - time.time()
        return "the end of its time" if left < _SPARE_SECONDS + 2 * self.save_seconds() else None

    def agreed(self, step: int) -> bool:
        """Whether to save and stop after `step` optimizer steps. Every rank must ask at every step."""
        now = time.monotonic()
        asked_step, asked_time = self._asked
        if self.world.world_size == 1:
            if self.caught is None and now < asked_time + _EVERY_SECONDS:
                return False
            self._asked = (step, now)
            return self.reason is not None
        if step < self._next:
            return False
        seconds = (now - asked_time) / max(1, step - asked_step)
        stop, seconds = self.world.largest_numbers(self.reason is not None, seconds)
        self._next = step + max(1, min(_EVERY_STEPS, int(_EVERY_SECONDS / max(seconds, 1e-9))))
        self._asked = (step, now)
        return bool(stop)
