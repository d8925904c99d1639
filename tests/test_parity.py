from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import DIGITS, ROOT
from tests.jobs import TRAINER, finish, overrides, start
from tests.test_runs import SCRIPT
from trainer.node.parity import difference

SAME = {"torch": "2.14.1", "training.seed": "1"}


def test_nodes_that_agree() -> None:
    assert difference({0: ("a", SAME), 1: ("b", SAME)}) is None


def test_the_odd_one_out_is_named_by_majority() -> None:
    nodes = {rank: (f"gpu-{rank}", SAME) for rank in range(16)} | {3: ("gpu-017", {**SAME, "torch": "2.13.0"})}
    assert difference(nodes) == ("B1", "torch: node 3 (gpu-017) has 2.13.0, 15 others 2.14.1", 3)


def test_of_two_both_are_named() -> None:
    nodes = {0: ("a", SAME), 1: ("b", {**SAME, "training.seed": "2"})}
    assert difference(nodes) == ("B4", "training.seed: node 1 (b) has 2, node 0 (a) 1", 1)
    less = {0: ("a", SAME), 1: ("b", {"torch": "2.14.1"})}
    assert difference(less) == ("B4", "training.seed: node 1 (b) has the default, node 0 (a) 1", 1)
    assert difference({0: ("a", SAME), 1: ("b", {})}) == ("B1", "torch: node 1 (b) has nothing, node 0 (a) 2.14.1", 1)


@given(st.integers(3, 20), st.data())
def test_whoever_it_is(nnodes: int, data: st.DataObject) -> None:
    culprit = data.draw(st.integers(0, nnodes - 1))
    item = data.draw(st.sampled_from(sorted(SAME)))
    nodes = {rank: ("host", {**SAME, item: "odd"} if rank == culprit else SAME) for rank in range(nnodes)}
    found = difference(nodes)
    assert found and found[2] == culprit and found[1].startswith(f"{item}: node {culprit} (host) has odd, {nnodes - 1} others")


def two_nodes(run: Path, *of_node_1: str, both: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """Two nodes started by hand, the second with more settings; returns exit code and output of each."""
    nodes = []
    for rank in (0, 1):
        place = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "28311"}
        more = [*both, *(of_node_1 if rank else ())]
        argv = [*TRAINER, "node", str(DIGITS), "resources.nodes=2", "resources.ranks_per_node=1", "training.max_steps=5"]
        nodes.append(start(*argv, *more, overrides(run), **place))
    return [finish(node) for node in nodes]


@pytest.mark.ranks
def test_a_config_that_differs_in_one_key_is_refused_before_the_first_step(folder: Path) -> None:
    ended = two_nodes(folder / "run", "optimizer.args.lr=0.7")
    lines = {next(line for line in output.splitlines() if line.startswith("FAULT")) for _, output in ended}
    (line,) = lines
    assert [code for code, _ in ended] == [4, 4]
    assert (
        line.startswith("FAULT B4 host=")
        and "node_rank=1: optimizer.args.lr: node 1 (" in line
        and " has 0.7, node 0 (" in line
        and "rollcall.parity=warn" in line
    )
    assert not (folder / "run" / "metrics.jsonl").exists()


@pytest.mark.ranks
def test_an_explicit_override_lets_it_run_with_a_warning(folder: Path) -> None:
    ended = two_nodes(folder / "run", "watch.stop_seconds=61", both=("rollcall.parity=warn",))
    assert [code for code, _ in ended] == [0, 0], ended
    assert "warning: watch.stop_seconds: node 1 (" in ended[0][1] and "going on, as rollcall.parity=warn says" in ended[0][1]


def test_a_script_that_differs_is_another_script(folder: Path) -> None:
    from trainer.node.parity import facts

    class Torch:
        __version__ = "2.14.1"

        class version:
            cuda = None

    (folder / "a.py").write_text(SCRIPT)
    (folder / "b.py").write_text(SCRIPT + "\n")
    told = [facts({}, folder / name, [], Torch) for name in ("a.py", "b.py", "missing.py")]
    assert len({each["entrypoint"] for each in told}) == 3
    assert told[0]["kit"] == told[1]["kit"] and "entrypoint" not in facts({}, None, [], Torch)


@pytest.mark.ranks
def test_a_model_of_the_users_own_that_differs(folder: Path) -> None:
    """The same import path, another file: each node has a folder of its own in front of its path."""
    nodes = []
    for rank in (0, 1):
        own = folder / f"code-{rank}"
        own.mkdir()
        (own / "mine.py").write_text(f"import torch\n\n\ndef model():\n    return torch.nn.Linear(64, 10)  # {rank}\n")
        place = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": "28312"}
        shape = [
            "resources.nodes=2",
            "resources.ranks_per_node=1",
            "model={target: 'mine:model', args: {}}",
            overrides(folder / "run"),
        ]
        nodes.append(start(*TRAINER, "node", str(DIGITS), *shape, PYTHONPATH=f"{own}:{ROOT}", **place))
    ended = [finish(node) for node in nodes]
    assert [code for code, _ in ended] == [4, 4] and all("code: node 1 (" in output for _, output in ended), ended
    assert " (mine.py), node 0 (" in ended[0][1] and "FAULT B4 " in ended[0][1]
