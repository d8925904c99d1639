"""A run that does not get on: who holds it up is named on every node, with the stacks of all, and nothing is left behind."""

from __future__ import annotations

import random

import pytest

from tests.jobs import processes_of
from tests.machines import Nodes, fault
from trainer.errors import ExitCode

netns = pytest.mark.netns
LONG = ("training.max_steps=100000", "training.epochs=4000", "watch.stall_seconds=6", "training.batch_size=16")


@netns
@pytest.mark.parametrize(
    ("where", "what", "code", "words"),
    [
        ("model", "os.kill(os.getpid(), signal.SIGSTOP)", "C2", "stopped by a signal"),
        ("model", "time.sleep(1000)", "C2", "sleeps in targets.py:"),
        ("data", "time.sleep(1000)", "C2", "sleeps in targets.py:"),
        ("model", "torch.distributed.barrier()", "C5", "is in barrier (targets.py:"),
    ],
)
def test_one_rank_does_not_get_on(where: str, what: str, code: str, words: str, nodes: Nodes) -> None:
    rank = random.randrange(2)
    settings = [
        "model.target=tests.targets:faulty_model",
        "model.args={}",
        "data.target=tests.targets:faulty_data",
        f"{where}.args={{rank: {rank}, number: 15, what: '{what}'}}",
    ]
    for node in (0, 1):
        nodes.start(node, *LONG, *settings)
    ended = nodes.end()
    assert len({fault(output) for _, output in ended}) == 1 and [code for code, _ in ended] == [ExitCode.STALLED] * 2, ended
    line = fault(ended[0][1])
    assert line.startswith(f"FAULT {code} host=node{rank + 1} rank={rank}: {words}"), line
    assert not processes_of(nodes.run)
