"""Whether ranks that failed are started again in the same allocation, and when that leads nowhere."""

from __future__ import annotations

from dataclasses import replace

from trainer.errors import ExitCode, Fault, FaultError

_WITHOUT_PROGRESS = 2
_WORTH_IT = (ExitCode.RANK_FAILED, ExitCode.RANK_KILLED, ExitCode.STALLED)


class Restarts:
    """Counts them. All nodes count alike, as all have the same fault; node 0 sees whether checkpoints have come since."""

    def __init__(self, most: int) -> None:
        self.most, self.done = most, 0
        self.trouble: FaultError | None = None  # for the next roll call, where all hear of it
        self._newest: int | None = None
        self._idle = 0  # restarts in a row that led to no newer checkpoint

    def wanted(self, fault: Fault, checkpoints: bool, newest: int | None) -> bool:
        """Whether to start again.

        Args:
            checkpoints: they can be seen from here; not those of a script of the user's.
            newest: step of the newest one.
        """
        if self.done >= self.most or fault.exit_code not in _WORTH_IT:
            return False
        self._idle = self._idle + 1 if checkpoints and self.done and newest == self._newest else 0
        self._newest, self.done = newest, self.done + 1
        if self._idle >= _WITHOUT_PROGRESS:
            cause = f"no new checkpoint in {self._idle} restarts, last: {fault.cause}"
            self.trouble = FaultError(replace(fault, code="D10", cause=cause))
        return True
