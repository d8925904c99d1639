"""What ranks must agree on while they train: that numbers are finite, and that all have the same parameters."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import nn

from trainer.errors import ExitCode, Fault, FaultError
from trainer.train.distributed import World

logger = logging.getLogger(__name__)

_MOST_IN_A_ROW = 10  # steps that are left out; then the weights are what is wrong
_MOST_OVERFLOWS = 50  # of half precision: a scale that starts at 2^16 has come down to nothing by then
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_EXACT = 1 << 52  # integers below it survive as float64
_WIDE = {torch.float16: torch.float32}  # sums of it would soon be too large
_SHOWN_SAMPLES = 8
_SHOWN_NAMES = 3


class Finite:
    """Keeps a step whose loss or gradients are not finite from the weights, on all ranks or on none.

    A loss that is not finite makes its rank's gradients so, and the exchange of gradients brings that to all: each sees by its
    own gradients what all see, and nothing more is sent.
    """

    def __init__(self, world: World, skip: bool = False) -> None:
        """
        Args:
            skip: leave such steps out, instead of ending the run at the first one.
        """
        self.world, self.skip = world, skip
        self.samples: Callable[[], Sequence[int]] = lambda: ()  # this rank's, in the step under way
        self._row = 0

    def seed(self, loss: torch.Tensor) -> torch.Tensor | None:
        """What the gradient of `loss` begins with: None for one, not a number if the loss is not finite."""
        if loss.device.type != "cpu":  # without waiting for it
            return torch.rsub(loss.detach(), 1, alpha=0)
        if math.isfinite(loss.item()):
            return None
        return torch.full_like(loss, math.nan)

    def allows(self, step: int, gradients: list[torch.Tensor], losses: Sequence[torch.Tensor]) -> bool:
        """Whether the weights may be changed by these gradients. The same on all ranks.

        Args:
            step: optimizer steps done.
            gradients: as they are after the exchange.
            losses: this rank's, in this step.

        Raises:
            FaultError: they may not, and the run is to end: the same on all ranks.
        """
        if _finite(gradients):
            self._row = 0
            return True
        rank, host, cause = self._culprit(step, losses)
        if self.skip and self._row <= _MOST_IN_A_ROW:
            if self.world.rank == 0:
                logger.warning("rank %d (%s): %s: left out on all ranks, as training.non_finite=skip says", rank, host, cause)
            return False
        raise self._fault(rank, host, cause)

    def scaled(self, applied: bool, step: int, losses: Sequence[torch.Tensor]) -> None:
        """With a gradient scaler, which leaves such steps out itself and lowers its scale: they must not go on for ever.

        Raises:
            FaultError: they do: the same on all ranks.
        """
        if applied:
            self._row = 0
        elif (row := self._row + 1) <= _MOST_OVERFLOWS:
            self._row = row
        else:
            raise self._fault(*self._culprit(step, losses))

    def _culprit(self, step: int, losses: Sequence[torch.Tensor]) -> tuple[int, str, str]:
        """Rank, host, and what is wrong there. Every rank must call it."""
        self._row += 1
        wrong = not all(math.isfinite(loss.item()) for loss in losses)
        told = self.world.gather((wrong, self.world.host, list(self.samples())[:_SHOWN_SAMPLES]))
        rank, host, what = self.world.from_rank_0(_first(told) if told else None)
        return rank, host, f"{what} in step {step + 1}"

    def _fault(self, rank: int, host: str, cause: str) -> FaultError:
        many = f", as in {self._row - 1} steps before it" if self._row > 1 else ""
        fix = "lower the rate, set training.grad_clip_norm, or look at these samples; training.non_finite=skip leaves such out"
        return FaultError(Fault("C6", host, f"{cause}{many}; the weights are as before it", fix, ExitCode.RANK_FAILED, rank))


def _finite(gradients: Sequence[torch.Tensor]) -> bool:
    """By their sums, or on a GPU by the largest, which few kernels find: one number that is not finite makes either so."""
    if gradients and gradients[0].device.type != "cpu":
        return math.isfinite(_largest(gradients))
    return all(math.isfinite(gradient.sum(dtype=_WIDE.get(gradient.dtype)).item()) for gradient in gradients)


def _largest(gradients: Sequence[torch.Tensor]) -> float:
    """The largest magnitude in all of them."""
    return nn.utils.get_total_norm(gradients, math.inf).item()


def _first(told: Sequence[tuple[bool, str, list[int]]]) -> tuple[int, str, str]:
    """Rank, host, and what is wrong there."""
    rank = next((rank for rank, (wrong, _, _) in enumerate(told) if wrong), None)
    if rank is None:
        return 0, told[0][1], "gradients are not finite, though the loss is on all ranks,"
    _, host, samples = told[rank]
    which = f" (samples {', '.join(map(str, samples))}{', ...' * (len(samples) == _SHOWN_SAMPLES)})" if samples else ""
    return rank, host, f"the loss is not finite{which}"


class SameParameters:
    """Finds out whether all ranks still have the same parameters, to the bit."""

    def __init__(self, world: World, parameters: Sequence[nn.Parameter], step: int) -> None:
        """
        Args:
            step: optimizer steps done, at which they are the same.
        """
        self.world, self.parameters, self.verified = world, parameters, step

    def check(self, step: int) -> None:
        """Compare a checksum. Every rank must call it.

        Raises:
            FaultError: a rank has other parameters than most: the same on all ranks.
        """
        if self.world.world_size == 1:
            return
        mine = _checksum(self.parameters)
        largest, smallest = self.world.largest_numbers(mine, -mine)
        if largest != -smallest:
            told = self.world.gather((mine, self.world.host))
            raise FaultError(self.world.from_rank_0(self._fault(told, step) if told else None))
        self.verified = step

    def _fault(self, told: Sequence[tuple[int, str]], step: int) -> Fault:
        usual, count = Counter(checksum for checksum, _ in told).most_common(1)[0]
        odd = [rank for rank, (checksum, _) in enumerate(told) if checksum != usual]
        others = f" (and of ranks {', '.join(map(str, odd[1:]))})" if odd[1:] else ""
        cause = f"the parameters of this rank{others} differ from the others', since a step from {self.verified + 1} to {step}"
        cause += "" if count > len(told) / 2 else "; which of them are right cannot be told"
        fix = "look for code that changes weights on some ranks only, or a device that computes wrong; then start again"
        return Fault("F12", told[odd[0]][1], cause, fix, ExitCode.RANK_FAILED, odd[0])


def _checksum(parameters: Sequence[nn.Parameter]) -> int:
    """A number below 2^52 from all the bits."""
    total = 0
    with torch.no_grad():
        sums = [p.detach().view(_INTEGERS[p.element_size()]).sum(dtype=torch.int64) for p in parameters if p.numel()]
        for number, value in enumerate(sums):
            total += (2 * number + 1) * int(value)
    return total % _EXACT


def same_length(samples: int, target: str, world: World) -> None:
    """Ranks with data of different lengths would take different numbers of steps, and hang. Every rank must call it.

    Raises:
        FaultError: a rank has other data than most: the same on all ranks.
    """
    largest, smallest = world.largest_numbers(samples, -samples)
    if largest != -smallest:
        told = world.gather((samples, world.host))
        raise FaultError(world.from_rank_0(_other_length(told, target) if told else None))


def _other_length(told: Sequence[tuple[int, str]], target: str) -> Fault:
    lengths = [samples for samples, _ in told]
    usual = Counter(lengths).most_common(1)[0][0]
    odd = [rank for rank, samples in enumerate(lengths) if samples != usual]
    others = f" (ranks {', '.join(map(str, odd[1:]))} are odd too)" if odd[1:] else ""
    cause = f"data.target={target}: {lengths[odd[0]]} samples on this rank{others}, {usual} on rank {lengths.index(usual)}"
    host = told[odd[0]][1]
    return Fault("C4", host, cause, "give all ranks the same data, the kit shares it out", ExitCode.CONFIG, odd[0])


def all_used(model: nn.Module, world: World) -> bool:
    """After a first backward pass: see that every parameter has a gradient, without which the next step's exchange would fail.

    Raises:
        FaultError: some have none.
    """
    unused = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    if unused:
        more = f" (and {len(unused) - _SHOWN_NAMES} more)" if len(unused) > _SHOWN_NAMES else ""
        cause = f"parameters that got no gradient in the first step: {', '.join(unused[:_SHOWN_NAMES])}{more}"
        fix = "freeze them, use them, or set model.find_unused_parameters=true"
        raise FaultError(Fault("C7", world.host, cause, fix, ExitCode.RANK_FAILED, world.rank))
    return True
