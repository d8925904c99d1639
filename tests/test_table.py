"""What `trainer rollcall` prints."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.conftest import DIGITS
from tests.jobs import TRAINER, command, overrides
from trainer.table import table

NODES = [
    {
        "node_rank": rank,
        "host": f"gpu-{rank:03d}",
        "address": f"10.0.0.{rank}",
        "received": 1.2e9 if rank else None,
        "facts": {"torch": "2.13.0" if rank == 2 else "2.14.1"},
        "traits": {"driver": "570" if rank == 1 else "580"},
        "warnings": ["E2: few files"] if rank == 1 else [],
    }
    for rank in range(4)
]


def test_who_differs_stands_beside_its_name() -> None:
    text = table({"seconds": 0.31, "fault": "FAULT B1 ...", "warnings": ["driver: ..."], "nodes": NODES})
    assert text.splitlines() == [
        "node  host     address   MB/s  verdict",
        "0     gpu-000  10.0.0.0  -     ok",
        "1     gpu-001  10.0.0.1  1200  driver 570",
        "2     gpu-002  10.0.0.2  1200  torch 2.13.0",
        "3     gpu-003  10.0.0.3  1200  ok",
        "warning: driver: ...",
        "warning: node 1 (gpu-001): E2: few files",
        "FAULT B1 ...",
    ]


def test_colours_are_for_a_terminal() -> None:
    text = table({"seconds": 0.31, "fault": None, "warnings": [], "nodes": NODES}, colour=True)
    assert "\x1b[31mtorch 2.13.0\x1b[0m" in text and "\x1b[33mdriver 570\x1b[0m" in text
    assert text.endswith("the job can start: 4 nodes, roll call in 0.3 s")


@pytest.mark.ranks
def test_a_roll_call_alone_trains_nothing(folder: Path) -> None:
    argv = [*TRAINER, "rollcall", str(DIGITS), "resources.nodes=2", overrides(folder / "run")]
    code, output = command(*argv)
    assert code == 0 and "the job can start: 2 nodes, roll call in " in output and "127.0.0.1" in output, output
    assert not (folder / "run" / "metrics.jsonl").exists() and not (folder / "run" / "checkpoints").exists()
    done = subprocess.run([*argv, "--json"], stdout=subprocess.PIPE, text=True)
    told = json.loads(done.stdout)
    assert [node["node_rank"] for node in told["nodes"]] == [0, 1] and told["nodes"][1]["facts"]["torch"]


@pytest.mark.ranks
def test_a_roll_call_that_ends_badly_has_its_exit_code(folder: Path) -> None:
    code, output = command(
        *TRAINER, "rollcall", str(DIGITS), "resources.nodes=2", "container.cuda_version='1.0'", overrides(folder / "run")
    )
    assert code == 4 and output.count("FAULT B3 ") >= 1 and "Traceback" not in output, output


@pytest.mark.ranks
def test_the_second_roll_call_in_a_folder_has_its_own_exit_code(folder: Path) -> None:
    argv = [*TRAINER, "rollcall", str(DIGITS), "resources.nodes=2", overrides(folder / "run")]
    assert command(*argv)[0] == 0
    assert command(*argv, "container.cuda_version='1.0'")[0] == 4
    assert command(*argv)[0] == 0
