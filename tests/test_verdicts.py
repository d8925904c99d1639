"""Who is named when a job stands still: for any number of ranks, whoever holds it up and however; without processes."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.errors import ExitCode, Fault
from trainer.node.memory import MemoryKills
from trainer.node.ranks import Rank
from trainer.node.stall import Finding, Sight, holding_up, verdict
from trainer.node.verdict import Running, describe
from trainer.pulse import Phase

IN_BACKWARD = Finding("train.py:9 in step", "waits for a lock", "backward")
PER_NODE = 4


def sight(rank: int, **more: object) -> Sight:
    """A rank that waits in the exchange of gradients, and has waited too long."""
    node = rank // PER_NODE
    made = Sight(rank, f"n{node}", node, 1000 + rank, "S", 41, 4, Phase.BACKWARD, 100, 30.0, -1.0, IN_BACKWARD)
    return replace(made, **more)  # type: ignore[arg-type]


def named(sights: Sequence[Sight]) -> Fault:
    return verdict(sights, holding_up(sights))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Sight], int]:
    """Any number of ranks, and one of them."""
    size = draw(st.integers(2, 40))
    return [sight(rank) for rank in range(size)], draw(st.integers(0, size - 1))


BEHIND = st.sampled_from(
    [{"step": 40}, {"place": 3, "phase": Phase.FORWARD}, {"place": 2, "phase": Phase.DATA}, {"sequence": 99}]
)
BUSY = Finding("data.py:7 in load", "sleeps")


@given(worlds(), BEHIND, st.randoms(use_true_random=False))
def test_the_one_that_is_behind_is_named_whoever_it_is(world: tuple[list[Sight], int], behind: dict[str, object], dice) -> None:
    sights, culprit = world
    sights[culprit] = replace(sights[culprit], finding=BUSY, **behind)  # type: ignore[arg-type]
    dice.shuffle(sights)
    assert [each.rank for each in holding_up(sights)] == [culprit]
    fault = named(sights)
    assert (fault.rank, fault.node_rank, fault.host) == (culprit, culprit // PER_NODE, f"n{culprit // PER_NODE}")
    assert (fault.code, fault.exit_code) == (
        "C2",
        ExitCode.STALLED,
    ) and "sleeps in data.py:7 in load, the others wait" in fault.cause


@given(worlds(), BEHIND, st.floats(0, 1000))
def test_nobody_is_named_while_the_last_of_all_has_time(
    world: tuple[list[Sight], int], behind: dict[str, object], left: float
) -> None:
    """It may be in a first step or a save, which may take longer, or a debugger may hold it."""
    sights, last = world
    sights[last] = replace(sights[last], left=left, **behind)  # type: ignore[arg-type]
    assert holding_up(sights) == []


@given(worlds(), st.data())
def test_nobody_is_named_before_a_deadline(world: tuple[list[Sight], int], data: st.DataObject) -> None:
    sights = [replace(each, left=data.draw(st.floats(0, 100)), step=data.draw(st.integers(40, 41))) for each in world[0]]
    assert holding_up(sights) == []


@given(worlds(), BEHIND)
def test_a_rank_that_left_is_named_before_those_that_wait_for_it(
    world: tuple[list[Sight], int], behind: dict[str, object]
) -> None:
    sights, culprit = world
    sights[culprit] = replace(sights[culprit], state="exit 0", finding=Finding(), **behind)  # type: ignore[arg-type]
    fault = named(sights)
    assert (fault.code, fault.rank, fault.exit_code) == ("D5", culprit, ExitCode.RANK_FAILED)


@given(worlds())
def test_of_ranks_that_said_goodbye_none_is_blamed_for_one_that_does_not_end(world: tuple[list[Sight], int]) -> None:
    sights, last = world
    sights = [replace(each, state="exit 0", phase=Phase.DONE, place=9, finding=Finding()) for each in sights]
    sights[last] = sight(last, phase=Phase.TEARDOWN, place=8, finding=BUSY)
    fault = named(sights)
    assert (fault.code, fault.rank) == ("C2", last) and "data.py:7" in fault.cause


@given(worlds(), BEHIND)
def test_a_stopped_rank_is_named_even_where_all_are_equally_far(
    world: tuple[list[Sight], int], behind: dict[str, object]
) -> None:
    sights, culprit = world
    for extra in (behind, {}):
        sights[culprit] = replace(sights[culprit], state="T", finding=Finding(), **extra)  # type: ignore[arg-type]
        fault = named(sights)
        assert (fault.code, fault.rank) == ("C2", culprit)
        assert f"stopped by a signal (pid {1000 + culprit} is in state T), the others wait for it" in fault.cause


@given(worlds(), st.floats(0, 1800))
def test_a_stopped_rank_is_named_also_where_the_others_have_time_for_what_all_are_at(
    world: tuple[list[Sight], int], left: float
) -> None:
    sights, culprit = world
    start = {"step": 0, "place": 1, "phase": Phase.SETUP}
    sights = [replace(each, left=left, **start) for each in sights]  # type: ignore[arg-type]
    assert holding_up(sights) == []
    sights[culprit] = replace(sights[culprit], state="T", left=-1.0, finding=Finding())
    assert [each.rank for each in holding_up(sights)] == [culprit] == [named(sights).rank]
    ahead = [replace(each, place=0) if each.rank == (culprit + 1) % len(sights) else each for each in sights]
    assert holding_up(ahead) == [], "another is further behind, and has time"


@given(worlds())
def test_where_all_are_in_the_same_collective_it_is_the_network(world: tuple[list[Sight], int]) -> None:
    fault = named(world[0])
    assert (fault.code, fault.exit_code) == ("C3", ExitCode.STALLED) and "all ranks are in the same backward" in fault.cause


@given(worlds(), st.sampled_from([(3, Phase.FORWARD, 100), (4, Phase.BACKWARD, 100), (4, Phase.BACKWARD, 99)]))
def test_one_in_another_collective_is_named_also_where_all_are_equally_far(world, where: tuple[int, Phase, int]) -> None:
    sights, culprit = world
    alone = Finding("train.py:12 in save", "waits for a lock", "barrier")
    place, phase, sequence = where
    sights[culprit] = replace(sights[culprit], finding=alone, place=place, phase=phase, sequence=sequence)
    fault = named(sights)
    assert fault.code == "C5"
    if len(sights) > 2 or place == 3 or sequence == 99:
        assert fault.rank == culprit and "is in barrier (train.py:12 in save), while the others are in backward" in fault.cause
    else:  # of two, either may be wrong
        assert "barrier" in fault.cause and "backward" in fault.cause


@given(worlds(), st.booleans())
def test_an_error_that_one_has_in_hand_is_the_cause_unless_all_have_one(world, everywhere: bool) -> None:
    sights, culprit = world
    alone = Finding("train.py:12 in save", "waits for a lock", "barrier", error="ValueError: bad (train.py:9)")
    for number, each in enumerate(sights):
        finding = replace(each.finding, error=alone.error if everywhere else "")
        sights[number] = replace(each, finding=alone if number == culprit else finding)
    fault = named(sights)
    if everywhere:
        assert fault.code == "C5" and "ValueError" not in fault.cause
    else:
        assert (fault.code, fault.rank, fault.exit_code) == ("C1", culprit, ExitCode.STALLED)
        assert fault.cause.startswith(
            "ValueError: bad (train.py:9); handling that, it is in barrier (train.py:12 in save), while "
        )


def test_in_a_script_the_lines_of_both_sides_are_told() -> None:
    places = [Finding("train.py:8 in main", "waits for a lock", "all_reduce"), Finding("train.py:5 in main", "waits", "barrier")]
    sights = [sight(rank, step=0, place=0, phase=Phase.START, finding=places[rank == 2]) for rank in range(4)]
    fault = named(sights)
    assert (fault.code, fault.rank) == ("C5", 2)
    assert (
        "is in barrier (train.py:5 in main), while the others are in all_reduce (train.py:8 in main) (after 100 " in fault.cause
    )


@pytest.mark.parametrize(
    ("state", "finding", "code", "words", "fix"),
    [
        ("D", Finding(), "C2", "in uninterruptible sleep (pid 1001 is in state D)", "kernel's log"),
        ("S", Finding(loads=True), "E4", "waits for its loader workers: none is left", "what the dataset does"),
        (
            "S",
            Finding(loads=True, workers=("pid 7 sleeps in data.py:3 in get",)),
            "E4",
            "pid 7 sleeps in data.py:3",
            "what the dataset",
        ),
        (
            "S",
            Finding(loads=True, workers=("pid 7 waits for a lock in d.py:3 in g",)),
            "E4",
            "a lock in d.py:3",
            "thread held the lock",
        ),
        ("S", Finding(), "C2", "does not get on, the others wait", "trainer explain"),
    ],
)
def test_what_a_rank_is_at(state: str, finding: Finding, code: str, words: str, fix: str) -> None:
    fault = named([sight(0), sight(1, state=state, place=2, phase=Phase.DATA, finding=finding), sight(2)])
    assert (fault.code, fault.rank, fault.exit_code) == (code, 1, ExitCode.STALLED)
    assert words in fault.cause and fix in fault.fix and "(step 42, data loading, no progress for 30 s)" in fault.cause


@given(worlds())
def test_in_a_save_that_does_not_end_the_writer_that_has_work_is_at_fault(world: tuple[list[Sight], int]) -> None:
    sights, culprit = world  # the ranks ask each other whether all is written, some once more than others
    sights = [replace(each, phase=Phase.SAVE, sequence=100 + each.rank % 2) for each in sights]
    sights[culprit] = replace(sights[culprit], finding=replace(sights[culprit].finding, writer="pid 9 is in state D"))
    fault = named(sights)
    assert (fault.code, fault.rank) == ("G9", culprit)
    assert "does not get on with a save: pid 9 is in state D, the others wait for it" in fault.cause


def failed(folder: Path, status: int, log: str = "", **reason: object) -> Running:
    """A rank that has ended."""
    (folder / "rank.log").write_text(log)
    rank = Rank(3, 1, "trainer.train", [], {}, str(folder / "rank.log"), str(folder / "error.json"))
    return Running(rank, 77, None, status, 0.0, reason)  # type: ignore[arg-type]


def told(running: Running, memory: str | None = None) -> Fault:
    return describe(running, "n1", 1, memory)


@pytest.mark.parametrize(
    ("message", "code", "fix"),
    [
        ("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)", "E1", "/dev/shm"),
        ("unable to write to file </torch_26082_8359422_0>: No space left on device (28)", "E1", "/dev/shm"),
        ("unable to mmap 64 bytes from file </torch_1_2_3>: Cannot allocate memory (12)", "E1", "/dev/shm"),
        (
            "DataLoader worker (pid 47) is killed by signal: Bus error. It is possible that dataloader's workers are out of",
            "E1",
            "shm",
        ),
        ("Too many open files. Communication with the workers is no longer possible.", "E2", "ulimit -n"),
        ("received 0 items of ancdata", "E2", "ulimit -n"),
        ("DataLoader worker (pid 47) is killed by signal: Killed. ", "E3", "memory"),
        ("DataLoader worker (pid(s) 14772, 14773) exited unexpectedly", "E3", "memory"),
        ("DataLoader worker (pid 47) is killed by signal: Segmentation fault. ", "C1", "native code"),
        ("DataLoader worker (pid 47) is killed by signal: Aborted. ", "C1", "native code"),
        ("DataLoader worker (pid 47) exited unexpectedly with exit code 1. Details are lost due to", "C1", "ends its process"),
        ("DataLoader timed out after 60 seconds", "E4", "stall_seconds"),
        ("Pin memory thread exited unexpectedly", "E7", "pin_memory"),
        ("index 7 is out of range", "C1", "traceback"),
    ],
)
def test_what_torch_says_of_its_loader(message: str, code: str, fix: str, tmp_path: Path) -> None:
    fault = told(failed(tmp_path, 1, type="RuntimeError", message=message, where="data.py:3"))
    assert (fault.code, fault.rank, fault.host) == (code, 3, "n1") and fix in fault.fix, fault
    assert message.strip()[:20] in fault.cause and "(data.py:3)" in fault.cause


def test_a_worker_that_was_killed_for_memory(tmp_path: Path) -> None:
    message = "DataLoader worker (pid 47) is killed by signal: Killed."
    fault = told(
        failed(tmp_path, 1, type="RuntimeError", message=message), "the memory limit of 4.0 GiB was reached (oom_kill 1)"
    )
    assert fault.code == "E3" and fault.cause.startswith(
        "the memory limit of 4.0 GiB was reached (oom_kill 1): RuntimeError: Data"
    )


def test_a_loss_that_the_users_own_code_tells_of_is_its_own(tmp_path: Path) -> None:
    words = {"type": "RuntimeError", "message": "failed to connect to the feature store"}
    assert failed(tmp_path, 1, **words, own=False).lost_a_peer
    assert not failed(tmp_path, 1, **words, own=True).lost_a_peer
    assert not failed(tmp_path, 1, type="ConnectionResetError", message="Connection reset by peer").lost_a_peer


GONE = {
    "type": "RuntimeError",
    "message": "[pair.cc:534] Connection closed by peer [10.0.0.1]:9",
    "where": "t.py:8",
    "own": False,
}


def test_what_the_users_code_made_of_the_loss_of_a_peer_is_no_cause(tmp_path: Path) -> None:
    wrapped = {"type": "TrainingError", "message": "step 3 failed", "where": "t.py:9", "own": False, "first": GONE}
    assert failed(tmp_path, 1, **wrapped).lost_a_peer
    assert failed(tmp_path, 1, **GONE).lost_a_peer


def test_who_loses_its_peers_on_its_way_out_of_its_own_fault_is_the_cause(tmp_path: Path) -> None:
    """`finally: dist.barrier()`"""
    own = {"type": "ValueError", "message": "bad sample", "where": "data.py:3", "own": True}
    fault = told(failed(tmp_path, 1, **{**GONE, "first": own}))
    assert (fault.code, fault.exit_code) == ("C1", ExitCode.RANK_FAILED) and fault.cause == "ValueError: bad sample (data.py:3)"


@pytest.mark.parametrize(
    ("what", "lost"),
    [
        ("[Rank 1] watchdog thread terminated: NCCL error: remote process exited or there was a network error", True),
        ("[pair.cc:534] Connection closed by peer [10.0.0.1]:9", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("[enforce fail at pair.cc:450] op.preamble.length <= op.nbytes. 8 vs 4, collective mismatch", False),
    ],
)
def test_who_is_aborted_by_torch_as_a_peer_is_gone_is_no_cause(what: str, lost: bool, tmp_path: Path) -> None:
    log = f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {what}\n"
    running = failed(tmp_path, -signal.SIGABRT, log)
    assert running.lost_a_peer == lost
    fault = told(running)
    assert what in fault.cause and fault.cause.startswith("lost another rank" if lost else "killed by signal 6 (SIGABRT): ")
    assert not failed(tmp_path, -signal.SIGSEGV, log).lost_a_peer


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ({"type": "SystemExit", "message": "4"}, "exited with 4"),
        ({"type": "SystemExit", "message": "no data"}, "exited with 1: no data"),
        ({"type": "ValueError", "message": "bad"}, "ValueError: bad"),
    ],
)
def test_a_rank_that_has_not_ended_yet_is_told_by_its_reason(reason: dict[str, str], cause: str, tmp_path: Path) -> None:
    running = replace(failed(tmp_path, 0, **reason), status=None, leaving=7.0)
    assert told(running).cause == cause and not running.failed and not running.lost_a_peer


CRASH = """something before
terminate called after throwing an instance of 'std::runtime_error'
  what():  bad   size
