"""No false alarm: what takes its time, or is held up from outside for a while, goes on. Each with a deadline of 6 s."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.conftest import DIGITS
from tests.jobs import TRAINER, finish, logs, metrics, overrides, processes_of, start
from tests.watched import ENDLESS, Job, faulty
from trainer.process import descendants, process_state

pytestmark = pytest.mark.ranks
STALL = "watch.stall_seconds=6"
SLOW_WRITER = """
import os, time
real = os.fsync
os.fsync = lambda fd: (time.sleep(3), real(fd))
"""


def test_a_slow_start_first_step_save_evaluation_and_steps_that_take_ten_times_as_long(folder: Path) -> None:
    """One rank starts 8 s late and compiles for 8 s, saves take longer than the deadline, and so does an evaluation, also its first
    batch. Steps take 0.4 s or 4 s."""
    (folder / "sitecustomize.py").write_text(SLOW_WRITER)  # in the writers
    rank = random.randrange(4)
    pace = f"{{rank: {rank}, start: 8, first: 8, step: 4, evaluation: 0.1}}"
    settings = [
        "model.target=tests.targets:leisurely",
        f"model.args={pace}",
        "data.target=tests.targets:faulty_data",
        "data.args={}",
    ]
    shape = ["resources.nodes=2", "resources.ranks_per_node=2", "training.max_steps=5", "training.batch_size=16"]
    often = ["training.log_every_steps=1", "checkpoint.every_steps=2", STALL]
    run = folder / "run"
    paths = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    front = start(*TRAINER, "run", str(DIGITS), overrides(run), *settings, *shape, *often, PYTHONPATH=paths)
    code, output = finish(front, 150)
    assert code == 0 and "FAULT" not in output, f"slow rank {rank}\n{output}{logs(run)}"
    times = [record["time"] for record in metrics(run)]
    took = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) == 5 and min(took[1::2]) > 3.5 and min(took[::2]) < 2, took
    assert len(metrics(run, "eval")) == 1 and metrics(run, "eval")[0]["time"] - times[-1] > 8, "the evaluation was long enough"
    assert not processes_of(run)


@pytest.fixture
def job(folder: Path) -> Iterator[Job]:
    made = Job(folder / "run", DIGITS, *ENDLESS, STALL, *faulty("", -1, 0, ""), "data.num_workers=1")
    made.at_step(3)
    yield made
    made.end()


def signal_all(number: int, first: int) -> None:
    """To a process and all that it has started."""
    for pid in (first, *descendants(first)):
        os.kill(pid, number)


def attached(pid: int, seconds: float) -> None:
    """Hold a process as a debugger does, from a process of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    debugger = os.fork()
    if debugger == 0:
        attach, detach = 16, 17  # ptrace(2)
        held = libc.ptrace(attach, pid, None, None) == 0 and os.waitpid(pid, 0)[0] == pid
        time.sleep(seconds)
        libc.ptrace(detach, pid, None, None)
        os._exit(0 if held else 1)
    time.sleep(1)
    state = process_state(pid)
    assert os.waitpid(debugger, 0)[1] == 0 and state == "t", "it could not be attached to"


def test_a_rank_that_is_stopped_for_a_while_a_job_that_is_suspended_and_a_debugger(job: Job) -> None:
    rank = random.randrange(4)
    print("rank", rank)
    os.kill(job.pid(rank), signal.SIGSTOP)
    time.sleep(3)
    os.kill(job.pid(rank), signal.SIGCONT)
    job.still_runs(2)

    first, second = job.node_pids  # a scheduler does not reach all machines in the same moment
    signal_all(signal.SIGSTOP, first)
    time.sleep(1)
    signal_all(signal.SIGSTOP, second)
    time.sleep(12)
    signal_all(signal.SIGCONT, first)
    time.sleep(1)
    signal_all(signal.SIGCONT, second)
    job.still_runs(3)

    attached(job.pid(rank), 10)
    job.still_runs(3)
    job.stop()
