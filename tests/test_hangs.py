"""Runs on this machine that do not get on: in a loader worker, in a save, or in a script of the user's own."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import DIGITS
from tests.jobs import finish
from tests.machines import fault
from tests.watched import ENDLESS, HOST, Job, faulty
from trainer.errors import ExitCode

pytestmark = pytest.mark.ranks
Start = Callable[..., Job]
IN_TIME = 20  # seconds for a fault that was found after 5, with the stacks, and the end of all


@pytest.fixture
def job(folder: Path) -> Iterator[Start]:
    made: list[Job] = []

    def start(*settings: str, config: Path = DIGITS, **shape: int) -> Job:
        made.append(Job(folder / "run", config, *settings, **shape))
        return made[-1]

    yield start
    for each in made:
        each.end()


def test_a_loader_worker_that_waits_for_a_lock_taken_before_the_fork(job: Start) -> None:
    rank = random.randrange(4)
    running = job(*ENDLESS, *faulty("data", rank, 15, "LOCK.acquire()"), "data.num_workers=1")
    line = running.fault("E4", rank, "waits for a lock in targets.py:", ExitCode.STALLED)
    assert "waits for its loader workers: pid " in line and ", the others wait for it (step " in line
    assert "a thread held the lock when the workers were forked" in line.partition("; fix: ")[2]
    text = running.explained("hang")
    assert f"1 of 4 (rank {rank}):" in text and "in _go_wrong" in text, text


def test_a_loader_worker_is_stopped(job: Start) -> None:
    rank = random.randrange(4)
    running = job(*ENDLESS, *faulty("", -1, 0, ""), "data.num_workers=1")
    running.at_step(3)
    (worker,) = running.workers(rank)
    since = time.monotonic()
    os.kill(worker, signal.SIGSTOP)
    running.fault("E4", rank, f"waits for its loader workers: pid {worker} is in state T, the others", ExitCode.STALLED)
    assert time.monotonic() - since < IN_TIME, rank


def test_a_second_interrupt_does_not_wait_for_ranks_that_hang(job: Start) -> None:
    rank = random.randrange(4)
    running = job(*ENDLESS, *faulty("model", rank, 20, "print('hangs', flush=True); time.sleep(1000)"), "watch.stall_seconds=100")
    running.said("hangs")
    running.front.send_signal(signal.SIGINT)
    running.said("SIGINT: asking the ranks to save and stop")
    since = time.monotonic()
    running.front.send_signal(signal.SIGINT)
    code, output = finish(running.front, 30)
    lines = {fault(text) for text in (output, (running.run / "logs" / "node-0001.log").read_text())}
    assert code == ExitCode.STOPPED and time.monotonic() - since < 10, running.told()
    assert len(lines) == 1 and re.match(f"FAULT D8 host={HOST} node_rank=[01]: stopped by a second Ctrl-C", lines.pop()), output
    running.nothing_is_left()


def test_a_save_that_does_not_end(job: Start) -> None:
    """Ranks ask each other all the time whether all parts are there: that is no progress."""
    rank = random.randrange(4)
    running = job(*ENDLESS, *faulty("", -1, 0, ""), "watch.phase_seconds=15")
    running.at_step(12)
    writer = running.writer(rank)
    os.kill(writer, signal.SIGSTOP)
    words = f"does not get on with a save: pid {writer} is in state T, the others wait for it (step "
    running.fault("G9", rank, words, ExitCode.STALLED)
