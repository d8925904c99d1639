"""The training loop: global batches, accumulation, exact evaluation, and a state that can be saved and put back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from trainer.errors import ConfigError
from trainer.pulse import Phase, Pulse
from trainer.train.agree import Finite, all_used
from trainer.train.batches import Loading, batches
from trainer.train.distributed import World
from trainer.train.exchange import ExchangeOptions
from trainer.train.exchange import exchange as make_exchange
from trainer.train.optim import LearningRate, MovingAverage, clip, load_optimizer
from trainer.train.timing import TimeSplit
from trainer.train.window import Window

logger = logging.getLogger(__name__)

_AS_IT_IS = nullcontext()
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class StepOptions:
    """How one optimizer step is done."""

    accumulation: int = 1  # micro-batches of each rank in a step
    precision: str = "fp32"  # fp32 | bf16 | fp16
    grad_clip_norm: float | None = None
    channels_last: bool = False
    skip_non_finite: bool = False  # leave a step out whose loss or gradients are not finite, instead of ending the run


class Loop:
    """One rank's part of the training: wraps the model, takes optimizer steps, keeps what a checkpoint needs.

    Args:
        model: the bare module, on its device or devices already.
        optimizer: made over this model's parameters.
        rate: the learning rate by optimizer steps.
        world: this rank among all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction,
        optimizer: torch.optim.Optimizer,
        rate: LearningRate,
        world: World,
        options: StepOptions,
        average: MovingAverage | None = None,
        exchange: ExchangeOptions | None = None,
    ) -> None:
        self.bare, self.loss, self.optimizer, self.rate = model, loss, optimizer, rate
        self.world, self.options, self.average = world, options, average
        self.exchange = make_exchange(model, world, exchange or ExchangeOptions())
        self.model = self.exchange.model
        self._all_used = not world.grouped or self.exchange.finds_unused  # whether all parameters have got a gradient
        self.step = 0  # optimizer steps done; global sample position = step * batch_size
        self.updates = 0  # steps that changed the weights: fp16 skips one when gradients overflow, and the schedule waits
        kind = PRECISIONS[options.precision]
        self._autocast = torch.autocast(world.device.type, dtype=kind) if kind else None
        self._scaler = torch.amp.GradScaler(world.device.type) if options.precision == "fp16" else None
        self._parameters = list(model.parameters())
        self.before_update: Callable[[], None] = lambda: None  # called before the weights change, in a step or for an evaluation
        self.finite = Finite(world, options.skip_non_finite)
        self.pulse = Pulse()  # where this rank is, for whoever watches
        self.split = TimeSplit(world.device)
        self._window = Window(world.device)
        self._memory_format = torch.channels_last if options.channels_last else torch.preserve_format
        self._moves = world.device.type != "cpu" or len(world.devices) > 1 or options.channels_last

    @property
    def states(self) -> list[dict[str, Any]]:
        """The tensors that a checkpoint holds from the start: weights, and their average if there is one."""
        return [self.bare.state_dict(), *([self.average.average] if self.average else [])]

    def take_step(self, micro_batches: Iterator[Any]) -> None:
        """One optimizer step over `accumulation` micro-batches: gradients are exchanged in the last one only."""
        self.rate.set(self.updates)
        self.split.begin(self.step)
        last, taken = self.options.accumulation - 1, []
        for micro in range(self.options.accumulation):
            self.pulse.enter(Phase.DATA)
            since = time.perf_counter()
            batch = next(micro_batches)
            self.split.waited(time.perf_counter() - since)
            self.pulse.enter(Phase.FORWARD)
            with self.exchange.accumulating if micro < last else _AS_IT_IS:
                loss, outputs, targets = self._forward(self.model, batch)
                self.split.ended("forward")
                self.pulse.enter(Phase.BACKWARD)
                self._backward(loss if not last else loss / (last + 1))
            taken.append((loss.detach(), outputs.detach(), targets))
        self.exchange.finish()
        self.split.ended("exchange")
        self.pulse.enter(Phase.OPTIMIZER)
        if self._update_weights([loss for loss, _, _ in taken]):
            for each in taken:
                self._window.add(*each)
        self.split.end()
        self.step += 1
        self.pulse.stepped(self.step)

    def _forward(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean loss, outputs and targets of one batch. Targets go where the outputs are: a split model ends on another device."""
        inputs, targets = batch
        if self._moves:
            inputs = inputs.to(self.world.device, memory_format=self._memory_format, non_blocking=True)
            self.split.ended("to_device")
        if self._autocast is None:
            outputs = model(inputs)
            targets = targets.to(outputs.device, non_blocking=True) if self._moves else targets
            return self.loss(outputs, targets), outputs, targets
        with self._autocast:
            outputs = model(inputs)
            targets = targets.to(outputs.device, non_blocking=True)
            return self.loss(outputs, targets), outputs, targets

    def _backward(self, loss: torch.Tensor) -> None:
        seed = None if self._scaler else self.finite.seed(loss)
        self.split.split_backward(loss)
        (self._scaler.scale(loss) if self._scaler else loss).backward(seed)  # type: ignore[no-untyped-call]

    def _update_weights(self, losses: Sequence[torch.Tensor]) -> bool:
        """Returns whether the step counts: not if its numbers were not finite and it was left out.

        Args:
            losses: this rank's in this step.
        """
        self.before_update()
        self._all_used = self._all_used or all_used(self.bare, self.world)
        if self._scaler is None and not self.finite.allows(self.step, self.exchange.gradients, losses):
            self.exchange.forget()
            return False
        norm = self.options.grad_clip_norm
        if self._scaler is None:
            if norm is not None:
                clip(self._parameters, norm)
            self.optimizer.step()
            applied = True
        else:
            if norm is not None:
                self._scaler.unscale_(self.optimizer)
                clip(self._parameters, norm)
            before = self._scaler.get_scale()
            self._scaler.step(self.optimizer)
            self._scaler.update()
            applied = self._scaler.get_scale() >= before  # a smaller scale is the sign of a skipped step
            self.finite.scaled(applied, self.step, losses)
        self.exchange.forget()
        if applied:
            self.updates += 1
            if self.average is not None:
                self.average.update(self.bare)
        return True

    def training_values(self) -> dict[str, float]:
        """Loss and accuracy over the steps since the last call, over all ranks, and the rate. Every rank must call it."""
        return {**self._window.close(self.world), "lr": self.rate.current}

    @torch.no_grad()
    def evaluate(self, dataset: Dataset[Any], batch_size: int, loading: Loading | None = None, seed: int = 0) -> dict[str, float]:
        """Loss and accuracy over a dataset, exactly: each sample counted once, sums and counts added up over the ranks.

        Runs the bare module, so that ranks may have different numbers of batches. Every rank must call it.
        """
        self.pulse.enter(Phase.EVALUATION)
        self.before_update()  # the average is swapped in, and loader workers are forked: nothing else may be under way
        self._share_buffers()
        mine = torch.arange(self.world.rank, len(dataset), self.world.world_size)  # type: ignore[arg-type]
        chosen = ((0, indices) for indices in torch.split(mine, batch_size) if len(indices))
        window = Window(self.world.device)
        self._swap_average()
        self.bare.eval()
        try:
            for batch in batches(dataset, chosen, seed, loading or Loading()):
                window.add(*self._forward(self.bare, batch))
                self.pulse.stay(Phase.EVALUATION)
        finally:
            self.bare.train()
            self._swap_average()
        return {f"eval_{name}": value for name, value in window.close(self.world).items()}

    def _swap_average(self) -> None:
        if self.average is not None:
            self.average.swap(self.bare)

    def _share_buffers(self) -> None:
        """Give all ranks rank 0's buffers (BatchNorm statistics), so that what is evaluated is what is saved."""
        if self.world.world_size > 1 and any(True for _ in self.bare.buffers()):
            for buffer in self.bare.buffers():
                torch.distributed.broadcast(buffer, src=0)

    def state(self) -> dict[str, Any]:
        """What is equal on all ranks, as it is: tensors are the loop's own until the next `before_update`; buffers, which a
        forward pass changes, are copies. Every rank must call it."""
        self._share_buffers()
        buffers = {name for name, _ in self.bare.named_buffers(remove_duplicate=False)}
        return {
            "updates": self.updates,
            "model": {name: v.clone() if name in buffers else v for name, v in self.bare.state_dict().items()},
            "average": self.average.average if self.average else None,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self._scaler.state_dict() if self._scaler else None,
        }

    def own_state(self) -> dict[str, Any]:
        """What differs between ranks, besides random state: the open metrics window."""
        return {"window": self._window.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Put back what `state` and `own_state` returned, at this or another world size.

        Raises:
            ConfigError: the checkpoint is of another model or optimizer.
        """
        try:
            self.bare.load_state_dict(state["model"])
            load_optimizer(self.optimizer, state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            text = f"model: the checkpoint is of another model or optimizer ({' '.join(str(error).split())})"
            raise ConfigError(f"{text}; use the config it was made with, or a new run") from None
        if self.average is not None:
            for name, value in (state["average"] or state["model"]).items():
                self.average.average[name].copy_(value)
        if self._scaler is not None and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])
        self.step, self.updates = state["step"], state["updates"]
        ranks = state["ranks"]
        if len(ranks) == self.world.world_size:
            self._window.load(ranks[self.world.rank]["window"])
        elif self.world.rank == 0:
            self._window.load(*(own["window"] for own in ranks))
