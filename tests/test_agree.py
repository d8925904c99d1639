"""Numbers that are not finite, and parameters that differ: all ranks do the same about them, and the right one is named."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.forked import on_ranks
from tests.test_loop import make_loop, run_steps, small_data, weights
from trainer.errors import ExitCode, Fault, FaultError
from trainer.train.agree import SameParameters, _largest
from trainer.train.batches import GlobalOrder, Loading, batches
from trainer.train.distributed import World
from trainer.train.exchange import ExchangeOptions
from trainer.train.loop import Loop, StepOptions

BAD = [torch.nan, torch.inf, -torch.inf]


class Spoiled(nn.Module):
    """A classifier that gives one rank a wrong number in some of its forward passes."""

    def __init__(self, rank: int, passes: range, value: float) -> None:
        super().__init__()
        self.inner, self.rank, self.passes, self.value, self.counted = nn.Linear(64, 10), rank, passes, value, -1

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(images.flatten(1))
        self.counted += 1
        return outputs * self.value if self.counted in self.passes and self.rank == current else outputs


current = 0  # the rank of this process


def train(world: World, spoiled: Spoiled, steps: int, skip: bool, **options: Any) -> Loop:
    global current
    current = world.rank
    loop = make_loop(world, StepOptions(skip_non_finite=skip, **options), spoiled)
    run_steps(loop, steps)
    return loop


def fault_of(world: World, spoiled: Spoiled, steps: int, skip: bool = False, **options: Any) -> tuple[Fault, int]:
    loop = make_loop(world, StepOptions(skip_non_finite=skip, **options), spoiled)
    loop.finite.samples = lambda: [7, 8]
    global current
    current = world.rank
    with pytest.raises(FaultError) as caught:
        run_steps(loop, steps)
    assert torch.isfinite(weights(loop.bare)).all(), "the weights are as before"
    return caught.value.fault, loop.step


@pytest.mark.parametrize("accumulation", [1, 2])
def test_all_ranks_end_at_the_same_step_and_name_the_rank_and_its_samples(accumulation: int) -> None:
    culprit, value = random.randrange(3), random.choice(BAD)
    spoiled = Spoiled(culprit, range(5 * accumulation - 1, 5 * accumulation), value)  # the last forward pass of step 5
    found = on_ranks(3, lambda world: fault_of(world, spoiled, 8, accumulation=accumulation))
    assert len({fault for fault, _ in found}) == 1 and {step for _, step in found} == {4}, found
    fault = found[0][0]
    assert (fault.code, fault.rank, fault.exit_code) == ("C6", culprit, ExitCode.RANK_FAILED)
    assert fault.cause == "the loss is not finite (samples 7, 8) in step 5; the weights are as before it"


def test_a_step_that_is_left_out_is_as_if_it_had_not_been() -> None:
    """On all ranks: weights, moments, schedule and metrics; only the place in the data goes on."""

    def both(world: World) -> tuple[torch.Tensor, dict[str, float], int]:
        loop = train(world, Spoiled(1, range(3, 4), random.choice(BAD)), 6, skip=True)
        return weights(loop.bare), loop.training_values(), loop.updates

    def expected(world: World) -> tuple[torch.Tensor, dict[str, float], int]:
        loop = make_loop(world, model=Spoiled(-1, range(0), 0.0))
        order = GlobalOrder(80, 16, 1, world.rank, world.world_size, seed=0)
        steps: Iterator[Any] = (batch for step in (0, 1, 2, 4, 5) for batch in order.micro_batches(step, step + 1))
        loading = batches(small_data(), steps, 0, Loading())
        for _ in range(5):
            loop.take_step(loading)
        return weights(loop.bare), loop.training_values(), loop.updates

    for (found, values, updates), (right, right_values, right_updates) in zip(
        on_ranks(2, both), on_ranks(2, expected), strict=True
    ):
        assert torch.equal(found, right) and updates == right_updates == 5
        assert {**values, "samples_per_second": 0} == {**right_values, "samples_per_second": 0}


def test_steps_that_are_not_finite_one_after_the_other_end_the_run() -> None:
    fault, step = on_ranks(1, lambda world: fault_of(world, Spoiled(0, range(2, 99), torch.nan), 40, skip=True))[0]
    assert step == 12 and fault.cause.startswith("the loss is not finite (samples 7, 8) in step 13, as in 10 steps before it")


def test_half_precision_that_overflows_for_ever_ends_the_run() -> None:
    spoiled = Spoiled(0, range(2, 999), torch.inf)
    fault, step = on_ranks(1, lambda world: fault_of(world, spoiled, 90, precision="fp16"))[0]
    assert step == 52 and fault.code == "C6"


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_the_largest_gradient_is_finite_only_if_all_are(kind: torch.dtype) -> None:
    """What a GPU's gradients are looked at with."""
    gradients = [torch.full((40_000,), -60_000.0, dtype=kind), torch.ones(5, dtype=kind)]
    assert _largest(gradients) == pytest.approx(60_000, rel=0.01)  # their sum is not finite in fp16
    for bad in BAD:
        gradients[1][2] = bad
        assert not math.isfinite(_largest(gradients))


def test_the_rank_whose_parameters_differ_is_named() -> None:
    culprit = random.randrange(3)

    def check(world: World) -> Fault | None:
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2).to(torch.bfloat16))
        for parameter in model.parameters():
            parameter.data.fill_(1)
        same = SameParameters(world, list(model.parameters()), step=0)
        same.check(10)
        if world.rank == culprit:
            model[1].bias.data[1] = 1 + 2**-7  # one bit
        with pytest.raises(FaultError) as caught:
            same.check(20)
        return caught.value.fault

    found = on_ranks(3, check)
    assert len(set(found)) == 1 and found[0] and found[0].rank == culprit and found[0].code == "F12"
    assert found[0].cause == "the parameters of this rank differ from the others', since a step from 11 to 20"


class Idle(nn.Module):
    """A classifier with layers that nothing goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.auxiliary = nn.Linear(64, 10), nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.inner(images.flatten(1))
        return outputs


@pytest.mark.parametrize("way", ["refused", "find_unused_parameters", "frozen"])
def test_parameters_that_get_no_gradient_are_named_in_the_first_step(way: str) -> None:
    def check(world: World) -> Fault | None:
        model = Idle()
        model.auxiliary.requires_grad_(way != "frozen")
        loop = make_loop(world, model=model, exchange=ExchangeOptions(find_unused_parameters=way == "find_unused_parameters"))
        try:
            run_steps(loop, 3)
        except FaultError as error:
            return error.fault
        return None

    for rank, fault in enumerate(on_ranks(2, check)):
        if way != "refused":
            assert fault is None
            continue
        assert fault and (fault.code, fault.rank, fault.exit_code) == ("C7", rank, ExitCode.RANK_FAILED)
        names = "auxiliary.0.weight, auxiliary.0.bias, auxiliary.1.weight (and 3 more)"
        assert fault.cause == f"parameters that got no gradient in the first step: {names}"
