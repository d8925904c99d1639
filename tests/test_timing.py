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
from trainer.train.loop import StepOptions
from trainer.train.metrics import _bound
from trainer.train.timing import PARTS, TimeSplit
from trainer.train.utilisation import Utilisation, peak_tflops


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
    window = [f"profile.start_step={start}", f"profile.steps={steps}", "profile.ranks=[1]", "training.peak_tflops=0.05"]
    code, output = command(*TRAINER, "run", *SHORT, overrides(run), *window)
    assert code == 0, output
    (trace,) = (run / "profile").iterdir()
    assert trace.name == "rank-0001.json"
    names = [event.get("name") for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    assert names.count("Optimizer.step#SGD.step") == within
    trained = [record for record in metrics(run) if record["kind"] == "train"]
    assert all(0 < record["mfu"] < 1 for record in trained)
    assert all(sum(value for name, value in each.items() if name.startswith("share_")) > 0.98 for each in trained)


@pytest.mark.parametrize(("compiled", "accumulation"), [(False, 1), (False, 4), (True, 1)])
def test_the_operations_of_a_step_are_counted(compiled: bool, accumulation: int) -> None:
    """Two layers without biases: forward and the gradients of the weights of both, and of the input of the second."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 10, bias=False))
    if compiled:
        model.compile()
    loop, batches = make_loop(World(), StepOptions(accumulation=accumulation), model), waiting(0)
    used = Utilisation(World(), "fp32", tflops=1e-6)
    assert used.pending and used.of(1.0) == {}
    with used.counting():
        loop.take_step(batches)
    products = 16 * (2 * 64 * 32 + 3 * 32 * 10)
    assert used.of(0.5) == {"mfu": round(accumulation * 2 * products * 0.5 / 1e6, 4)} and not used.pending
    before = loop.step
    loop.take_step(batches)
    assert loop.step == before + 1


def test_peaks_are_known_by_the_names_of_devices() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-SXM4-80GB": 312,
        "NVIDIA L40S": 362,
        "NVIDIA L4": 121,
    }
    assert {name: peak_tflops(name, "bf16") for name in names} == names
    assert peak_tflops("Tesla V100-SXM2-32GB", "fp16") == 125 and peak_tflops("Tesla V100-SXM2-32GB", "bf16") is None
    assert peak_tflops("NVIDIA A100-SXM4-80GB", "fp32") == 19.5
    assert peak_tflops("NVIDIA A10G", "fp16") is peak_tflops("NVIDIA GeForce RTX 4090", "fp16") is None
    assert not Utilisation(World(), "fp32").pending, "a CPU"
