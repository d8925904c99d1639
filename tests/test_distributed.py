import os

import pytest
import torch

from tests.forked import on_ranks
from trainer.errors import ConfigError
from trainer.train import distributed
from trainer.train.distributed import World, device_indices, joined


@pytest.mark.parametrize(
    ("local_rank", "ranks", "visible", "expected"),
    [
        (0, 8, 8, [0]),
        (7, 8, 8, [7]),
        (1, 2, 8, [4, 5, 6, 7]),  # a model split over four devices of its rank
        (3, 4, 1, [0]),  # --gpus-per-task shows each rank one GPU
        (2, 4, 2, [0]),  # more ranks than GPUs share them
    ],
)
def test_the_devices_of_a_rank(local_rank: int, ranks: int, visible: int, expected: list[int]) -> None:
    assert device_indices(local_rank, ranks, visible) == expected


def test_one_process_without_a_launcher_needs_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with joined(0, 10) as world:
        assert world == World() and not torch.distributed.is_initialized()
        assert world.gather("x") == ["x"] and world.from_rank_0(3) == 3 and world.sum_numbers(1, 2) == [1, 2]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, "WORLD_SIZE: RANK is set but this is not"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=x: is no number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "RANK=2: must be below WORLD_SIZE=2"),
    ],
)
def test_half_an_environment_is_refused_at_once(environ: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=words), joined(0, 10):
        pass


def test_gpus_asked_for_and_none_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with (
        pytest.raises(ConfigError, match="resources.gpus_per_node=8: no GPU is visible on .*CUDA_VISIBLE_DEVICES=7"),
        joined(8, 10),
    ):
        pass


def test_numbers_and_objects_reach_all_ranks() -> None:
    def exchange(world: World) -> tuple[object, ...]:
        assert world.grouped and world.world_size == 3 and os.environ["RANK"] == str(world.rank)
        return (
            world.sum_numbers(world.rank, 1),
            world.largest_numbers(float(world.rank)),
            world.from_rank_0({"chosen": world.rank}),
            world.gather(world.rank * 10),
        )

    found = on_ranks(3, exchange)
    assert found[0] == ([3, 3], [2], {"chosen": 0}, [0, 10, 20])
    assert found[2] == ([3, 3], [2], {"chosen": 0}, [])
