"""A node that is gone in mid-run: its cable, its node process, or that process's time. Whoever is left names it and ends."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import DIGITS, wait_until
from tests.jobs import finish, logs, metrics, processes_of
from tests.lab.slurm import Cluster
from tests.machines import Nodes, fault
from tests.watched import ENDLESS, HOST, Job, faulty
from trainer.errors import ExitCode

Start = Callable[..., Job]


@pytest.fixture
def job(folder: Path) -> Iterator[Start]:
    made: list[Job] = []

    def start(*settings: str, **shape: int) -> Job:
        made.append(Job(folder / "run", DIGITS, *ENDLESS, *faulty("", -1, 0, ""), *settings, **shape))
        made[-1].at_step(3)
        return made[-1]

    yield start
    for each in made:
        each.end()


@pytest.mark.netns
def test_a_cable_is_pulled(nodes: Nodes, cluster: Cluster) -> None:
    """Each side names the other: neither can know which of them the world has lost."""
    cut = random.randrange(2)
    for rank in (0, 1):
        nodes.start(rank, *ENDLESS, "watch.stall_seconds=300", *faulty("", -1, 0, ""))
    assert wait_until(lambda: metrics(nodes.run) and metrics(nodes.run)[-1]["step"] > 5, 60), logs(nodes.run)
    since = time.monotonic()
    cluster.link(f"node{cut + 1}", "down")
    ended = nodes.end(60)
    took = time.monotonic() - since
    assert [code for code, _ in ended] == [ExitCode.NODE_LOST] * 2 and took < 35, (cut, took, ended)
    lines = [fault(output) for _, output in ended]
    assert re.match(r"FAULT C3 host=node2 node_rank=1: lost node 1 \(node2\) with rank 1: no sign of life for 2\d s", lines[0]), (
        ended
    )
    assert lines[1].startswith("FAULT C3 host=node1 node_rank=0: lost node 0 (node1): its store at "), ended
    assert not processes_of(nodes.run), cut


@pytest.mark.ranks
def test_a_node_process_is_killed(job: Start) -> None:
    """Its ranks go with it; the others' ranks see a connection closed, which is no cause."""
    victim = random.randrange(2)
    running = job("watch.stall_seconds=300")
    since = time.monotonic()
    os.kill(running.node_pids[victim], signal.SIGKILL)
    code, output = finish(running.front, 60)
    took, told = time.monotonic() - since, output + logs(running.run)
    survivor = output if victim else (running.run / "logs" / "node-0001.log").read_text()
    assert code == ExitCode.NODE_LOST and took < 20, (victim, code, took, told)
    line = fault(survivor)
    assert line.startswith(f"FAULT C3 host={HOST} node_rank={victim}: lost node {victim} ({HOST})"), (victim, told)
    assert f"node {victim} was killed by signal 9" in output
    running.nothing_is_left()


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_process_is_stopped(victim: int, job: Start) -> None:
    """Its ranks go on without it, and node 0's store too, but nobody looks after them any more."""
    running = job("watch.stall_seconds=300")
    since = time.monotonic()
    os.kill(running.node_pids[victim], signal.SIGSTOP)
    code, output = finish(running.front, 60)
    took, told = time.monotonic() - since, output + logs(running.run)
    survivor = output if victim else (running.run / "logs" / "node-0001.log").read_text()
    assert code == ExitCode.NODE_LOST and took < 40, (victim, code, took, told)
    assert fault(survivor).startswith(f"FAULT C3 host={HOST} node_rank={victim}: lost node {victim} ({HOST})"), (victim, told)
    running.nothing_is_left()
