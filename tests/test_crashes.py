"""Ranks and loader workers that end in all ways: the right one is named on every node, and nothing is left behind.

A start costs seconds of CPU, a restart little. So a run gets one fault after the other, each in an attempt of its own and on a
random rank; the last one ends it.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import DIGITS, wait_until
from tests.watched import ENDLESS, Job, is_told
from trainer.errors import ExitCode

pytestmark = pytest.mark.ranks
root = pytest.mark.skipif(os.geteuid() != 0, reason="a /dev/shm of its own needs root")
FAILED, KILLED, STALLED = ExitCode.RANK_FAILED, ExitCode.RANK_KILLED, ExitCode.STALLED
NODES, RANKS = 2, 2  # ranks of each node
Start = Callable[..., Job]


@dataclass(frozen=True)
class Hit:
    """A statement that a rank runs into, and what must be said of it."""

    where: str  # model | data, or "" in a script
    what: str
    code: str
    words: str  # in the cause
    exit_code: ExitCode
    remedy: str = ""  # in what to do


@pytest.fixture
def job(folder: Path) -> Iterator[Start]:
    made: list[Job] = []

    def start(config: Path, *settings: str, within: Sequence[str] = ()) -> Job:
        made.append(Job(folder / "run", config, *settings, nodes=NODES, ranks=RANKS, within=within))
        return made[-1]

    yield start
    for each in made:
        each.end()


def anyone() -> int:
    return random.randrange(NODES * RANKS)


def struck(job: Start, folder: Path, hits: Sequence[Hit], *settings: str, within: Sequence[str] = ()) -> list[str]:
    """A run of the kit's own ranks with these faults; returns the lines that were told."""
    ranks = [anyone() for _ in hits]
    faults = [[rank, hit.where, hit.what] for rank, hit in zip(ranks, hits, strict=True)]
    arguments = json.dumps({"faults": faults, "checkpoints": str(folder / "run" / "checkpoints")})
    targets = [f"{part}.target=tests.targets:unlucky_{part}" for part in ("model", "data")]
    own = [*targets, f"model.args={arguments}", f"data.args={arguments}"]
    restarts = f"watch.max_restarts={len(hits) - 1}"
    running = job(DIGITS, *ENDLESS, "checkpoint.every_steps=5", *own, restarts, *settings, within=within)
    return all_told(running, hits, ranks)


def all_told(running: Job, hits: Sequence[Hit], ranks: Sequence[int]) -> list[str]:
    """Wait for the end: each fault was told on every node, by what it is, and the last one ended the run."""
    last = hits[-1]
    line = running.fault(last.code, ranks[-1], last.words, last.exit_code, 60 + 20 * len(hits))
    attempts = [(told, {event["fault"] for event in told}) for told in running.restarts()]
    assert len(attempts) == len(hits) - 1, running.told()
    for hit, rank, (told, lines) in zip(hits[:-1], ranks[:-1], attempts, strict=True):
        right = len(lines) == 1 and is_told(next(iter(lines)), hit.code, rank, hit.words)
        nodes, codes = {event["node_rank"] for event in told}, {event["exit_code"] for event in told}
        assert right and nodes == {*range(NODES)} and codes == {hit.exit_code}, f"rank {rank}, {hit}: {told}\n{running.told()}"
    found = [*(next(iter(lines)) for _, lines in attempts), line]
    for attempt, (hit, line) in enumerate(zip(hits, found, strict=True)):
        assert hit.remedy in line.partition("; fix: ")[2], line
        kind = "hang" if hit.exit_code == STALLED else "crash"
        assert any((running.run / kind / f"attempt-{attempt:03d}").iterdir()), f"no evidence of {line}"
    return found


ENDS = (
    Hit("model", "raise ValueError('bad   sample 7')", "C1", "ValueError: bad sample 7 (targets.py:", FAILED, "the traceback in"),
    Hit("data", "raise OSError(5, 'Input/output error')", "C1", "OSError: [Errno 5] Input/output error (", FAILED),
    Hit("model", "sys.exit(3)", "C1", "exited with 3 (targets.py:", FAILED),
    Hit("model", "import atexit; atexit.register(time.sleep, 3); sys.exit(4)", "C1", "exited with 4", FAILED),  # it dies slowly
    Hit("model", "sys.exit(0)", "D5", "left early with exit code 0", FAILED, "early return or sys.exit"),
    Hit("data", "os._exit(0)", "D5", "left early with exit code 0", FAILED),
    Hit("data", "os._exit(9)", "C1", "vanished with exit code 9, no message", FAILED),
    Hit("model", "images.mul_(float('nan'))", "C6", "the loss is not finite (samples ", FAILED),
    Hit(
        "model", "import ctypes; ctypes.string_at(0)", "C1", "killed by signal 11 (SIGSEGV) in targets.py:", KILLED, "the end of"
    ),
    Hit("data", "os.abort()", "C1", "killed by signal 6 (SIGABRT) in targets.py:", KILLED),
    Hit("model", "os.kill(os.getpid(), signal.SIGKILL)", "C1", "killed by signal 9 (SIGKILL)", KILLED, "find who sent it"),
)