Fatal Python error: Aborted

Thread 0x00007e (most recent call first):
  File "/home/u/logger.py", line 8 in flush

Current thread 0x00007f (most recent call first):
  File "/venv/lib/python3.11/site-packages/torch/functional.py", line 5 in einsum
  File "/home/u/model.py", line 31 in forward

Thread 0x00007d (most recent call first):
  File "/home/u/logger.py", line 9 in wait
"""


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_a_crash_in_native_code_tells_the_line_of_python(number: signal.Signals, tmp_path: Path) -> None:
    fault = told(failed(tmp_path, -number, CRASH))
    assert fault.cause == f"killed by signal {int(number)} ({number.name}): bad size in model.py:31 in forward"
    assert (fault.code, fault.exit_code) == ("C1", ExitCode.RANK_KILLED) and "rank.log" in fault.fix
    assert told(failed(tmp_path, -number)).cause == f"killed by signal {int(number)} ({number.name})"


def cgroup(folder: Path, version: int, kills: int, limit: str) -> tuple[Path, Path]:
    """A tree of cgroups with a job's below a machine's, and the file that says which one is ours."""
    root = folder / "cgroup" / ("" if version == 2 else "memory")
    job = root / "job"
    job.mkdir(parents=True, exist_ok=True)
    if version == 2:
        (job / "memory.events").write_text(f"low 0\nhigh 0\nmax 12\noom 1\noom_kill {kills}\noom_group_kill 0\n")
        (job / "memory.max").write_text(f"{limit}\n")
        (folder / "own").write_text("0::/job\n")
    else:
        (job / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        (job / "memory.limit_in_bytes").write_text(f"{'9223372036854771712' if limit == 'max' else limit}\n")
        (root / "memory.limit_in_bytes").write_text("9223372036854771712\n")
        (folder / "own").write_text("4:memory:/job\n1:cpu:/\n")
    return folder / "cgroup", folder / "own"


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("limit", "words"), [("4294967296", "the memory limit of 4.0 GiB was reached"), ("max", "the machine's memory was full")]
)
def test_kills_for_memory_are_counted_from_the_start_of_the_ranks(version: int, limit: str, words: str, tmp_path: Path) -> None:
    kills = MemoryKills(*cgroup(tmp_path, version, 3, limit))
    assert kills.words() is None
    cgroup(tmp_path, version, 5, limit)
    assert kills.words() == f"{words} (oom_kill 2)"


def test_no_cgroups_at_all(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path / "none", tmp_path / "none").words() is None
