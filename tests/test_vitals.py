"""How long a rank may show no progress, by what it is at; and what is read of its processes' stacks."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.node.ranks import Rank
from trainer.node.stacks import Stack, threads
from trainer.node.verdict import Running
from trainer.node.vitals import Limits, Vitals
from trainer.pulse import _PLACE, _SEQUENCE, SIZE, Phase, Pulse

STEP = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


class Watched:
    """A rank of our own making, and a clock."""

    def __init__(self, stall_seconds: float | None = None, world_size: int = 2) -> None:
        self.now, self.state = 1000.0, "S"
        self.vitals = Vitals(Limits(stall_seconds, 1800), world_size, self.now)
        self._memory = mmap.mmap(self.vitals.pulse_fd, SIZE)
        self.pulse = Pulse(self._memory)

    def later(self, seconds: float, excused: bool = False) -> None:
        """Time goes by; the node process looks."""
        self.now += seconds
        self.vitals.look(self.now, self.state, excused)

    def step(self, seconds: float) -> None:
        """One optimizer step."""
        for phase in STEP:
            self.later(seconds / len(STEP))
            self.pulse.enter(phase)
        self.pulse.stepped(self.pulse.step + 1)
        self.later(0)

    def at(self, phase: Phase) -> None:
        self.pulse.enter(phase)
        self.later(0)

    def collectives(self, number: int) -> None:
        _SEQUENCE.pack_into(self._memory, _PLACE.size, number)
        self.later(0)

    @property
    def left(self) -> float:
        return self.vitals.left(self.now)

    def close(self) -> None:
        self._memory.close()
        self.vitals.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


@pytest.fixture
def strict() -> Iterator[Watched]:
    """With watch.stall_seconds=6."""
    made = Watched(6)
    yield made
    made.close()


@given(st.lists(st.floats(0.01, 100), min_size=2, max_size=20))
def test_a_step_may_take_20_times_the_slowest_but_two_minutes_at_least(seconds: list[float]) -> None:
    rank = Watched()
    for each in seconds:
        rank.step(each)
    rank.at(Phase.DATA)
    assert rank.left == pytest.approx(max(120, 20 * max(seconds[1:])), rel=1e-6), "the first one does not count"
    rank.later(7)
    assert rank.left == pytest.approx(max(120, 20 * max(seconds[1:])) - 7, rel=1e-6)
    rank.close()


def test_a_step_that_hangs_does_not_raise_its_own_limit(watched: Watched) -> None:
    for _ in range(3):
        watched.step(1)
    watched.at(Phase.FORWARD)
    watched.later(119)
    assert watched.left == pytest.approx(1)
    watched.later(2)
    assert watched.left == pytest.approx(-1)


def test_what_the_user_has_set_counts_for_steps_only(strict: Watched) -> None:
    assert strict.left == 1800, "its imports"
    strict.at(Phase.SETUP)
    assert strict.left == 1800
    for phase in STEP:
        strict.at(phase)
        assert strict.left == 1800, "the first step compiles"
    strict.step(500)
    for phase in (*STEP, Phase.BETWEEN):
        strict.at(phase)
        assert strict.left == 6
    strict.at(Phase.SAVE)
    assert strict.left == 1800
    strict.at(Phase.EVALUATION)
    assert strict.left == 1800, "its first batch"
    strict.at(Phase.TEARDOWN)
    assert strict.left == 6


@pytest.mark.parametrize("phase", [Phase.SETUP, Phase.SAVE])
def test_ranks_that_ask_each_other_whether_all_are_ready_do_not_get_on(phase: Phase, watched: Watched) -> None:
    watched.at(phase)
    for number in range(100):
        watched.later(20)
        watched.collectives(number)
    assert watched.left == -200


def test_a_resumed_run_has_a_first_step_too(strict: Watched) -> None:
    strict.pulse.step = 5000
    strict.at(Phase.DATA)
    assert strict.left == 1800


def test_an_evaluation_learns_from_its_own_batches(strict: Watched) -> None:
    strict.step(1)
    strict.at(Phase.EVALUATION)
    for seconds in (2.0, 7.0, 1.0):
        strict.later(seconds)
        strict.pulse.stay(Phase.EVALUATION)
        strict.later(0)
    assert strict.left == 140, "20 times the slowest of them"
    strict.later(141)
    assert strict.left == -1


def test_a_rank_in_the_hands_of_a_debugger_has_all_the_time(strict: Watched) -> None:
    strict.step(1)
    strict.step(1)
    strict.at(Phase.FORWARD)
    strict.state = "t"
    for _ in range(100):
        strict.later(60)
        assert strict.left == 6
    strict.state = "S"
    strict.later(7)
    assert strict.left == -1


def test_a_node_that_was_suspended_does_not_count_the_time(strict: Watched) -> None:
    strict.step(1)
    strict.step(1)
    strict.at(Phase.FORWARD)
    strict.later(3600, excused=True)
    assert strict.left == 6
    strict.state = "T"  # the scheduler continues this node first
    strict.later(3)
    strict.later(3600, excused=True)
    assert strict.left >= 6


def test_a_suspension_is_not_taken_for_a_slow_step() -> None:
    rank = Watched()
    for _ in range(3):
        rank.step(1)
    rank.later(3600, excused=True)
    rank.step(1)
    rank.at(Phase.DATA)
    assert rank.left < 3600, "the limit is still one of steps of a second"
    rank.close()


@pytest.mark.parametrize("phase", [Phase.EVALUATION, Phase.SAVE])
def test_an_evaluation_or_a_save_is_not_taken_for_a_slow_step(phase: Phase, watched: Watched) -> None:
    for _ in range(3):
        watched.step(1)
        watched.at(phase)
        for _ in range(10):
            watched.later(60)
            watched.pulse.stay(phase)
    watched.step(1)
    watched.at(Phase.DATA)
    assert watched.left == 120


def test_a_rank_that_has_failed_says_so_and_has_three_seconds_to_end(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    running = Running(Rank(0, 0, "train.py", [], {}, "", ""), 77, watched.vitals)
    watched.step(1)
    assert not watched.vitals.leaving and not running.stuck
    watched.pulse.leave()
    watched.vitals.ask()  # and what else is written there changes nothing
    watched.step(1)
    assert watched.vitals.leaving
    running.leaving = 50.0
    for now, stuck in ((52.9, False), (53.1, True)):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        assert running.stuck == stuck
    running.status = 1
    assert not running.stuck and running.failed


def test_a_stopped_rank_has_the_time_of_a_step_whatever_it_is_at(strict: Watched, watched: Watched) -> None:
    strict.at(Phase.SETUP)
    strict.state = "T"
    strict.later(0)
    strict.later(5)
    assert strict.left == 1
    strict.state = "S"
    strict.later(1)
    assert strict.left > 1700, "it goes on"
    watched.state = "T"
    watched.later(0)
    watched.later(61)
    assert watched.left == -1


@pytest.mark.parametrize(
    ("stall_seconds", "world_size", "collectives", "left"),
    [(None, 2, 0, 1800), (None, 2, 9, 600), (6, 2, 0, 1800), (6, 2, 9, 6), (None, 1, 9, math.inf), (6, 1, 0, math.inf)],
)
def test_a_script_that_says_nothing(stall_seconds: float | None, world_size: int, collectives: int, left: float) -> None:
    rank = Watched(stall_seconds, world_size)
    rank.collectives(collectives)
    assert rank.left == left
    rank.later(5)
    rank.collectives(collectives + 1)
    assert rank.left == (math.inf if world_size == 1 else stall_seconds or 600)
    rank.close()


ANSWER = """Thread 0x00007f5c2b7fe640 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait
  File "/home/u/a "b" c.py", line 7 in <lambda>

