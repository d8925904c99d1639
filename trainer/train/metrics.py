"""Metrics are data: JSON lines always, TensorBoard on request; and a progress bar or a tidy line for whoever watches."""

from __future__ import annotations

import importlib
import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

logger = logging.getLogger(__name__)

tqdm.monitor_interval = 0  # no thread of its own, beside which loader workers would be forked; also for downloads

_SHOWN = {"samples_per_second": "images/s"}
_WAITS, _WORTH_A_WORD = ("data", "to_device", "exchange", "save"), 0.1  # shares of the time
_BAR_SECONDS = 0.2  # how often the bar is redrawn at most


class Metrics:
    """Writes RUN/metrics.jsonl, one object a line, each with `kind` (train or eval), `step` and `epoch`."""

    def __init__(self, folder: Path, from_step: int = 0, tensorboard: bool = False) -> None:
        """Open the file, dropping records of steps after `from_step`: they are from work that was lost and is done again."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _keep_until(path, from_step)
        self._file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 (closed in close)
        self._board: Any = None
        if tensorboard:
            writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
            self._board = writer(str(folder / "tensorboard"), purge_step=from_step + 1)

    def close(self) -> None:
        """Flush and close."""
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, kind: str, step: int, **values: float) -> None:
        """Write one record; `step` counts optimizer steps."""
        record = {"kind": kind, "step": step, **values, "time": round(time.time(), 3)}
        self._file.write(json.dumps(record) + "\n")
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{kind}/{name}", value, step)


def _keep_until(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(f"{line}\n")  # a kill may have cut off no more than the end of the line
        except (ValueError, TypeError, KeyError):  # cut off by a kill, or damaged
            logger.warning("%s: dropped a line that is no record: %.80s", path, line.strip())
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


class Progress:
    """A bar on a terminal; elsewhere a log line for each record."""

    def __init__(self, done: int, total: int, terminal: int | None) -> None:
        """
        Args:
            done: optimizer steps done before this start.
            total: optimizer steps of the run.
            terminal: a file descriptor that is a terminal, or None.
        """
        self._bar: tqdm[Any] | None = None
        self._started, self._first, self.total = time.monotonic(), done, total
        if terminal is not None:
            self._stream = os.fdopen(os.dup(terminal), "w")
            options: dict[str, Any] = {"unit": "step", "mininterval": _BAR_SECONDS, "file": self._stream}
            wide = os.get_terminal_size(terminal).columns > 0  # some terminals do not know their size
            options |= {"dynamic_ncols": True} if wide else {"ncols": 120}
            self._bar = tqdm(initial=done, total=total, **options)

    def show(self, step: int, epoch: int, epochs: int, values: dict[str, float]) -> None:
        """Show where the run is after `step` optimizer steps."""
        if self._bar is None and not logger.isEnabledFor(logging.INFO):
            return
        shown = {name: value for name, value in values.items() if name != "samples" and not name.startswith("share_")}
        text = " ".join([*(f"{_SHOWN.get(name, name)} {_number(value)}" for name, value in shown.items()), *_bound(values)])
        if self._bar is not None:
            self._bar.set_description(f"epoch {epoch}/{epochs}", refresh=False)
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)
            return
        left = (time.monotonic() - self._started) / max(1, step - self._first) * (self.total - step)
        logger.info("epoch %d/%d step %d/%d %s ETA %s", epoch, epochs, step, self.total, text, _clock(left))

    def say(self, text: str) -> None:
        """A line that stays, above the bar."""
        if self._bar is not None:
            self._bar.clear()
        logger.info(text)
        if self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it is and end its line."""
        if self._bar is not None:
            self._bar.close()
            self._stream.close()


def _bound(values: Mapping[str, float]) -> list[str]:
    """What steps wait for most, if that is worth a word."""
    shares = {name: values.get(f"share_{name}", 0.0) for name in _WAITS}
    most = max(shares, key=lambda name: shares[name])
    return [f"{most}-bound {shares[most]:.0%}"] if shares[most] >= _WORTH_A_WORD else []


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _clock(seconds: float) -> str:
    return str(tqdm.format_interval(max(0.0, seconds)))
