"""The guard and the ranks with real processes, without torch."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, wait_until
from trainer.process import started_at

NODE = """
import os, signal, subprocess, sys, time
from trainer.node.guard import Guard
from trainer.node.ranks import Rank, fork

guard = Guard()
log = sys.argv[1]
rank = Rank(0, 0, sys.argv[2], [], {"RANK": "0"}, log, log + ".error.json")
pid = fork(rank, guard.forget)
guard.add(pid)
print(pid, flush=True)
if sys.argv[3] == "wait":
    time.sleep(60)
_, status = os.waitpid(pid, 0)
guard.remove(pid)
guard.close()
print(os.waitstatus_to_exitcode(status), flush=True)
"""

FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
forked = os.fork()
if forked == 0:
    time.sleep(60)
print(os.getpid(), child.pid, forked, flush=True)
time.sleep(60)
"""


def start(folder: Path, script: str, mode: str) -> tuple["subprocess.Popen[str]", Path]:
    (folder / "script.py").write_text(script)
    log = folder / "rank.log"
    arguments = [sys.executable, "-c", NODE, str(log), str(folder / "script.py"), mode]
    return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True), log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_node_leaves_no_rank_and_nothing_that_a_rank_started(number: signal.Signals, folder: Path) -> None:
    node, log = start(folder, FAMILY, "wait")
    with node:
        assert wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
        pids = [int(pid) for pid in log.read_text().split()]
        assert len(pids) == 3 and all(started_at(pid) for pid in pids)
        os.kill(node.pid, number)
        assert wait_until(lambda: not any(started_at(pid) for pid in pids)), "something was left behind"


@pytest.mark.parametrize(
    ("script", "code", "reason"),
    [
        ("print('hello')", 0, None),
        ("import sys; sys.exit(7)", 7, '"type": "SystemExit"'),
        ("import sys; sys.exit('no data')", 1, '"message": "no data"'),
        ("raise ValueError('bad sample')", 1, '"message": "bad sample", "where": "script.py:1"'),
        ("import os; os._exit(9)", 9, None),
        ("import os; os.kill(os.getpid(), 9)", -9, None),
        ("import atexit; atexit.register(print, 'goodbye')", 0, None),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(0.3), print('late'))).start()", 0, None),
        ("import sys; assert sys.argv == [__file__] and __name__ == '__main__'; import sibling", 0, None),
    ],
)
def test_a_rank_ends_as_the_interpreter_would_end(script: str, code: int, reason: str | None, folder: Path) -> None:
    (folder / "sibling.py").write_text("")
    node, log = start(folder, script, "reap")
    output, _ = node.communicate(timeout=60)
    assert output.split()[1] == str(code), log.read_text()
    error = Path(f"{log}.error.json")
    assert (reason in error.read_text()) if reason else not error.exists()
    for word in ("hello", "goodbye", "late"):
        assert (word in script) == (word in log.read_text())
