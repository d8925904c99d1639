"""A random fault on a random rank of 2 x 2 at a random moment, again and again: is the right one named, on both nodes?

python -m tests.culprits [--kills 100] [--seed 0] [--first 0] [--only NAME]

Each number is a fault of its own, whatever came before it: --first 17 --kills 1 does the 18th again.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import DIGITS, wait_until
from tests.watched import ENDLESS, STALL, Job, faulty
from trainer.errors import ExitCode

_RANKS = 4
_DEADLINE = STALL + 12.0  # seconds from the fault to the end of the run


@dataclass(frozen=True)
class Kind:
    """One way to go wrong, and what must be said of it."""

    name: str
    code: str
    words: str
    exit_code: ExitCode | None  # None: it hangs on which words torch finds
    where: str = ""  # model | data: the rank does it itself
    what: str = ""
    hurt: Callable[[Job, int, random.Random], None] | None = None  # or it is done to it
    workers: int = 0
    evidence: str = "hang"


def _to_rank(number: int) -> Callable[[Job, int, random.Random], None]:
    return lambda job, rank, _: os.kill(job.pid(rank), number)


def _to_worker(number: int) -> Callable[[Job, int, random.Random], None]:
    return lambda job, rank, dice: os.kill(dice.choice(job.workers(rank)), number)


FAILED, KILLED, STALLED = ExitCode.RANK_FAILED, ExitCode.RANK_KILLED, ExitCode.STALLED
_CRASH = "import ctypes; ctypes.string_at(0)"
_SLOWLY = "import atexit; atexit.register(time.sleep, 3); sys.exit(4)"
_SPIN = "while True: pass"
_HIDE = "try:\n    raise ValueError('hidden')\nfinally:\n    torch.distributed.barrier()"
_DEAF = "import ctypes; ctypes.PyDLL(None).sleep(1000)"  # in native code, with Python's lock
KINDS = (
    Kind("SIGKILL", "C1", "killed by signal 9 (SIGKILL)", KILLED, hurt=_to_rank(signal.SIGKILL), evidence="crash"),
    Kind("SIGSEGV", "C1", "killed by signal 11 (SIGSEGV)", KILLED, hurt=_to_rank(signal.SIGSEGV), evidence="crash"),
    Kind("SIGABRT", "C1", "killed by signal 6 (SIGABRT)", KILLED, hurt=_to_rank(signal.SIGABRT), evidence="crash"),
    Kind("SIGSTOP", "C2", "stopped by a signal", STALLED, hurt=_to_rank(signal.SIGSTOP)),
    Kind("native crash", "C1", "(SIGSEGV) in targets.py", KILLED, "model", _CRASH, evidence="crash"),
    Kind("raise in the model", "C1", "ValueError: bad", FAILED, "model", "raise ValueError('bad')", evidence="crash"),
    Kind("raise in the data", "C1", "ValueError: bad", FAILED, "data", "raise ValueError('bad')", evidence="crash"),
    Kind("exit 3", "C1", "exited with 3", FAILED, "model", "sys.exit(3)", evidence="crash"),
    Kind("exit 4 slowly", "C1", "exited with 4", FAILED, "model", _SLOWLY, evidence="crash"),
    Kind(
        "not a number", "C6", "the loss is not finite (samples ", FAILED, "model", "images.mul_(float('nan'))", evidence="crash"
    ),
    Kind("exit 0", "D5", "left early with exit code 0", FAILED, "model", "sys.exit(0)", evidence="crash"),
    Kind("_exit 0", "D5", "left early with exit code 0", FAILED, "data", "os._exit(0)", evidence="crash"),
    Kind("_exit 1", "C1", "vanished with exit code 1, no message", FAILED, "model", "os._exit(1)", evidence="crash"),
    Kind("sleep in the model", "C2", "sleeps in targets.py", STALLED, "model", "time.sleep(1000)"),
    Kind("sleep in the data", "C2", "sleeps in targets.py", STALLED, "data", "time.sleep(1000)"),
    Kind("lock", "C2", "waits for a lock in targets.py", STALLED, "model", "LOCK.acquire()"),
    Kind("endless loop", "C2", "targets.py", STALLED, "model", _SPIN),
    Kind("native sleep", "C2", "targets.py", STALLED, "model", _DEAF),
    Kind("barrier", "C5", "is in barrier (targets.py", STALLED, "model", "torch.distributed.barrier()"),
    Kind(
        "all_reduce", "C5", "collective mismatch", FAILED, "data", "torch.distributed.all_reduce(torch.ones(1))", evidence="crash"
    ),
    Kind("worker SIGKILL", "E3", "DataLoader worker (pid", KILLED, hurt=_to_worker(signal.SIGKILL), workers=2, evidence="crash"),
    Kind("worker SIGSTOP", "E4", "is in state T", STALLED, hurt=_to_worker(signal.SIGSTOP), workers=2),
    Kind("worker sleeps", "E4", "sleeps in targets.py", STALLED, "data", "time.sleep(1000)", workers=2),
    Kind("worker's lock", "E4", "waits for a lock in targets.py", STALLED, "data", "LOCK.acquire()", workers=2),
    Kind("worker ends", "E4", "has ended with exit code 0", STALLED, "data", "time.sleep(2); sys.exit(0)", workers=2),
    Kind("worker raises", "C1", "ValueError: bad", FAILED, "data", "raise ValueError('bad')", workers=2, evidence="crash"),
    Kind(
        "worker exits", "C1", "exited unexpectedly with exit code 1", FAILED, "data", "os._exit(1)", workers=2, evidence="crash"
    ),
    Kind("hidden error", "C1", "ValueError: hidden (", STALLED, "model", _HIDE),
)


def once(kind: Kind, dice: random.Random, folder: Path) -> str:
    """One run with one fault; returns the line that was told, or raises."""
    rank, number = dice.randrange(_RANKS), dice.randrange(20, 120)
    job = Job(folder / "run", DIGITS, *ENDLESS, *faulty(kind.where, rank, number, kind.what), f"data.num_workers={kind.workers}")
    try:
        if kind.hurt:
            if kind.workers or dice.random() < 0.7:
                job.at_step(1)
                time.sleep(dice.uniform(0, 1.5))
            else:  # while it starts
                assert wait_until(lambda: job.started(rank), 60), job.told()
                time.sleep(dice.uniform(0, 3))
            kind.hurt(job, rank, dice)
        else:
            assert wait_until(lambda: (job.run / "logs" / "attempt-000").is_dir(), 60), job.told()
        since = time.monotonic()
        line = job.fault(kind.code, rank, kind.words, kind.exit_code)
        took = time.monotonic() - since
        assert not kind.hurt or took < _DEADLINE, f"{took:.1f} s: {line}"
        job.explained(kind.evidence)
        return f"{took:4.1f} s  {line}"
    finally:
        job.end()


def check(kills: int, seed: int, first: int = 0, only: str | None = None) -> list[str]:
    """So many faults; returns what was wrong with each that was not told right."""
    wrong = []
    for number in range(first, first + kills):
        dice = random.Random(f"{seed}-{number}")
        kind = dice.choice([kind for kind in KINDS if only in (None, kind.name)])
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"{number:3} {kind.name}: {once(kind, dice, Path(folder))}", flush=True)
            except AssertionError as error:
                wrong.append(f"{number} {kind.name} (seed {seed}): {error}")
                print(f"{number:3} {kind.name}: WRONG {error}", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only")
    arguments = parser.parse_args()
    wrong = check(arguments.kills, arguments.seed, arguments.first, arguments.only)
    print(*wrong, sep="\n\n")
    print(f"{arguments.kills - len(wrong)} of {arguments.kills} faults were told right")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
