"""The short form of `python -m tests.crash`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.crash import check


@pytest.mark.ranks
@pytest.mark.parametrize(("worlds", "kills"), [([2], 12), ([1, 2, 4], 12)])
def test_whenever_it_is_killed_it_ends_as_if_it_had_not_been(worlds: Sequence[int], kills: int, folder: Path) -> None:
    made = check(folder, kills, worlds, seed=7)
    assert made.inside > kills / 4, "the disk was slow enough"
