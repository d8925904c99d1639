"""Ways to exchange gradients: all lead to the same weights, as far as the type allows in which they are sent."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.forked import on_ranks
from tests.test_loop import make_loop, run_steps, weights
from trainer.errors import ConfigError
from trainer.train.batches import mix
from trainer.train.distributed import World
from trainer.train.exchange import ExchangeOptions, Flat
from trainer.train.loop import StepOptions
from trainer.train.models import lenet


def trained(
    world: World, exchange: ExchangeOptions, model: nn.Module | None = None, steps: int = 12, **options: Any
) -> torch.Tensor:
    loop = make_loop(world, StepOptions(**options), model, exchange=exchange)
    run_steps(loop, steps)
    return weights(loop.bare)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation": 2}, {"grad_clip_norm": 0.5}, {"precision": "bf16"}, {"precision": "fp16"}, {"channels_last": True}],
    ids=str,
)
def test_flat_does_what_ddp_does(world_size: int, options: dict[str, Any]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        made = lenet(1, 8)
        return made.to(memory_format=torch.channels_last) if "channels_last" in options else made

    def both(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        return trained(world, ExchangeOptions(), model(), **options), trained(world, ExchangeOptions("flat"), model(), **options)

    found = on_ranks(world_size, both)
    for ddp, flat in found:
        assert torch.equal(flat, found[0][1]) and (ddp - flat).abs().max() < (1e-6 if "precision" not in options else 1e-3)


@pytest.mark.parametrize("engine", ["ddp", "flat"])
@pytest.mark.parametrize("compress", ["bf16", "fp16"])
def test_what_is_sent_in_half_precision_is_nearly_the_same(engine: str, compress: str) -> None:
    def both(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        return trained(world, ExchangeOptions()), trained(world, ExchangeOptions(engine, compress))

    found = on_ranks(2, both)
    assert torch.equal(found[0][1], found[1][1]), "all ranks have the same"
    for full, half in found:
        assert 0 < (full - half).abs().max() < 5e-3


def test_a_static_graph_and_other_buckets_change_nothing() -> None:
    def all_three(world: World) -> list[torch.Tensor]:
        ways = (ExchangeOptions(), ExchangeOptions(static_graph=True), ExchangeOptions(bucket_mb=0.01))
        return [trained(world, way) for way in ways]

    for plain, static, small in on_ranks(2, all_three):
        assert (plain - static).abs().max() < 1e-6 and (plain - small).abs().max() < 1e-6


def test_a_flat_model_is_saved_and_loaded_as_any_other() -> None:
    """Its tensors are views of one buffer, and stay so."""

    def resumed(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        whole = make_loop(world, exchange=ExchangeOptions("flat"))
        run_steps(whole, 10)
        first = make_loop(world, exchange=ExchangeOptions("flat"))
        run_steps(first, 5)
        state = {**first.state(), "step": 5, "ranks": [{**first.own_state()}] * world.world_size}
        second = make_loop(world, exchange=ExchangeOptions("flat"))
        second.load_state(state)
        run_steps(second, 5)
        assert isinstance(second.exchange, Flat)
        memory = {p.untyped_storage().data_ptr() for p in second.bare.parameters()}
        assert len(memory) == 1 and len(second.exchange.gradients) == 1
        return weights(whole.bare), weights(second.bare)

    for uninterrupted, again in on_ranks(2, resumed):
        assert torch.equal(uninterrupted, again)


def test_ranks_begin_with_rank_0s_weights_and_buffers() -> None:
    def begun(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(mix(world.rank))
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model[1].running_mean.fill_(world.rank)  # type: ignore[operator, union-attr]
        Flat(model, world)
        return weights(model), model[1].running_mean  # type: ignore[return-value]

    found = on_ranks(2, begun)
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_parameters_that_share_memory_are_refused() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.zeros(8, 4)[::2])
    with pytest.raises(
        ConfigError, match="ddp.engine=flat: a parameter of this model is a view of other memory; use ddp.engine=ddp"
    ):
        Flat(model, World())


def test_models_of_different_sizes_are_refused() -> None:
    def refused(world: World) -> str:
        with pytest.raises(ConfigError) as caught:
            Flat(nn.Linear(4, 4 + world.rank), world)
        return str(caught.value)

    assert all("ranks have models of different sizes" in text for text in on_ranks(2, refused))
