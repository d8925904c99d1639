"""The short form of `python -m tests.crash`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash import check


@pytest.mark.ranks
@pytest.mark.parametrize(("worlds", "kills"), [([2], 12), ([1, 2, 4], 12)])
def test_whenever_it_is_killed_it_ends_as_if_it_had_not_been(worlds: Sequence[int], kills: int, folder: Path) -> None:
    made = check(folder, kills, worlds, seed=7)
    assert made.inside > kills / 4, "saves were not hit"


@pytest.mark.ranks
def test_the_same_with_parts_on_the_nodes_own_disks(folder: Path) -> None:
    """Shared storage is slow, and some starts go on from what only the disks have."""
    disk = folder / "disk"
    made = check(folder, 10, [2], seed=7, slow_seconds=0.1, more=[f"checkpoint.local_folder={json.dumps(str(disk))}"])
    assert made.recovered, "a save that was only on the disks was used"
    assert not list(disk.rglob("*.safetensors")), "an orderly end leaves nothing there"
