import errno
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from tests.conftest import wait_until
from tests.forked import on_ranks
from trainer.errors import ConfigError, FaultError
from trainer.node.stacks import collect
from trainer.train import room, stored
from trainer.train.behind import Arena
from trainer.train.checkpoint import Checkpointer
from trainer.train.distributed import World
from trainer.train.listing import listing, whole_or_refused
from trainer.train.parts import REST, lay_out, read, share_out, take_apart, to_bytes
from trainer.train.random_state import random_state, seed_all, set_random_state
from trainer.train.stored import MANIFEST, part_name, steps
from trainer.train.weights import export

PART = part_name(0)
DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def state(step: int) -> dict[str, object]:
    return {"weights": torch.full((1000,), float(step)), "samples": step * 8}


class Saver(Checkpointer):
    """Saves and waits."""

    def save(self, *given: object, **more: object) -> None:
        super().save(*given, **more)  # type: ignore[arg-type]
        self.finish()


@pytest.fixture
def saver() -> Iterator[Callable[..., Saver]]:
    made: list[Saver] = []

    def new(folder: Path, keep_last: int = 3, **more: bool) -> Saver:
        made.append(Saver(folder / "checkpoints", World(), keep_last, **more))
        return made[-1]

    yield new
    for each in made:
        each.close()


def test_what_is_saved_is_loaded_and_the_oldest_are_dropped(folder: Path, saver: Any) -> None:
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
    assert manifest["step"] == 15 and len(manifest["files"][PART]["sha256"]) == 64


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
        (PART, damage_half),
        (PART, damage_bit),
        (PART, damage_all),
        (PART, Path.unlink),
        ("manifest.json", damage_half),
        ("manifest.json", damage_all),
        ("manifest.json", lambda path: path.write_text("null")),
        ("manifest.json", Path.unlink),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(name: str, damage, folder: Path, saver: Any, caplog) -> None:
    checkpoints = saver(folder)
    for step in (5, 9):
        checkpoints.save(step, state(step), {})
    damage(folder / "checkpoints" / "step-00000009" / name)
    found = checkpoints.load()
    assert found is not None and found["step"] == 5
    assert "checkpoint of step 9 is damaged" in caplog.text and "4 steps are lost" in caplog.text


def test_what_is_written_after_damaged_ones_stays(folder: Path, saver: Any) -> None:
    checkpoints = saver(folder, keep_last=2)
    for step in (40, 50):
        checkpoints.save(step, state(step), {})
        damage_half(folder / "checkpoints" / f"step-{step:08d}" / PART)
    for _ in range(2):  # nor does the start after that begin at step 0
        with pytest.raises(
            ConfigError, match=r"^checkpoint.resume=auto: every checkpoint in .* is damaged \(steps 40, 50\); restore"
        ):
            checkpoints.load()
    checkpoints.save(9, state(9), {})
    assert steps(checkpoints.folder) == [9] and checkpoints.load()["step"] == 9  # type: ignore[index]
    assert len(list((folder / "checkpoints").glob("*.damaged"))) == 2


def test_a_run_that_went_on_from_an_older_one_drops_what_came_after(folder: Path, saver: Any) -> None:
    checkpoints = saver(folder)
    for step in (5, 10, 15):
        checkpoints.save(step, state(step), {})
    checkpoints.save(7, state(7), {})
    assert steps(checkpoints.folder) == [5, 7]


def test_nothing_to_load(folder: Path, saver: Any) -> None:
    assert saver(folder).load() is None
    with pytest.raises(ConfigError, match="checkpoint.resume=required: no whole checkpoint in"):
        saver(folder).load(required=True)


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """1.9 MB."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1900k", "tmpfs", disk], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no file system of its own: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", disk], check=True)


SLOW = """
import os, time
real = os.fsync
os.fsync = lambda fd: (time.sleep({seconds}), real(fd))
"""  # runs in the writer as soon as it starts


def in_writer(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Have writers that are started from now on run this first."""
    (folder / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder))


