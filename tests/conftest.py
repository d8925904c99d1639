"""What all tests share: one thread a process, a folder whose name has a space and quotes, and a small config."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share this machine's cores
for name in [n for n in os.environ if n.startswith(("PET_", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_"))]:
    del os.environ[name]  # the tests are their own job

ROOT = Path(__file__).parent.parent
DIGITS = ROOT / "configs" / "digits.yaml"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A place to work in, with the characters that break careless scripts."""
    made = tmp_path / 'it\'s a "run" folder'
    made.mkdir()
    return made


def wait_until(condition: Callable[[], object], seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False