Current thread 0x00007f5c4a1c5740 (most recent call first):
  File "/home/u/data.py", line 12 in __getitem__
  File "/venv/lib/python3.11/site-packages/torch/utils/data/_utils/fetch.py", line 52 in <listcomp>
"""


def test_the_main_thread_comes_first() -> None:
    main, other = threads(ANSWER)
    assert main[0] == ("/home/u/data.py", 12, "__getitem__") and len(main) == 2
    assert other[1] == ('/home/u/a "b" c.py', 7, "<lambda>")
    assert list(threads("")) == [] and list(threads("cut off in the mid")) == []


TORCH = "/venv/lib/python3.11/site-packages/torch"
WORKER = [("/usr/lib/python3.11/selectors.py", 415, "select"), ("/usr/lib/python3.11/multiprocessing/queues.py", 113, "get")]
LOOP = (f"{TORCH}/utils/data/_utils/worker.py", 335, "_worker_loop")


@pytest.mark.parametrize(
    ("frames", "collective", "loads", "idle"),
    [
        ([(f"{TORCH}/distributed/distributed_c10d.py", 9, "barrier"), ("/h/t.py", 3, "save")], "barrier", False, False),
        (
            [
                (f"{TORCH}/distributed/distributed_c10d.py", 9, "all_gather"),
                (f"{TORCH}/distributed/c10d_logger.py", 81, "wrapper"),
                (f"{TORCH}/distributed/distributed_c10d.py", 99, "all_gather_object"),
                ("/h/t.py", 3, "save"),
            ],
            "all_gather_object",
            False,
            False,
        ),
        ([(f"{TORCH}/autograd/graph.py", 9, "_engine_run_backward"), ("/h/t.py", 3, "step")], "backward", False, False),
        ([(f"{TORCH}/nn/parallel/distributed.py", 9, "_distributed_broadcast_coalesced")], "broadcast", False, False),
        ([("/h/m.py", 4, "forward"), (f"{TORCH}/nn/parallel/distributed.py", 9, "forward")], None, False, False),
        ([("/usr/lib/python3.11/queue.py", 1, "get"), (f"{TORCH}/utils/data/dataloader.py", 9, "_get_data")], None, True, False),
        ([*WORKER, LOOP], None, False, True),
        ([("/h/data.py", 1, "get"), (f"{TORCH}/utils/data/_utils/fetch.py", 1, "fetch"), LOOP], None, False, False),
        ([], None, False, False),
    ],
)
def test_what_a_stack_tells(frames: list[tuple[str, int, str]], collective: str | None, loads: bool, idle: bool) -> None:
    stack = Stack(7, "S", "futex_wait_queue", [frames] if frames else [])
    assert (stack.collective, stack.loads, stack.idle) == (collective, loads, idle)
    assert stack.waits == "waits for a lock"


def test_the_place_is_the_users() -> None:
    stack = Stack(7, "S", "", [[(f"{TORCH}/functional.py", 1, "einsum"), (os.__file__, 2, "x"), ("/h/model.py", 31, "forward")]])
    assert stack.place == "model.py:31 in forward" and stack.waits == "is"
    assert "process 7, state S\nmain thread\n" in stack.text() and '  File "/h/model.py", line 31 in forward' in stack.text()
