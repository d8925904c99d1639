"""What moves the weights: the learning-rate schedule, its scaling with the batch size, and the moving average."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def fused(function: Callable[..., Any], args: Mapping[str, Any], model: nn.Module) -> dict[str, bool]:
    """What makes one of torch's own optimizers update all parameters at once: an argument for it, or none where it cannot or the
    user has chosen another way.

    Args:
        function: the optimizer's class.
        args: the user's arguments for it.
    """
    known = getattr(function, "__module__", "").startswith("torch.optim.") and "fused" in inspect.signature(function).parameters
    chosen = any(name in args for name in ("fused", "foreach", "capturable", "differentiable"))
    plain = all(p.is_floating_point() and p.is_contiguous() and p.device.type in ("cpu", "cuda") for p in model.parameters())
    sparse = any(getattr(module, "sparse", False) for module in model.modules())
    return {"fused": True} if known and plain and not chosen and not sparse else {}


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a pure function of the optimizer steps taken, so that a resume needs no state of its own."""

    total_steps: int
    warmup_steps: int = 0
    decay: str = "cosine"  # cosine | linear | constant
    final_fraction: float = 0.0

    def factor(self, step: int) -> float:
        """What the full rate is multiplied with for the step after `step` steps: rises to 1 over the warm-up, then decays."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        fall = 0.5 * (1 + math.cos(math.pi * progress)) if self.decay == "cosine" else 1 - progress
        return self.final_fraction + (1 - self.final_fraction) * fall


class LearningRate:
    """Sets every parameter group's rate from a schedule; a group keeps its own full rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, schedule: Schedule, scale: float = 1.0) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self.full = [group["lr"] * scale for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        """Set the rates for the optimizer step that follows `step` steps."""
        factor = self.schedule.factor(step)
        # Asked for anew each time: an optimizer that loads a state gets new groups.
        for group, full in zip(self.optimizer.param_groups, self.full, strict=True):
            group["lr"] = full * factor

    @property
    def current(self) -> float:
        """The first group's rate now."""
        return float(self.optimizer.param_groups[0]["lr"])


class MovingAverage:
    """An exponential moving average of a model's weights (and a plain copy of its buffers)."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.average = {name: value.detach().clone() for name, value in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take one optimizer step's weights in."""
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                self.average[name].lerp_(value, 1 - self.decay)
            else:
                self.average[name].copy_(value)

    def swap(self, model: nn.Module) -> None:
        """Exchange the model's weights and the average's; a second call puts them back."""
        for name, value in model.state_dict().items():
            kept = value.clone()
            value.copy_(self.average[name])
            self.average[name] = kept


def clip(parameters: Iterable[nn.Parameter], norm: float) -> None:
    """Scale gradients down so that their global L2 norm is at most `norm`; parts may lie on several devices."""
    nn.utils.clip_grad_norm_(parameters, norm)


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load moments and the like, but keep the settings of the config: a state brings those of its own run along.

    Raises:
        ValueError: it is of another kind of optimizer.
    """
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for group, mine in zip(state["param_groups"], settings, strict=False):
        if group.keys() - {"params"} != mine.keys():
            raise ValueError(f"it has the settings {', '.join(sorted(group.keys() - {'params'}))}, not {', '.join(sorted(mine))}")
    optimizer.load_state_dict(state)
    for group, mine in zip(optimizer.param_groups, settings, strict=True):
        group.update(mine)
