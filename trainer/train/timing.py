"""Where the time of steps goes: shares of it, sampled, and a trace of some steps in all detail."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PARTS = ("data", "to_device", "forward", "backward", "exchange", "optimizer")
BETWEEN = ("save", "evaluation")


class TimeSplit:
    """The time since the last report, by what it was spent on.

    How long the next batch, a save or an evaluation is waited for is always measured; the parts of a step are in one step of
    `every`, as a GPU has to be waited for at the end of each part.
    """

    def __init__(self, device: torch.device, every: int = 0) -> None:
        """
        Args:
            every: one step in so many is sampled; 0: none.
        """
        self._waits, self._every = device.type == "cuda", every
        self.sampling, self._last = False, 0.0
        self._open()

    def _open(self) -> None:
        self._started, self._steps, self._sampled = time.perf_counter(), 0, 0
        self._spent = dict.fromkeys((*PARTS, *BETWEEN), 0.0)

    def begin(self, step: int) -> None:
        """A step begins."""
        self._steps += 1
        self.sampling = self._every > 0 and step % self._every == 0
        self._sampled += self.sampling

    def waited(self, seconds: float) -> None:
        """For the next batch."""
        self._spent["data"] += seconds
        if self.sampling:
            self._wait()
            self._last = time.perf_counter()

    def ended(self, part: str) -> None:
        """The time since the last part of this step, if it is a sampled one, was spent on `part`."""
        if self.sampling:
            self._wait()
            now = time.perf_counter()
            self._spent[part] += now - self._last
            self._last = now

    def end(self) -> None:
        """The step ends with its optimizer's part."""
        self.ended("optimizer")
        self.sampling = False

    def split_backward(self, loss: torch.Tensor) -> None:
        """Before the backward pass of `loss`: tell what it computes from the exchange that is waited for at its end."""
        if self.sampling:
            loss.register_hook(self._in_backward)  # type: ignore[no-untyped-call]

    def _in_backward(self, gradient: torch.Tensor) -> None:
        # Callbacks run in the order of their coming once all gradients are there; DDP, which waits in one, comes later.
        torch.autograd.Variable._execution_engine.queue_callback(lambda: self.ended("backward"))

    @contextmanager
    def spent_on(self, part: str) -> Iterator[None]:
        """All of it, between steps."""
        since = time.perf_counter()
        yield
        self._spent[part] += time.perf_counter() - since

    def close(self) -> dict[str, float]:
        """The shares since the last call, of all the time: `share_data` and so on, and `share_rest`; empty if none is known."""
        elapsed, spent, steps = time.perf_counter() - self._started, self._spent, self._steps
        scale = steps / self._sampled if self._sampled else 0.0
        self._open()
        if not scale:
            return {}
        seconds = {name: value * scale if name in PARTS[1:] else value for name, value in spent.items()}
        total = max(elapsed, sum(seconds.values()))
        shares = {f"share_{name}": round(value / total, 4) for name, value in seconds.items()}
        return {**shares, "share_rest": round(max(0.0, 1 - sum(shares.values())), 4)}

    def _wait(self) -> None:
        if self._waits:
            torch.cuda.synchronize()


class Trace:
    """A window of steps that torch's profiler records: RUN/profile/rank-0000.json, for chrome://tracing or Perfetto."""

    def __init__(self, start_step: int | None, steps: int, file: Path) -> None:
        """
        Args:
            start_step: optimizer steps done before the first that is recorded; None: none is.
        """
        self.steps, self.file = steps, file
        self._first = -1 if start_step is None else start_step
        self._profile: Any = None

    def at(self, step: int) -> bool:
        """Before the step that follows `step` steps, and after the last one; returns whether a trace has been written."""
        if step == self._first:
            self._start()
        elif self._profile and step >= self._first + self.steps:
            return self.stop()
        return False

    def _start(self) -> None:
        profiler = importlib.import_module("torch.profiler")
        kinds = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profiler.profile(activities=kinds, record_shapes=True)
        self._profile.start()

    def stop(self) -> bool:
        """Write what was recorded, if there is anything."""
        if not self._profile:
            return False
        self._profile.stop()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:  # torch writes the path into the JSON as it is, quotes and all
            made = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(made))
            shutil.move(made, self.file)
        self._profile = None
        return True
