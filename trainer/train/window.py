"""What the steps since the last report add up to, without a step waiting for it."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch

from trainer.train.distributed import World


class Window:
    """Losses and hits since the last report. A step only keeps references; sums are made some steps at a time, on the device."""

    _HELD, _NUMBERS = 64, 1 << 18  # batches that are kept at most, and numbers in their outputs

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._open()

    def _open(self) -> None:
        self.samples, self.classified, self.started = 0, True, time.monotonic()
        self._room = self._NUMBERS
        self._held: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._sums: list[torch.Tensor] = []  # each (loss, hits), float64 where the device has it

    def add(self, loss: torch.Tensor, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Take in one batch: its mean loss, and its hits where outputs (N, C) and targets (N,) are a classification.

        Loss and outputs are kept for some steps; they must not bring a graph along.
        """
        self._held.append((loss, outputs, targets))
        self.samples += len(targets)
        self._room -= outputs.numel()
        if self._room <= 0 or len(self._held) >= self._HELD:
            self._sum_up()

    def _sum_up(self) -> None:
        self._room = self._NUMBERS
        self.classified = self.classified and all(_classification(outputs, targets) for _, outputs, targets in self._held)
        for size, group in itertools.groupby(self._held, key=lambda held: len(held[2])):
            losses, outputs, targets = zip(*group, strict=True)
            loss = torch.stack(losses).sum(dtype=self._dtype) * size
            hits = (torch.cat(outputs).argmax(1) == torch.cat(targets)).sum() if self.classified else torch.zeros_like(loss)
            self._sums.append(torch.stack([loss, hits.to(self._dtype)]).to(self.device))
        self._held.clear()

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float32 if self.device.type == "mps" else torch.float64

    def _total(self) -> torch.Tensor:
        self._sum_up()
        return torch.stack(self._sums).sum(0).cpu() if self._sums else torch.zeros(2, dtype=self._dtype)

    def close(self, world: World) -> dict[str, float]:
        """Mean loss, accuracy and samples per second over all ranks since the window opened; opens the next."""
        loss, hits = self._total().tolist()
        seconds = time.monotonic() - self.started
        loss, hits, samples = world.sum_numbers(loss, hits, self.samples)
        values = {"loss": loss / max(1.0, samples)}
        if self.classified:
            values["accuracy"] = hits / max(1.0, samples)
        values["samples"] = int(samples)
        values["samples_per_second"] = round(samples / max(seconds, 1e-9), 1)
        self._open()
        return values

    def state(self) -> dict[str, Any]:
        """The sums so far, as tensors and plain types."""
        return {"sums": self._total(), "samples": self.samples}

    def load(self, *states: dict[str, Any]) -> None:
        """Start from the sums of one rank, or of several added up."""
        self._sums = [state["sums"].to(self.device) for state in states]
        self.samples = sum(state["samples"] for state in states)


def _classification(outputs: torch.Tensor, targets: torch.Tensor) -> bool:
    """Whether outputs are (N, C) and targets classes (N,)."""
    return outputs.ndim == 2 and outputs.shape[1] > 1 and targets.ndim == 1 and not targets.is_floating_point()
