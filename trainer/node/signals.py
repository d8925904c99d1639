"""The stop signals of a node process, and a sleep that they end at once."""

from __future__ import annotations

import os
import selectors
import signal
import time
from contextlib import suppress
from pathlib import Path

from trainer.process import STOP_SIGNALS


class Signals:
    """Catches the stop signals and the ends of children; wakes the watch at once."""

    def __init__(self, health_file: str | None = None) -> None:
        """
        Args:
            health_file: touched whenever there is waiting, so that its age tells a process that lives from one that hangs.
        """
        self.waiting: list[signal.Signals] = []
        self._health_file, self._touched = health_file, 0.0
        self.reader, writer = os.pipe()
        for end in (self.reader, writer):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, lambda caught, frame: self.waiting.append(signal.Signals(caught)))
        signal.signal(signal.SIGCHLD, lambda caught, frame: None)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self.reader, selectors.EVENT_READ)

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than to the next signal."""
        if self._health_file and time.monotonic() > self._touched + 1:
            self._touched = time.monotonic()
            with suppress(OSError):
                Path(self._health_file).touch()
        if self._selector.select(seconds):
            with suppress(BlockingIOError):
                os.read(self.reader, 4096)
