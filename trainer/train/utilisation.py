"""Model FLOP utilisation: how much of the arithmetic that a rank's devices could do at their peak the model's steps are."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from trainer.train.distributed import World

# Name -> dense TFLOP/s in bf16 and fp16 by tensor cores (None: it has none for it) and in fp32 without them, by NVIDIA's data
# sheets; the first that fits.
_PRECISIONS = ("bf16", "fp16", "fp32")
_PEAKS = {
    "B200": (2250, 2250, 75),
    "H100 PCIe": (756, 756, 51),
    "H100 80GB HBM3|H200|GH200": (989, 989, 67),
    "A100": (312, 312, 19.5),
    "L40S": (362, 362, 91.6),
    "L4": (121, 121, 30.3),
    "A10": (125, 125, 31.2),
    "V100": (None, 125, 15.7),
    "T4": (None, 65, 8.1),
}


def peak_tflops(device: str, precision: str) -> float | None:
    """TFLOP/s of a GPU by the name that torch tells; None for one that is not known.

    Args:
        precision: fp32 | bf16 | fp16.
    """
    found = next((peaks for name, peaks in _PEAKS.items() if re.search(rf"\b({name})\b", device)), None)
    return found[_PRECISIONS.index(precision)] if found else None


class Utilisation:
    """Counts the floating-point operations of one step, forward and backward, and relates all others to it. What a model computes
    twice to save memory counts twice."""

    def __init__(self, world: World, precision: str, tflops: float | None = None) -> None:
        """
        Args:
            tflops: the peak of each of the rank's devices, where it is not known by its name.
        """
        if tflops is None and world.device.type == "cuda":
            tflops = peak_tflops(torch.cuda.get_device_name(world.device), precision)
        self._peak = (tflops or 0.0) * 1e12 * len(world.devices)
        self.pending = self._peak > 0  # the next step is to be counted
        self._operations = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Around one step of this rank."""
        self.pending = False
        with importlib.import_module("torch.utils.flop_counter").FlopCounterMode(display=False) as counter:
            yield
        self._operations = counter.get_total_flops()

    def of(self, steps_per_second: float) -> dict[str, float]:
        """`mfu`, between 0 and 1; empty where it cannot be told."""
        return {"mfu": round(self._operations * steps_per_second / self._peak, 4)} if self._operations else {}