def test_a_rank_that_ends(job: Start, folder: Path) -> None:
    struck(job, folder, random.sample(ENDS, len(ENDS)))


def test_data_of_another_length_on_one_rank(job: Start) -> None:
    rank = anyone()
    running = job(DIGITS, "data.target=tests.targets:uneven_data", f"data.args={{rank: {rank}}}")
    running.fault("C4", rank, "data.target=tests.targets:uneven_data: 399 samples on this rank, 400 on rank ", ExitCode.CONFIG)


def test_a_layer_that_one_rank_leaves_out(job: Start) -> None:
    rank = anyone()
    running = job(DIGITS, "model.target=tests.targets:Skipping", f"model.args={{rank: {rank}}}")
    words = "parameters that got no gradient in the first step: extra.weight, extra.bias"
    running.fault("C7", rank, words, FAILED)


SCRIPT = """
import os, signal, sys, threading, time, torch, torch.distributed as dist
FAULTS = {faults}
rank, what = FAULTS[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]

def raise_in_a_way_of_ones_own(error):
    # what the others make of the loss of the rank must not hide it
    way = dist.get_rank() % 3
    if way == 0:
        raise error
    if way == 1:
        raise ValueError("training failed") from error
    print(f"terminate called after throwing an instance of 'c10::DistBackendError'\\n  what():  {{error}}", flush=True)
    os.abort()  # as NCCL's watchdog does

def train():
    for step in range(1000000):
        if step == 30 and dist.get_rank() == rank:
            exec(what)
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            raise_in_a_way_of_ones_own(error)
        time.sleep(0.01)

def hide_an_error():
    try:
        raise ValueError("hidden")
    finally:
        dist.barrier()

dist.init_process_group("gloo")
try:
    train()
finally:
    dist.destroy_process_group()
"""
IN_A_SCRIPT = (
    Hit("", "raise KeyError('label')", "C1", "KeyError: 'label' (train.py:19)", FAILED),
    # its connections are closed long before it has ended
    Hit(
        "",
        "import atexit; atexit.register(time.sleep, 4); raise ValueError('slow')",
        "C1",
        "ValueError: slow (train.py:19)",
        FAILED,
    ),
    Hit(
        "",
        "threading.Thread(target=time.sleep, args=(1000,)).start(); raise ValueError('stuck')",
        "C1",
        "ValueError: stuck (",
        FAILED,
    ),
    Hit("", "sys.exit('no data')", "C1", "exited with 1: no data (train.py:19)", FAILED),
    Hit("", "sys.exit(0)", "D5", "left early with exit code 0", FAILED),
    Hit("", "os._exit(0)", "D5", "left early with exit code 0", FAILED),
    Hit("", "os.abort()", "C1", "killed by signal 6 (SIGABRT) in train.py:19 in train", KILLED),
    Hit(
        "", "time.sleep(1000)", "C2", "sleeps in train.py:19 in train, the others wait for it (after ", STALLED, "trainer explain"
    ),
    Hit("", "lock = threading.Lock(); lock.acquire(); lock.acquire()", "C2", "waits for a lock in train.py:19 in train", STALLED),
    Hit("", "while True: pass", "C2", "train.py:19 in train, the others wait for it", STALLED),
    Hit("", "os.kill(os.getpid(), signal.SIGSTOP)", "C2", "stopped by a signal", STALLED, "do not stop single ranks"),
    # it has fewer batches, and waits for the others at the end
    Hit(
        "",
        "dist.barrier()",
        "C5",
        "is in barrier (train.py:19 in train), while the others are in all_reduce (train.py:21",
        STALLED,
    ),
    Hit(
        "",
        "hide_an_error()",
        "C1",
        "ValueError: hidden (train.py:28); handling that, it is in barrier (train.py:30 in hide_an_error), while the others are in",
        STALLED,
        "`finally`",
    ),
)


