import math

import pytest
import torch
from torch import nn

from trainer.train.optim import LearningRate, MovingAverage, Schedule, fused


def test_warm_up_then_cosine_then_the_final_fraction() -> None:
    schedule = Schedule(total_steps=110, warmup_steps=10, decay="cosine", final_fraction=0.1)
    assert [schedule.factor(step) for step in (0, 4, 9)] == pytest.approx([0.1, 0.5, 1.0])
    assert schedule.factor(10) == 1.0
    assert schedule.factor(60) == pytest.approx(0.1 + 0.9 * 0.5)
    assert schedule.factor(110) == pytest.approx(0.1) == schedule.factor(500)
    assert schedule.factor(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))


def test_linear_and_constant() -> None:
    assert Schedule(100, 0, "linear").factor(25) == 0.75
    assert Schedule(100, 0, "constant").factor(99) == 1.0


def test_each_group_keeps_its_own_rate_and_scale() -> None:
    a, b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.01}])
    rate = LearningRate(optimizer, Schedule(10, 0, "linear"), scale=4.0)
    rate.set(5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2, 0.02])
    assert rate.current == pytest.approx(0.2)


def test_the_rate_reaches_an_optimizer_that_has_loaded_a_state() -> None:
    """load_state_dict replaces the parameter groups."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    rate = LearningRate(optimizer, Schedule(10, 0, "linear"))
    optimizer.load_state_dict(optimizer.state_dict())
    rate.set(5)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_the_moving_average_follows_and_swaps_back() -> None:
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1))
    with torch.no_grad():
        model[0].weight.fill_(0.0)
    average = MovingAverage(model, decay=0.9)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].num_batches_tracked.fill_(3)
    average.update(model)
    average.swap(model)
    assert model[0].weight.tolist() == [[pytest.approx(0.1)] * 2] and model[1].num_batches_tracked.item() == 3
    average.swap(model)
    assert model[0].weight.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("kind", "args"), [("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {"amsgrad": True})])
def test_torchs_optimizers_update_all_at_once_and_the_same(kind: str, args: dict[str, object]) -> None:
    function, found = getattr(torch.optim, kind), []
    for asked in (True, False):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 2))
        extra = fused(function, args, model) if asked else {}
        assert extra == ({"fused": True} if asked else {})
        optimizer = function(model.parameters(), lr=0.1, weight_decay=0.01, **args, **extra)
        for _ in range(5):
            model(torch.randn(2, 3, 4, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*found, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "args", "model"),
    [
        (torch.optim.SGD, {"foreach": True}, nn.Linear(2, 2)),
        (torch.optim.Rprop, {}, nn.Linear(2, 2)),  # has no such way
        (lambda parameters, fused=None: None, {}, nn.Linear(2, 2)),  # not torch's
        (torch.optim.SGD, {}, nn.Embedding(4, 2, sparse=True)),
        (torch.optim.SGD, {}, nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last)),
    ],
)
def test_where_that_cannot_be_the_usual_way_stays(function: object, args: dict[str, object], model: nn.Module) -> None:
    assert fused(function, args, model) == {}  # type: ignore[arg-type]
