"""Where the time of steps goes is told: to the part that it is spent on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import on_ranks
from tests.jobs import SHORT, TRAINER, command, metrics, overrides
from tests.test_loop import make_loop, small_data
from trainer.train.distributed import World
from trainer.train.exchange import ExchangeOptions
from trainer.train.metrics import _bound
from trainer.train.timing import PARTS, TimeSplit


def waiting(seconds: float) -> Iterator[Any]:
    """Batches that are waited for."""
    while True:
        time.sleep(seconds)
        yield small_data(16).batch(torch.arange(16))


def shares(world: World, seconds: float, steps: int = 20, engine: str = "ddp") -> dict[str, float]:
    loop = make_loop(world, exchange=ExchangeOptions(engine))
    batches = waiting(seconds)
    loop.take_step(batches)  # the first one makes all that is kept
    loop.split = TimeSplit(world.device, every=4)
    for _ in range(steps):
        loop.take_step(batches)
    with loop.split.spent_on("save"):
        time.sleep(0.02)
    return loop.split.close()


def test_all_of_the_time_is_shared_out_and_a_wait_for_data_is_told_as_that() -> None:
    found = shares(World(), 0.05)
    assert found["share_data"] > 0.7 and found["share_exchange"] < 0.05 < found["share_save"] + 0.05
    assert sum(found.values()) == pytest.approx(1, abs=0.01)
    assert all(0 < found[f"share_{part}"] < 1 for part in PARTS if part not in ("to_device", "exchange"))


@pytest.mark.parametrize("engine", ["ddp", "flat"])
def test_a_rank_that_waits_for_another_spends_its_time_on_the_exchange(engine: str) -> None:
    waits, slow = on_ranks(2, lambda world: shares(world, 0.05 * world.rank, engine=engine))
    assert waits["share_exchange"] > 0.6 and waits["share_backward"] < 0.3, waits
    assert slow["share_data"] > 0.6 and slow["share_exchange"] < 0.3, slow


def test_what_is_not_sampled_is_not_told() -> None:
    split = TimeSplit(torch.device("cpu"))
    for step in range(5):
        split.begin(step)
        split.waited(0.1)
        split.end()
    assert split.close() == {}


def test_what_steps_wait_for_is_in_the_progress_line() -> None:
    assert _bound({"share_data": 0.384, "share_exchange": 0.2, "share_forward": 0.4}) == ["data-bound 38%"]
    assert _bound({"share_data": 0.01, "share_exchange": 0.3}) == ["exchange-bound 30%"]
    assert _bound({"share_data": 0.05, "share_forward": 0.9}) == _bound({"loss": 1.0}) == []


@pytest.mark.ranks
@pytest.mark.parametrize(("start", "steps", "within"), [(5, 2, 2), (18, 100, 2)])
def test_some_steps_of_some_ranks_are_traced(start: int, steps: int, within: int, folder: Path) -> None:
    """Also where the run ends sooner."""
    run = folder / "run"
    window = [f"profile.start_step={start}", f"profile.steps={steps}", "profile.ranks=[1]"]
    code, output = command(*TRAINER, "run", *SHORT, overrides(run), *window)
    assert code == 0, output
    (trace,) = (run / "profile").iterdir()
    assert trace.name == "rank-0001.json"
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("Optimizer.step#SGD.step") == within
    trained = [record for record in metrics(run) if record["kind"] == "train"]
    assert all(sum(value for name, value in each.items() if name.startswith("share_")) > 0.98 for each in trained)
