"""Parts on the nodes' own disks: training goes on from there, and a start takes them if all of a save are there."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.forked import on_ranks
from tests.test_checkpoint import in_writer, small_disk, state  # noqa: F401 (a fixture)
from trainer.errors import ConfigError, FaultError
from trainer.train.checkpoint import Checkpointer
from trainer.train.distributed import World
from trainer.train.local import Local
from trainer.train.stored import steps

# In the writers: what is written under `checkpoints` waits, what is written to the nodes' own disks does not.
SHARED_HANGS = """
import os, time
real = os.fsync
def slow(fd):
    if "checkpoints" in os.readlink(f"/proc/self/fd/{fd}"):
        time.sleep(SECONDS)
    real(fd)
os.fsync = slow
"""


def parts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("ddp-job-kit-*/*.safetensors"))


def node(world: World) -> World:
    """Every rank a node of its own, with a disk of its own."""
    return replace(world, local_rank=0, local_world_size=1)


@pytest.fixture
def shared_hangs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    in_writer(folder, monkeypatch, SHARED_HANGS.replace("SECONDS", "60"))
    yield


def saver(folder: Path, world: World | None = None, local: Path | None = None, **more: bool) -> Checkpointer:
    return Checkpointer(folder / "checkpoints", world or World(), local_folder=str(local or folder / "disk"), **more)


def die_after(folder: Path, ranks: int, *saves: int) -> None:
    """Ranks, each a node, whose shared storage hangs, and that are killed when all their parts of the saves are on their disks."""

    def train(world: World) -> None:
        checkpoints = saver(folder, node(world), folder / f"disk-{world.rank}")
        for step in saves:
            checkpoints.save(step, state(step), {"rank": world.rank})
        while not all(each.kept for each in checkpoints._flight.saves):
            checkpoints._flight._hear()
        world.largest_numbers(0)
        if world.rank == 0:
            assert not steps(folder / "checkpoints")
        checkpoints.close()  # as a kill of the writer

    on_ranks(ranks, train)


def resumed(folder: Path, ranks: int) -> list[tuple[int, list[int]]]:
    """Step, and what the ranks had saved of their own, as each rank has it."""

    def load(world: World) -> tuple[int, list[int]]:
        with closing(saver(folder, node(world), folder / f"disk-{world.rank}")) as checkpoints:
            found = checkpoints.load()
            if not found:
                return 0, []
            assert torch.equal(found["weights"], torch.full((1000,), float(found["step"])))
            return found["step"], [own["rank"] for own in found["ranks"]]

    return on_ranks(ranks, load)


def test_the_next_save_begins_when_the_part_is_on_the_nodes_own_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_writer(folder, monkeypatch, SHARED_HANGS.replace("SECONDS", "1"))
    with closing(saver(folder)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step), {})
        assert not steps(checkpoints.folder), "both began before the first was whole there"
        checkpoints.save(3, state(3), {})
        assert 1 in steps(checkpoints.folder), "no third one on the disk before the first is whole"
        assert len(parts(folder / "disk")) <= 2
        checkpoints.finish()
        assert steps(checkpoints.folder) == [1, 2, 3] and checkpoints.load()["step"] == 3
        assert not parts(folder / "disk")


@pytest.mark.usefixtures("shared_hangs")
def test_what_is_complete_on_the_nodes_disks_is_used(folder: Path) -> None:
    die_after(folder, 3, 5, 10)
    assert len(parts(folder / "disk-1")) == 2
    assert resumed(folder, 3) == [(10, [0, 1, 2])] * 3
    assert steps(folder / "checkpoints") == [10] and not parts(folder / "disk-1")


@pytest.mark.usefixtures("shared_hangs")
def test_another_number_of_ranks_uses_it_too(folder: Path) -> None:
    die_after(folder, 2, 5)
    assert resumed(folder, 3) == [(5, [0, 1])] * 3


@pytest.mark.usefixtures("shared_hangs")
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(bytes(path.stat().st_size))])
def test_the_newest_of_which_every_part_is_there(damage, folder: Path) -> None:
    """A part that is gone, or damaged: the save before it, of which all are there."""
    die_after(folder, 2, 5, 10)
    (part,) = (folder / "disk-1").glob("ddp-job-kit-*/step-00000010.part-00001.safetensors")
    damage(part)
    assert resumed(folder, 2) == [(5, [0, 1])] * 2


@pytest.mark.usefixtures("shared_hangs")
def test_a_node_that_is_gone_takes_its_parts_with_it(folder: Path) -> None:
    die_after(folder, 2, 5)
    (folder / "disk-1").rename(folder / "gone")
    assert resumed(folder, 2) == [(0, [])] * 2
    assert not parts(folder / "disk-0") and not list((folder / "checkpoints").glob("step-*"))


@pytest.mark.usefixtures("shared_hangs")
def test_parts_of_a_run_that_was_deleted_are_not_those_of_one_with_its_name(folder: Path) -> None:
    die_after(folder, 2, 5)
    (folder / "checkpoints").rename(folder / "deleted")
    assert resumed(folder, 2) == [(0, [])] * 2
    assert not parts(folder / "disk-0"), "nobody would delete them any more"


def test_shared_storage_is_the_truth(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer checkpoint there wins over an older save on the disks."""
    with closing(saver(folder)) as checkpoints:
        checkpoints.save(20, state(20), {"rank": 0})
        checkpoints.finish()
        local = checkpoints._local
        assert local is not None
        local.put(15, "old", 0, 1, memoryview(b"older"))
        assert checkpoints.load()["step"] == 20
        assert steps(checkpoints.folder) == [20] and not parts(folder / "disk")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_cannot_be_written_is_told_once_and_not_used(
    number: int, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    code = f"if '/disk/' in os.readlink(f'/proc/self/fd/{{fd}}'): raise OSError({number}, os.strerror({number}))"
    in_writer(folder, monkeypatch, f"import os\nreal = os.fsync\ndef full(fd):\n    {code}\n    real(fd)\nos.fsync = full")
    with closing(saver(folder)) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), {})
        checkpoints.finish()
        assert checkpoints.load()["step"] == 3 and steps(checkpoints.folder) == [1, 2, 3]
    assert caplog.text.count("checkpoint.local_folder=") == 1 and os.strerror(number) in caplog.text


