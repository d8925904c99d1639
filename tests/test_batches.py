import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from itertools import chain, groupby
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import Dataset

from tests.conftest import wait_until
from tests.forked import on_ranks
from trainer.errors import ConfigError, write_error_file
from trainer.train.batches import GlobalOrder, Loading, _with_exit_codes, batches, mix
from trainer.train.distributed import World


def global_batches(order_arguments: dict[str, int], world_size: int, accumulation: int, steps: int) -> list[list[int]]:
    """The samples of each step, put together from all ranks' micro-batches in the order in which they are used."""
    parts = []
    for rank in range(world_size):
        order = GlobalOrder(**order_arguments, accumulation=accumulation, rank=rank, world_size=world_size)
        parts.append([indices.tolist() for _, indices in order.micro_batches(0, steps)])
    return [
        [
            index
            for micro in range(accumulation)
            for rank in range(world_size)
            for index in parts[rank][step * accumulation + micro]
        ]
        for step in range(steps)
    ]


@given(st.sampled_from([(1, 8), (2, 4), (4, 2), (8, 1), (1, 1), (2, 1), (4, 1)]), st.integers(0, 5), st.integers(16, 60))
def test_the_global_batches_do_not_depend_on_the_launch(shape: tuple[int, int], seed: int, samples: int) -> None:
    world_size, accumulation = shape
    arguments = {"samples": samples, "batch_size": 16, "seed": seed}
    steps = 2 * (samples // 16) + 1
    alone = global_batches(arguments, 1, 1, steps)
    assert global_batches(arguments, world_size, accumulation, steps) == alone
    order = GlobalOrder(**arguments, accumulation=1, rank=0, world_size=1)
    assert alone == [order.global_batch(step).tolist() for step in range(steps)]


def test_an_epoch_has_every_sample_at_most_once_and_the_next_another_order() -> None:
    order = GlobalOrder(103, 8, 1, 0, 1, seed=0)
    assert order.steps_per_epoch == 12
    epochs = [[i for step in range(e * 12, (e + 1) * 12) for i in order.global_batch(step).tolist()] for e in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 96
    left_out = [set(range(103)) - set(epoch) for epoch in epochs]
    assert epochs[0] != epochs[1] and left_out[0] != left_out[1]
    assert GlobalOrder(103, 8, 1, 0, 1, seed=1).global_batch(0).tolist() != epochs[0][:8]


@pytest.mark.parametrize("first", [0, 5, 12, 17])
def test_starting_in_the_middle_goes_on_as_if_never_stopped(first: int) -> None:
    order = GlobalOrder(103, 8, 2, 1, 2, seed=3)
    whole = [(epoch, indices.tolist()) for epoch, indices in order.micro_batches(0, 30)]
    assert [(epoch, indices.tolist()) for epoch, indices in order.micro_batches(first, 30)] == whole[first * 2 :]


@given(
    st.integers(8, 150),
    st.sampled_from([1, 2, 5, 9]),
    st.sampled_from([4, 8, 12, 16]),
    st.lists(st.tuples(st.integers(1, 30), st.sampled_from([1, 2, 4])), min_size=1, max_size=5),
    st.integers(0, 3),
)
@example(103, 1, 8, [(6, 4), (3, 2), (20, 4)], 0)
@example(103, 12, 8, [(6, 4), (3, 2), (20, 4)], 0)
def test_stops_and_other_world_sizes_leave_the_order_as_it_is(
    samples: int, block_size: int, batch_size: int, parts: list[tuple[int, int]], seed: int
) -> None:
    """Stopped and resumed on another number of ranks, again and again: the same samples in the same global batches, in every
    epoch each at most once, all but the tail; and the next epoch in another order."""
    samples = max(samples, block_size * batch_size)
    arguments = {"batch_size": batch_size, "seed": seed, "block_size": block_size}
    total = sum(steps for steps, _ in parts)
    whole = GlobalOrder(samples, **arguments, accumulation=1, rank=0, world_size=1)
    seen, first = [], 0
    for steps, ranks in parts:
        orders = [GlobalOrder(samples, **arguments, accumulation=1, rank=rank, world_size=ranks) for rank in range(ranks)]
        micros = [[indices.tolist() for _, indices in order.micro_batches(first, first + steps)] for order in orders]
        seen += [list(chain.from_iterable(micro[step] for micro in micros)) for step in range(steps)]
        first += steps
    assert seen == [whole.global_batch(step).tolist() for step in range(total)]
    length = whole.steps_per_epoch
    epochs = [list(chain.from_iterable(seen[step : step + length])) for step in range(0, total, length)]
    for epoch in epochs:
        assert len(set(epoch)) == len(epoch)
    if total >= 2 * length:
        assert len(epochs[0]) == samples // batch_size * batch_size and epochs[0] != epochs[1]


@pytest.mark.parametrize("block_size", [2, 7, 16, 40])
def test_blocks_are_read_one_after_the_other_and_no_batch_has_two_samples_of_one(block_size: int) -> None:
    batch_size, samples = 32, 2000
    order = GlobalOrder(samples, batch_size, 1, 0, 1, seed=5, block_size=block_size)
    steps = torch.stack([order.global_batch(step) for step in range(order.steps_per_epoch)]) // block_size
    assert all(len(set(batch)) == batch_size for batch in steps.tolist())
    places = list(steps.t().tolist())
    for place in places:  # once a block is left, this place does not come back to it
        assert len([block for block, _ in groupby(place)]) == len(set(place)) <= order.steps_per_epoch // block_size + 2
    assert steps.flatten().tolist() != sorted(steps.flatten().tolist())
    ranks = [GlobalOrder(samples, batch_size, 1, rank, 4, seed=5, block_size=block_size) for rank in range(4)]
    used = [{index // block_size for _, part in each.micro_batches(0, 62) for index in part.tolist()} for each in ranks]
    shared = sum(len(mine) for mine in used) - len(set.union(*used))
    assert shared <= 4, "no rank reads another's blocks, but where one's places end"


def test_batches_of_sorted_data_are_mixed_as_well_by_blocks_as_without() -> None:
    """By how the share of a class varies from batch to batch; batches near each other have blocks in common, as documented."""

    def shares(block_size: int) -> torch.Tensor:
        order = GlobalOrder(640_000, 64, 1, 0, 1, seed=1, block_size=block_size)  # ten classes, one after the other
        return torch.stack([(batch < 64_000).double().mean() for _, batch in order.micro_batches(0, 10_000)])

    exact, blocks = shares(1), shares(20)
    assert exact.mean() == pytest.approx(0.1, abs=0.002) and blocks.mean() == pytest.approx(0.1, abs=0.002)
    assert exact.var().item() == pytest.approx(0.1 * 0.9 / 64, rel=0.05)
    assert blocks.var().item() == pytest.approx(0.1 * 0.9 / 64, rel=0.2)  # a twentieth as many draws that are independent
    for apart, expected in {1: 0.95, 10: 0.5, 20: 0, 100: 0}.items():
        deviations = blocks - blocks.mean()
        correlation = (deviations[apart:] * deviations[:-apart]).mean() / blocks.var()
        assert correlation.item() == pytest.approx(expected, abs=0.12), apart


def test_blocks_that_are_longer_than_an_epoch_has_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="data.shuffle_block_size=13: .*; make it at most 12, the steps of an epoch"):
        GlobalOrder(103, 8, 1, 0, 1, 0, block_size=13)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="training.batch_size=64: the training data has only 10 samples"):
        GlobalOrder(10, 64, 1, 0, 1, 0)


class Noisy(Dataset):  # type: ignore[type-arg]
    """Augments with all three generators that data sets draw from."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.tensor([index, torch.rand(()).item(), random.random(), numpy.random.rand()], dtype=torch.float64), index


def augmented(world_size: int, workers: int, seed: int = 0) -> dict[tuple[int, int], list[float]]:
    found = {}
    for rank in range(world_size):
        order = GlobalOrder(40, 8, 1, rank, world_size, seed)
        chosen = list(order.micro_batches(0, 10))
        for (epoch, _), (images, _) in zip(chosen, batches(Noisy(), iter(chosen), seed, Loading(workers)), strict=True):
            found.update({(epoch, int(image[0])): image[1:].tolist() for image in images})
    return found


def test_augmentation_depends_on_seed_epoch_and_sample_only() -> None:
    alone = augmented(1, 0)
    assert augmented(2, 0) == alone == augmented(1, 2)
    assert len({tuple(values) for values in alone.values()}) == len(alone) == 80, "each sample of each epoch draws its own"
    assert augmented(1, 0, seed=1) != alone


def test_loading_in_the_rank_leaves_its_own_generators_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    expected = torch.rand(1).item(), random.random(), numpy.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)
    next(batches(Noisy(), iter([(0, torch.arange(8))]), 0, Loading()))
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == expected


def test_mixed_seeds_differ() -> None:
    assert len({mix(a, b) for a in range(50) for b in range(50)}) == 2500
    assert mix(1, 23) != mix(12, 3)


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_workers_that_are_not_forked_load_the_same(context: str) -> None:
    chosen = [(0, torch.arange(8)), (1, torch.arange(4))]
    expected = list(batches(Noisy(), iter(chosen), 5, Loading()))
    found = list(batches(Noisy(), iter(chosen), 5, Loading(1, multiprocessing_context=context)))
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(found, expected, strict=True)) and len(found) == 2


def test_threads_beside_a_fork_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Once, and without those of a training loader that waits for an evaluation."""
    ended = threading.Event()
    pool = threading.Thread(target=ended.wait, name="pool-7")
    chosen = [(0, torch.arange(2))] * 3
    training = batches(Noisy(), iter(chosen), 0, Loading(1))
    next(training)
    assert any(thread.name == "QueueFeederThread" for thread in threading.enumerate())
    list(batches(Noisy(), iter(chosen), 0, Loading(1)))
    assert "E5" not in caplog.text
    pool.start()
    list(batches(Noisy(), iter(chosen), 0, Loading(1)))
    list(batches(Noisy(), iter(chosen), 0, Loading(1)))
    ended.set()
    pool.join()
    assert caplog.text.count("warning: E5: 1 other threads run while loader workers are forked (pool-7)") == 1


class Ending(Noisy):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 3:
            os._exit(0)
        return super().__getitem__(index)


def test_a_worker_that_is_found_dead_is_told_with_its_exit_code() -> None:
    """What it had loaded cannot be fetched from it any more; torch tells an exit code only if it is not 0."""
    found = batches(Ending(), iter([(0, torch.tensor([index])) for index in range(9)]), 0, Loading(1, prefetch_factor=4))
    assert wait_until(lambda: not multiprocessing.active_children(), 30)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) exited unexpectedly with exit code 0$"):
        list(found)


class Breaking:
    """A loader whose connection to its worker breaks a moment before that is dead."""

    def __init__(self) -> None:
        worker = multiprocessing.get_context("fork").Process(
            target=lambda: (time.sleep(0.3), os.kill(os.getpid(), signal.SIGKILL))
        )
        worker.start()
        self._workers = [worker]

    def __iter__(self) -> "Breaking":
        return self

    def __next__(self) -> None:
        raise ConnectionResetError(104, "Connection reset by peer")


def test_a_worker_that_is_about_to_be_dead_is_waited_for() -> None:
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed by signal: Killed$"):
        list(_with_exit_codes(Breaking()))


class Spoilt(Noisy):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 3:
            raise OSError(5, "Input/output error", "/data/3.png")
        return super().__getitem__(index)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before Python 3.11")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_loaded_is_told_by_its_number(workers: int, tmp_path: Path) -> None:
    with pytest.raises(OSError) as caught:
        list(batches(Spoilt(), iter([(0, torch.tensor([index])) for index in range(9)]), 0, Loading(workers)))
    write_error_file(str(tmp_path / "error.json"), caught.value)
    record = json.loads((tmp_path / "error.json").read_text())
    assert record["message"].endswith("[Errno 5] Input/output error: '/data/3.png' (sample 3)"), record
    assert record["where"].startswith("test_batches.py:"), record


def few_files(world: World) -> int:
    """Batches are kept, and with each the descriptors by which a worker has handed it over."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    chosen = ((0, torch.arange(2)) for _ in range(120))
    return len(list(batches(Noisy(), chosen, 0, Loading(1))))


def test_many_batches_with_few_open_files() -> None:
    assert on_ranks(1, few_files) == [120]
