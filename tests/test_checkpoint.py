import json
import os
import random
import signal
import time
from pathlib import Path

import numpy
import pytest
import torch

from tests.forked import on_ranks
from trainer.errors import ConfigError
from trainer.train.checkpoint import Checkpointer
from trainer.train.distributed import World
from trainer.train.random_state import random_state, seed_all, set_random_state
from trainer.train.stored import steps


def state(step: int) -> dict[str, object]:
    return {"weights": torch.full((1000,), float(step)), "samples": step * 8}


def saver(folder: Path, keep_last: int = 3) -> Checkpointer:
    return Checkpointer(folder / "checkpoints", World(), keep_last)


def test_what_is_saved_is_loaded_and_the_oldest_are_dropped(folder: Path) -> None:
    checkpoints = saver(folder, keep_last=2)
    for step in (5, 10, 15):
        checkpoints.save(step, state(step), {"mine": step})
    assert steps(checkpoints.folder) == [10, 15]
    found = checkpoints.load()
    assert found is not None and found["step"] == 15 and found["ranks"] == [{"mine": 15}]
    assert torch.equal(found["weights"], torch.full((1000,), 15.0))
    assert (folder / "checkpoints" / "latest").resolve().name == "step-00000015"
    assert not list((folder / "checkpoints").glob("*.tmp"))
    manifest = json.loads((folder / "checkpoints" / "latest" / "manifest.json").read_text())
    assert manifest["step"] == 15 and len(manifest["files"]["state.pt"]["sha256"]) == 64


def damage_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def damage_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def damage_all(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("state.pt", damage_half),
        ("state.pt", damage_bit),
        ("state.pt", damage_all),
        ("state.pt", Path.unlink),
        ("manifest.json", damage_half),
        ("manifest.json", damage_all),
        ("manifest.json", lambda path: path.write_text("null")),
        ("manifest.json", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(name: str, damage, folder: Path, caplog) -> None:
    checkpoints = saver(folder)
    for step in (5, 9):
        checkpoints.save(step, state(step), {})
    damage(folder / "checkpoints" / "step-00000009" / name)
    found = checkpoints.load()
    assert found is not None and found["step"] == 5
    assert "checkpoint of step 9 is damaged" in caplog.text and "4 steps are lost" in caplog.text


def test_what_is_written_after_damaged_ones_stays(folder: Path) -> None:
    checkpoints = saver(folder, keep_last=2)
    for step in (40, 50):
        checkpoints.save(step, state(step), {})
        damage_half(folder / "checkpoints" / f"step-{step:08d}" / "state.pt")
    assert checkpoints.load() is None
    checkpoints.save(9, state(9), {})
    assert steps(checkpoints.folder) == [9] and checkpoints.load()["step"] == 9  # type: ignore[index]
    assert len(list((folder / "checkpoints").glob("*.damaged"))) == 2


def test_a_run_that_went_on_from_an_older_one_drops_what_came_after(folder: Path) -> None:
    checkpoints = saver(folder)
    for step in (5, 10, 15):
        checkpoints.save(step, state(step), {})
    checkpoints.save(7, state(7), {})
    assert steps(checkpoints.folder) == [5, 7]


def test_nothing_to_load(folder: Path) -> None:
    assert saver(folder).load() is None
    with pytest.raises(ConfigError, match="checkpoint.resume=required: no whole checkpoint in"):
        saver(folder).load(required=True)


@pytest.mark.parametrize("kill_after_seconds", [0.02, 0.1, 0.3])
def test_a_kill_within_a_save_leaves_the_one_before(kill_after_seconds: float, folder: Path, monkeypatch) -> None:
    checkpoints = saver(folder)
    checkpoints.save(5, state(5), {})
    pid = os.fork()
    if pid == 0:  # a slow disk: each write takes a while
        real = os.fsync
        monkeypatch.setattr(os, "fsync", lambda fd: (time.sleep(0.1), real(fd)))
        checkpoints.save(10, state(10), {})
        time.sleep(60)
    time.sleep(kill_after_seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = checkpoints.load()
    assert found is not None and found["step"] == 5
    checkpoints.save(10, state(10), {})
    assert checkpoints.load()["step"] == 10  # type: ignore[index]
    assert not list((folder / "checkpoints").glob("*.tmp"))


def test_a_failing_disk_leaves_no_half_checkpoint(folder: Path, monkeypatch) -> None:
    checkpoints = saver(folder)
    checkpoints.save(5, state(5), {})

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save(10, state(10), {})
    assert steps(checkpoints.folder) == [5] and not list((folder / "checkpoints").glob("*.tmp"))


def test_all_ranks_load_the_one_that_rank_0_chose(folder: Path) -> None:
    def train(world: World) -> tuple[int, list[int]]:
        checkpoints = Checkpointer(folder / "checkpoints", world)
        checkpoints.save(4, state(4), {"rank": world.rank})
        found = checkpoints.load()
        assert found is not None
        return found["step"], [own["rank"] for own in found["ranks"]]

    assert on_ranks(3, train) == [(4, [0, 1, 2])] * 3


def test_a_folder_that_one_rank_cannot_see_is_told(folder: Path) -> None:
    def train(world: World) -> str:
        Checkpointer(folder / "checkpoints", world).save(4, state(4), {})
        mine = Checkpointer(folder / ("checkpoints" if world.rank == 0 else "elsewhere"), world)
        try:
            return str(mine.load() is not None)
        except ConfigError as error:
            return str(error)

    first, second = on_ranks(2, train)
    assert first == "True" and "is not visible on" in second and "storage that all nodes share" in second


def test_the_random_state_goes_on_where_it_was(folder: Path) -> None:
    seed_all(3)
    checkpoints = saver(folder)
    checkpoints.save(1, {}, {"random": random_state()})
    expected = torch.rand(3).tolist(), random.random(), numpy.random.rand()
    seed_all(4)
    found = checkpoints.load()
    assert found is not None
    set_random_state(found["ranks"][0]["random"])
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == expected