def test_a_local_folder_that_is_too_small(folder: Path, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    with closing(saver(folder, local=small_disk)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"weights": torch.zeros(1_000_000)}, {})
        checkpoints.finish()
        assert steps(checkpoints.folder) == [1, 2] and not parts(small_disk)
    assert caplog.text.count(f"checkpoint.local_folder={small_disk}: cannot be written on") == 1


def test_a_shared_folder_that_cannot_be_written_is_a_fault_although_the_disk_can(folder: Path, monkeypatch) -> None:
    code = "if 'checkpoints' in os.readlink(f'/proc/self/fd/{fd}'): raise OSError(5, 'Input/output error')"
    monkeypatch.setenv("PYTHONPATH", str(folder))
    with closing(saver(folder)) as checkpoints:
        (folder / "sitecustomize.py").write_text(
            f"import os\nreal = os.fsync\ndef bad(fd):\n    {code}\n    real(fd)\nos.fsync = bad"
        )
        checkpoints.save(1, state(1), {})
        with pytest.raises(FaultError, match="the checkpoint of step 1 could not be written to .*Input/output error"):
            checkpoints.finish()
    (folder / "sitecustomize.py").unlink()
    assert len(parts(folder / "disk")) == 1, "it is kept: the next start copies it"
    with closing(saver(folder)) as checkpoints:
        assert checkpoints.load()["step"] == 1


def test_storage_that_does_not_take_them_now_leaves_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(saver(folder)) as checkpoints:
        checkpoints._prepare()
        local = checkpoints._local
        assert local is not None
        local.put(15, "x", 0, 1, memoryview(b"part"))
        monkeypatch.setattr(
            checkpoints.place, "put", lambda *given: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle"))
        )
        with pytest.raises(ConfigError, match="Stale file handle; start again when the storage answers"):
            checkpoints.load()
        assert len(parts(folder / "disk")) == 1


def test_a_kill_between_a_part_and_its_entry_leaves_no_part_that_counts(tmp_path: Path) -> None:
    local = Local(tmp_path / "made" / "x-y")
    local.put(5, "a", 0, 1, memoryview(b"five"))
    pid = os.fork()
    if pid == 0:
        os.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)
        local.put(10, "a", 0, 1, memoryview(b"ten"))
    os.waitpid(pid, 0)
    assert local.file({"step": 10, "rank": 0}).exists()
    assert [entry["step"] for entry in local.held()] == [5]


def test_two_saves_of_each_rank_at_most(tmp_path: Path) -> None:
    local = Local(tmp_path / "x-y")
    for step in (1, 2, 3, 2):  # the last is of a run that went on from an older one
        for rank in (0, 1):
            local.put(step, "m", rank, 2, memoryview(b"part"))
    assert [(entry["step"], entry["rank"]) for entry in local.held()] == [(2, 0), (2, 1)]


def test_another_users_folder_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x-y").mkdir()
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        Local(tmp_path / "x-y").put(1, "m", 0, 1, memoryview(b"part"))
