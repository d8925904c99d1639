"""The random number generators of a rank (Python, numpy, torch, its GPUs): seed them, keep them, put them back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def seed_cpu(seed: int) -> None:
    """Seed the generators that a dataset draws from; cheaper than `seed_all`, as it leaves the GPUs alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)


def seed_all(seed: int) -> None:
    """Seed Python, numpy and torch; seed < 2**32."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def random_state() -> dict[str, Any]:
    """The state of this rank's random number generators (Python, numpy, torch, this rank's GPUs) as tensors and plain types."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = numpy.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, torch.from_numpy(numpy.asarray(keys).astype("int64")), *rest],
        "torch": torch.get_rng_state(),
        "cuda": _gpu_states(),
    }


def _gpu_states() -> list[torch.Tensor]:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [state.cpu() for state in torch.cuda.get_rng_state_all()] if used else []


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype("uint32"), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Whatever is drawn inside leaves the CPU's generators as they were."""
    kept = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    yield
    torch.set_rng_state(kept[0])
    random.setstate(kept[1])
    numpy.random.set_state(kept[2])
