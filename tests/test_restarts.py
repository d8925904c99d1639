"""Ranks that failed are started again in the same allocation; and ranks that hold the others up are told while they run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.conftest import DIGITS, wait_until
from tests.jobs import TRAINER, command, equal, events, finish, logs, losses, overrides, processes_of, saved, start
from trainer.errors import ExitCode, Fault
from trainer.node.restarts import Restarts
from trainer.node.stall import Sight, stragglers
from trainer.pulse import Phase

TWO = ["resources.nodes=2", "resources.ranks_per_node=1"]
RUN = [
    str(DIGITS),
    *TWO,
    "training.batch_size=16",
    "training.max_steps=40",
    "training.log_every_steps=1",
    "checkpoint.every_steps=5",
]
FAULT = Fault("C1", "n1", "killed by signal 9 (SIGKILL)", "look", ExitCode.RANK_KILLED, 1)


def test_a_killed_rank_comes_back_and_nothing_differs(folder: Path) -> None:
    data = ["data.target=tests.targets:faulty_data", "model.target=tests.targets:faulty_model"]
    undisturbed, run, mark = folder / "undisturbed", folder / "run", folder / "mark"
    code, output = command(*TRAINER, "run", *RUN, *data, overrides(undisturbed))
    assert code == 0, output
    once = f"os.path.exists({str(mark)!r}) or (open({str(mark)!r}, 'w').close(), os.kill(os.getpid(), 9))"
    fault = f"model.args={json.dumps({'rank': 1, 'number': 17, 'what': once})}"
    code, output = command(*TRAINER, "run", *RUN, *data, overrides(run), fault, "watch.max_restarts=1")
    assert code == 0, output + logs(run)
    assert "restart 1 of 1: FAULT C1 host=" in output and "rank=1: killed by signal 9 (SIGKILL)" in output
    assert losses(run) == losses(undisturbed) and equal(saved(run), saved(undisturbed))
    told = events(run, "restart")
    assert {event["node_rank"] for event in told} == {0, 1} and len({event["fault"] for event in told}) == 1
    assert {event["exit_code"] for event in told} == {ExitCode.RANK_KILLED}
    again = [event for event in events(run, "node_start") if event["attempt"] == 1]
    assert len(again) == 2, "both nodes began the second attempt"
    assert not processes_of(run)


def test_restarts_that_lead_nowhere_end(folder: Path) -> None:
    (folder / "broken.py").write_text("raise ValueError('always')\n")
    settings = ["model.target=tests.targets:faulty_model", "model.args={rank: 0, number: 2, what: 1 / 0}", "watch.max_restarts=9"]
    code, output = command(*TRAINER, "run", *RUN, *settings, overrides(folder / "run"))
    assert code == ExitCode.RANK_FAILED, output
    lines = {line for line in (output + logs(folder / "run")).splitlines() if line.startswith("FAULT ")}
    assert len(lines) == 1 and "rank=0: no new checkpoint in 2 restarts, last: ZeroDivisionError: division by zero" in lines.pop()
    assert "restart 2 of 9" in output and "restart 3 of 9" not in output


def test_what_is_worth_a_restart() -> None:
    restarts = Restarts(3)
    assert not restarts.wanted(replace(FAULT, exit_code=ExitCode.CONFIG), True, None)
    assert not restarts.wanted(replace(FAULT, exit_code=ExitCode.STOPPED), True, None)
    assert not restarts.wanted(replace(FAULT, exit_code=ExitCode.NODE_LOST), True, None)
    assert [restarts.wanted(FAULT, True, newest) for newest in (5, 10, 15, 20)] == [True, True, True, False]
    assert restarts.trouble is None


@pytest.mark.parametrize(
    ("newest", "ends"), [((None, None, None), True), ((5, 5, 5), True), ((5, 5, 9), False), ((5, 9, 9), False)]
)
def test_progress_is_a_newer_checkpoint(newest: tuple[int | None, ...], ends: bool) -> None:
    restarts = Restarts(9)
    assert all(restarts.wanted(FAULT, True, step) for step in newest)
    assert bool(restarts.trouble) == ends
    if restarts.trouble:
        assert restarts.trouble.fault.line().startswith(
            "FAULT D10 host=n1 rank=1: no new checkpoint in 2 restarts, last: killed by"
        )


def test_a_script_of_ones_own_has_checkpoints_that_nobody_sees() -> None:
    restarts = Restarts(9)
    assert all(restarts.wanted(FAULT, False, None) for _ in range(9)) and restarts.trouble is None


def sight(rank: int, busy: float | None) -> Sight:
    return Sight(rank, f"n{rank}", rank, 1, "S", 9, 1, Phase.DATA, 9, 0.1, 60.0, busy=busy, mostly=Phase.DATA)


@pytest.mark.parametrize(
    ("busy", "slow"),
    [
        ([0.3, 0.3, 0.9, 0.35], [2]),
        ([0.3, 0.9], [1]),
        ([0.05, 0.95, 0.95, 0.05, 0.05], [1, 2]),
        ([0.9, 0.9, 0.9], []),
        ([0.01, 0.05, 0.01], []),  # nothing to speak of
        ([0.5, 0.7, 0.5], []),
        ([None, 0.9, None], []),  # too early to tell
        ([0.9], []),
    ],
)
def test_who_holds_the_others_up(busy: list[float | None], slow: list[int]) -> None:
    assert [sight.rank for sight, _ in stragglers([sight(rank, share) for rank, share in enumerate(busy)], factor=2)] == slow


def test_a_slow_rank_is_told_with_what_it_is_slow_in(folder: Path) -> None:
    settings = ["data.target=tests.targets:faulty_data", "training.max_steps=100000", "training.epochs=9000"]
    slow = "data.args={rank: 1, number: 20, what: 'data.seconds = 0.05', seconds: 0.001}"
    run = folder / "run"
    node = start(*TRAINER, "run", *RUN, *settings, slow, "checkpoint.every_steps=1000", overrides(run))
    assert wait_until(lambda: events(run, "straggler"), 90), logs(run)
    node.terminate()
    code, output = finish(node)
    assert code == ExitCode.STOPPED, output
    assert "warning: rank 1 (" in output and "times the others', most of it data loading" in output, output
    assert [event["rank"] for event in events(run, "straggler")] == [1]