@pytest.mark.parametrize("kill_after_seconds", [0.05, 0.2, 0.4, 0.6])
def test_a_kill_within_a_save_leaves_the_one_before(
    kill_after_seconds: float, folder: Path, saver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = saver(folder)
    checkpoints.save(5, state(5), {})
    in_writer(folder, monkeypatch, SLOW.format(seconds=0.2))
    pid = os.fork()
    if pid == 0:
        Checkpointer(folder / "checkpoints", World()).save(10, state(10), {})
        time.sleep(60)
    time.sleep(kill_after_seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    found = checkpoints.load()
    assert found is not None and found["step"] == 5
    checkpoints.save(10, state(10), {})
    assert checkpoints.load()["step"] == 10
    assert not list((folder / "checkpoints").glob("*.tmp"))


def test_a_full_disk_is_told_and_leaves_no_half_checkpoint(saver: Any, small_disk: Path) -> None:
    checkpoints = saver(small_disk)
    checkpoints.save(5, state(5), {})
    with pytest.raises(
        FaultError,
        match=r"FAULT G2 host=\S+ rank=0: the checkpoint of step 10 could not be written to .*: "
        r"no space: 1\.\d MB free, 4\.\d MB needed; those before it stand; fix: make room",
    ):
        checkpoints.save(10, {"weights": torch.zeros(1_000_000)}, {})
    assert steps(checkpoints.folder) == [5] and not list(checkpoints.folder.glob("*.tmp"))
    checkpoints.save(15, state(15), {})
    assert steps(checkpoints.folder) == [5, 15]


def test_a_disk_that_fills_up_meanwhile_and_a_run_that_goes_on(
    saver: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_writer(
        folder, monkeypatch, f"import os\ndef full(fd): raise OSError({errno.EDQUOT}, 'Disk quota exceeded')\nos.fsync = full"
    )
    checkpoints = saver(folder, go_on=True)
    checkpoints.save(10, state(10), {})
    assert "could not be written to" in caplog.text and "no space: " in caplog.text
    assert "going on, as checkpoint.on_failure=continue says" in caplog.text
    assert not list(checkpoints.folder.iterdir())


def test_a_writer_that_is_killed_is_told(folder: Path, saver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_writer(folder, monkeypatch, "import os, signal\nos.fsync = lambda fd: os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(FaultError, match="step 10 could not be written .*: the writer got SIGKILL; those before it stand"):
        saver(folder).save(10, state(10), {})


@pytest.mark.parametrize("culprit", [0, 1, 2])
@pytest.mark.parametrize("go_on", [False, True])
def test_one_part_that_cannot_be_written_spoils_no_other_save(culprit: int, go_on: bool, folder: Path) -> None:
    """Rank 0 waits for no part that will not come; all ranks have the one reason."""
    code = f"import os\nif os.environ.get('CULPRIT'):\n  def no(fd): raise OSError({errno.EIO}, 'Input/output error')\n  os.fsync = no"
    (folder / "sitecustomize.py").write_text(code)

    def train(world: World) -> tuple[str, int]:
        os.environ.update({"PYTHONPATH": str(folder)} | ({"CULPRIT": "1"} if world.rank == culprit else {}))
        checkpoints = Checkpointer(folder / "checkpoints", world, go_on=go_on)
        told = ""
        try:
            checkpoints.save(4, state(4), {})
            checkpoints.finish()
        except FaultError as error:
            told = str(error)
        with closing(checkpoints):
            found = checkpoints.load()
            return told, found["step"] if found else -1

    found = on_ranks(3, train)
    assert [step for _, step in found] == [-1] * 3
    (told,) = {told for told, _ in found}
    assert told == "" if go_on else f" rank={culprit}: " in told and "Input/output error" in told
    assert not list((folder / "checkpoints").iterdir())


def test_what_ends_a_save_before_it_is_written_is_told_too(folder: Path, saver: Any) -> None:
    checkpoints = saver(folder, go_on=True)
    Checkpointer.save(checkpoints, 1, {"weights": torch.zeros(3, device="meta")}, {}, behind=True)
    checkpoints.join()
    assert not checkpoints.finish()
    with pytest.raises(FaultError, match="step 1 could not be written .*UnpicklingError"):
        saver(folder).save(1, {"rate": numpy.float64(0.1)}, {})  # it could be saved, and never loaded
    checkpoints.save(2, state(2), {})
    assert steps(checkpoints.folder) == [2]


def test_a_trainer_of_the_users_own_is_not_the_writers(folder: Path, saver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "trainer.py").write_text("raise SystemExit(9)")
    (folder / "json.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(folder)
    checkpoints = saver(folder)
    checkpoints.save(1, state(1), {})
    assert steps(checkpoints.folder) == [1]


def test_a_checkpoint_of_another_format_is_told(folder: Path, saver: Any) -> None:
    old = folder / "checkpoints" / "step-00000005"
    old.mkdir(parents=True)
    (old / "state.pt").write_bytes(b"PK")
    entry = {"bytes": 2, "sha256": hashlib.sha256(b"PK").hexdigest()}
    (old / MANIFEST).write_text(json.dumps({"step": 5, "files": {"state.pt": entry}}))
    with pytest.raises(ConfigError, match="step-00000005 cannot be read on .*holds no parts .another version of the kit"):
        saver(folder).load()
    with pytest.raises(ConfigError, match="step-00000005: holds no parts"):
        export(folder / "checkpoints", folder / "m.pt")


def test_a_writer_that_was_killed_is_replaced(folder: Path, saver: Any) -> None:
    checkpoints = saver(folder, go_on=True)
    checkpoints.save(1, state(1), {})
    os.kill(checkpoints._flight.writer._process.pid, signal.SIGKILL)
    for step in (2, 3):
        checkpoints.save(step, state(step), {})
    assert steps(checkpoints.folder) == [1, 3]


def test_what_others_put_there_does_no_harm(folder: Path, saver: Any) -> None:
    checkpoints = saver(folder)
    for name in ("latest", "step-backup01", "step-backup.tmp"):
        (checkpoints.folder / name).mkdir(parents=True)
    checkpoints.save(123456789, {**state(5), "step": 7}, {})
    assert steps(checkpoints.folder) == [123456789] and checkpoints.load()["step"] == 123456789
    assert (checkpoints.folder / "step-backup01").is_dir()


def test_storage_that_does_not_answer_is_not_damage(folder: Path, saver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saver(folder)
    checkpoints.save(5, state(5), {})
    monkeypatch.setattr(stored, "_sha256", lambda path: (_ for _ in ()).throw(OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(ConfigError, match=r"run_dir: .*Stale file handle; start again when the storage answers"):
        checkpoints.load()
    assert "cannot be read" in listing(checkpoints.folder)
    monkeypatch.undo()
    assert checkpoints.load()["step"] == 5


def test_a_save_in_flight_is_waited_for(folder: Path, saver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    in_writer(folder, monkeypatch, SLOW.format(seconds=0.3))
    checkpoints = saver(folder)
    for step in (1, 2):
        Checkpointer.save(checkpoints, step, state(step), {})
        assert steps(checkpoints.folder) == ([] if step == 1 else [1]), "the second began when the first was whole"
    checkpoints.finish()
    assert steps(checkpoints.folder) == [1, 2]


def test_what_changes_after_the_join_is_not_in_the_checkpoint(folder: Path, saver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte what it was at the save, however slowly it was copied; without the join it would be torn."""
    real = Arena.copy
    monkeypatch.setattr(Arena, "copy", lambda *given: (time.sleep(0.02), real(*given))[1])
    for joined in (True, False):
        checkpoints, weights = saver(folder / str(joined)), {str(number): torch.zeros(1000) for number in range(10)}
        Checkpointer.save(checkpoints, 1, weights, {}, behind=True)
        if joined:
            checkpoints.join()
        for value in weights.values():
            value.fill_(7)
        checkpoints.finish()
        found = checkpoints.load()
        assert found is not None
        assert all(torch.equal(found[name], torch.zeros(1000)) for name in weights) == joined


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3), st.booleans()), min_size=0, max_size=12),
    st.integers(1, 5),
)
@settings(deadline=None, max_examples=60)
def test_any_state_comes_back_as_it_was(kinds: list[tuple[torch.dtype, list[int], bool]], ranks: int) -> None:
    """Laid out over any number of ranks, with every type, shape and stride."""
    state: dict[str, Any] = {"empty": [], "pair": (1, None), 3: {"deep.er": [2.5, "text", b"x"]}}
    for number, (dtype, shape, turned) in enumerate(kinds):
        tensor = (torch.rand(shape) * 100).to(dtype)
        state[f"t{number}"] = [tensor.permute(tuple(reversed(range(tensor.dim())))) if turned else tensor]
    tensors, stripped = take_apart(state)
    with tempfile.TemporaryDirectory() as name:
        for rank, names in enumerate(share_out(tensors, ranks)):
            mine = {each: tensors[each] for each in names}
            rest = to_bytes({"own": rank, **({"state": stripped} if rank == 0 else {})})
            layout, arena = lay_out(mine, len(rest)), Arena()
            arena.reserve(layout.size)
            arena.put(0, layout.header)
            arena.put(layout.offsets[REST], rest)
            for each, tensor in mine.items():
                arena.copy(layout.offsets[each], tensor)
            path = Path(name) / part_name(rank)
            path.write_bytes(arena.memory[: layout.size].numpy().tobytes())
            arena.close()
            assert set(load_file(path)) == {*names, REST}, "any program that reads safetensors reads it"
        (Path(name) / MANIFEST).write_text(json.dumps({"files": [part_name(rank) for rank in range(ranks)]}))
        found = read(Path(name))
    assert found.pop("ranks") == list(range(ranks)) and found.keys() == state.keys() and found[3] == state[3]
    for number in range(len(kinds)):
        was, now = state[f"t{number}"][0], found[f"t{number}"][0]
        assert was.dtype == now.dtype and was.shape == now.shape and torch.equal(was, now)
        assert was.is_contiguous() == now.is_contiguous() and (was.is_contiguous() or was.stride() == now.stride())


def test_all_ranks_load_the_one_that_rank_0_chose(folder: Path) -> None:
    def train(world: World) -> tuple[int, list[int]]:
        with closing(Checkpointer(folder / "checkpoints", world)) as checkpoints:
            checkpoints.save(4, state(4), {"rank": world.rank})
            found = checkpoints.load()
            assert found is not None
            return found["step"], [own["rank"] for own in found["ranks"]]

    assert on_ranks(3, train) == [(4, [0, 1, 2])] * 3


def test_a_folder_that_one_rank_cannot_see_is_told(folder: Path) -> None:
    def train(world: World) -> str:
        with closing(Checkpointer(folder / "checkpoints", world)) as checkpoints:
            checkpoints.save(4, state(4), {})
            checkpoints.finish()
        mine = Checkpointer(folder / ("checkpoints" if world.rank == 0 else "elsewhere"), world)
        try:
            return str(mine.load() is not None)
        except ConfigError as error:
            return str(error)

    first, second = on_ranks(2, train)
    assert first == "True" and "cannot be read on" in second and "storage that all nodes share" in second


def test_the_random_state_goes_on_where_it_was(folder: Path, saver: Any) -> None:
    seed_all(3)
    checkpoints = saver(folder)
    checkpoints.save(1, {}, {"random": random_state()})
    expected = torch.rand(3).tolist(), random.random(), numpy.random.rand()
    seed_all(4)
    found = checkpoints.load()
    assert found is not None
    set_random_state(found["ranks"][0]["random"])
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == expected


@pytest.mark.ranks
def test_writers_that_only_wait_for_a_part_look_idle_and_the_one_that_hangs_does_not(folder: Path) -> None:
    """Whoever looks for the culprit of a save that does not end sees it so."""
    (folder / "sitecustomize.py").write_text(
        "import os\nif os.environ.get('CULPRIT'):\n  import time\n  os.fsync = lambda fd: time.sleep(600)"
    )

    def train(world: World) -> bool:
        os.environ.update({"PYTHONPATH": str(folder)} | ({"CULPRIT": "1"} if world.rank == 1 else {}))
        with closing(Checkpointer(folder / "checkpoints", world)) as checkpoints:
            checkpoints.save(4, state(4), {})
            writer = checkpoints._flight.writer
            assert writer is not None
            written = folder / "checkpoints" / checkpoints.place._staging(4, checkpoints._flight.saves[0].mark).name  # type: ignore[attr-defined]
            assert wait_until(
                lambda: (written / "part-00001.safetensors").exists() and (written / "part-00000.json").exists(), 60
            )
            with tempfile.TemporaryFile() as file:

                def idle() -> bool:
                    (found,) = [each for each in collect(writer._process.pid, file.fileno()) if each.writes]
                    return found.idle

                seen = wait_until(lambda: idle() == (world.rank != 1), 20)
                often = sum(idle() for _ in range(20))  # rank 0's looks for the part now and then
            world.largest_numbers(0)
            assert seen
            return often > 10

    assert on_ranks(3, train) == [True, False, True]


@pytest.mark.parametrize("seconds", [0.4, 0])
def test_a_save_that_waits_for_the_one_before_it_is_told_once(
    seconds: float, folder: Path, saver: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_writer(folder, monkeypatch, SLOW.format(seconds=seconds))
    checkpoints = saver(folder)
    for step in (10, 20, 30):
        Checkpointer.save(checkpoints, step, state(step), {})
        if not seconds:
            checkpoints.finish()  # what is waited for outside a save is not told
    checkpoints.finish()
    told = re.findall(
        r"warning: the save of step (\d+) waited \d+\.\d s for that of step (\d+), and .*; raise checkpoint.every_steps",
        caplog.text,
    )
    assert told == ([("20", "10")] if seconds else [])


def test_a_listing_has_damaged_and_unfinished_ones_too(folder: Path, saver: Any) -> None:
    checkpoints = saver(folder)
    for step in (5, 10, 15):
        checkpoints.save(step, state(step), {})
    damage_bit(checkpoints.folder / "step-00000015" / PART)
    assert checkpoints.load()["step"] == 10
    damage_bit(checkpoints.folder / "step-00000010" / PART)
    (checkpoints.folder / "step-00000020.1f.tmp").mkdir()
    told = [line.split() for line in listing(checkpoints.folder).splitlines()[1:]]
    assert [(words[0], words[4]) for words in told] == [
        ("5", "whole"),
        ("10", "damaged:"),
        ("15", "damaged"),
        ("20", "unfinished"),
    ]
    assert whole_or_refused(checkpoints.place).name == "step-00000005"


@pytest.mark.parametrize(("times", "told"), [(3.5, True), (4.5, False)])
def test_a_disk_must_hold_one_more_than_is_kept(times: float, told: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest goes when the newest is whole."""
    need = 4000
    monkeypatch.setattr(room, "_free", lambda place: int(times * need))
    doubt = room.check_disk(folder / "checkpoints", [{"weights": torch.zeros(need // 4)}], 3)
    assert ("checkpoint.keep_last=3 needs 4 of them" in (doubt or "")) == told
