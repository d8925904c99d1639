"""The run folder is held by one, and a file system that has no locks does not stop a run."""

import errno
import fcntl
from pathlib import Path

import pytest

from tests.conftest import DIGITS
from trainer.errors import ConfigError
from trainer.launch.plan import Submission, locked
from trainer.node.logs import RunFolder
from trainer.settings import load_config


def no_locks(file: object, how: int) -> None:
    raise OSError(errno.ENOSYS, "Function not implemented")


def test_a_second_holder_is_told_who_holds_the_folder(folder: Path) -> None:
    with RunFolder(folder).held("n0"), pytest.raises(BlockingIOError, match=r"pid \d+ on n0"), RunFolder(folder).held("n1"):
        pass
    with RunFolder(folder).held("n1"):
        pass


def test_a_second_submission_is_refused(folder: Path) -> None:
    config = load_config(DIGITS)
    refused = pytest.raises(ConfigError, match="another submission into it is going on")
    with locked(Submission([config]), str(folder)), refused, locked(Submission([config]), str(folder)):
        pass


def test_a_file_system_without_locks_is_no_obstacle(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    entered = []
    with RunFolder(folder).held("n0"), locked(Submission([load_config(DIGITS)]), str(folder)):
        entered.append(True)
    assert entered and "cannot be locked (Function not implemented)" in capsys.readouterr().err