def test_a_rank_of_a_script_of_ones_own_that_ends_or_hangs(job: Start, folder: Path) -> None:
    hits = random.sample(IN_A_SCRIPT, len(IN_A_SCRIPT))
    ranks = [anyone() for _ in hits]
    faults = [(rank, hit.what) for rank, hit in zip(ranks, hits, strict=True)]
    (folder / "train.py").write_text(SCRIPT.format(faults=faults))
    (folder / "run.yaml").write_text(f"name: own\nentrypoint: {json.dumps(str(folder / 'train.py'))}\n")
    all_told(job(folder / "run.yaml", f"watch.max_restarts={len(hits) - 1}", "watch.stall_seconds=5"), hits, ranks)


FILL = "import mmap; size = 1 << 26; fd = os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR); os.ftruncate(fd, size)\n"
FILL += "held = mmap.mmap(fd, size)\nfor at in range(0, size, 4096): held[at] = 1"
IN_A_WORKER = (
    Hit("data", "raise ValueError('bad sample 7')", "C1", "ValueError: bad sample 7 (", FAILED),
    Hit("data", "os._exit(1)", "C1", "exited unexpectedly with exit code 1", FAILED, "something in the dataset ends its process"),
    # what it had loaded before is used up by then, and torch does not look after it
    Hit("data", "time.sleep(2); sys.exit(0)", "E4", "has ended with exit code 0", STALLED, "in the dataset ends its process"),
    Hit("data", "os.kill(os.getpid(), signal.SIGKILL)", "E3", "is killed by signal: Killed", KILLED, "more memory"),
    Hit("data", "import ctypes; ctypes.string_at(0)", "C1", "is killed by signal: Segmentation fault", KILLED, "in native code"),
    Hit("data", "os.abort()", "C1", "is killed by signal: Aborted", KILLED, "in native code"),
    Hit("data", FILL, "E1", "is killed by signal: Bus error", KILLED, "/dev/shm"),
    Hit(
        "data", "torch.zeros(1 << 24).share_memory_()", "E1", "unable to allocate shared memory(shm) for file", KILLED, "/dev/shm"
    ),
)


@root
def test_a_loader_worker_that_ends_and_shared_memory_that_is_full(job: Start, folder: Path) -> None:
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$@"', "sh"]
    struck(job, folder, random.sample(IN_A_WORKER, len(IN_A_WORKER)), "data.num_workers=1", within=small)


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A memory cgroup with a limit of 3 GiB."""
    tree = Path("/sys/fs/cgroup")
    second = (tree / "cgroup.controllers").exists()
    made = (tree if second else tree / "memory") / f"crashes-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.max" if second else "memory.limit_in_bytes")).write_text(str(3 << 30))
    except OSError as error:
        with suppress(OSError):
            made.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {error}")
    yield made
    assert wait_until(lambda: not (made / "cgroup.procs").read_text(), 20)
    made.rmdir()


EAT = "eaten = []\nwhile True: eaten.append(b'x' * (1 << 26))"
EATEN = "the memory limit of 3.0 GiB was reached (oom_kill "
OUT_OF_MEMORY = (
    Hit("model", EAT, "E3", f"killed by the kernel: {EATEN}", KILLED, "resources.memory_gb_per_node"),
    Hit("data", EAT, "E3", EATEN, KILLED, "resources.memory_gb_per_node"),  # a loader worker
)


def test_the_kernel_kills_for_memory(job: Start, folder: Path, little_memory: Path) -> None:
    inside = ["sh", "-c", f'echo $$ > {little_memory}/cgroup.procs && exec "$@"', "sh"]
    lines = struck(job, folder, random.sample(OUT_OF_MEMORY, 2), "data.num_workers=1", within=inside)
    assert sum("DataLoader worker (pid" in line and "is killed by signal: Killed" in line for line in lines) == 1, lines


HOLD = "data.held = [open('/dev/null') for _ in range(99)]"
OUT_OF_FILES = (
    Hit(
        "model", HOLD.replace("data", "model"), "E2", "OSError: [Errno 24] Too many open files: '/dev/null'", FAILED, "ulimit -n"
    ),
    Hit("data", HOLD, "E2", "OSError: [Errno 24] Too many open files: '/dev/null'", FAILED, "ulimit -n"),
)


@root
def test_few_open_files(job: Start, folder: Path) -> None:
    """Batches are handed over by names in shared memory then, of which none may be left."""
    shared = folder / "shm"
    shared.mkdir()
    few = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && ulimit -n 64 && exec "$@"', str(shared)]
    struck(job, folder, random.sample(OUT_OF_FILES, 2), "data.num_workers=1", within=few)
    assert not list(shared.iterdir())
