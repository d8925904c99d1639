"""Starting one rank: fork it from the warm node process, or spawn it where forking is not safe; and what it leaves behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.errors import ERROR_FILE, ExitCode, write_error_file
from trainer.node.identity import Identity
from trainer.node.stacks import answer_when_asked
from trainer.process import STOP_SIGNALS, die_with_parent, leave
from trainer.pulse import Pulse

SOCKETS = "TRAINER_SOCKETS"  # the folder for those of the loader workers, see `Guard`


@dataclass(frozen=True)
class Rank:
    """How to start one rank."""

    rank: int
    local_rank: int
    entrypoint: str  # a module, or a path ending in .py
    arguments: list[str]
    environ: dict[str, str]  # on top of the node's own
    log: str  # path: stdout and stderr go there
    error_file: str  # path: a rank that fails leaves its reason there


def plan(node: Identity, local_rank: int, attempt: int, name: str, logs: Path, entrypoint: str, arguments: Sequence[str]) -> Rank:
    """How to start a rank.

    Args:
        name: of the run.
        logs: the attempt's folder of them.
        entrypoint: a module, or a path ending in .py.
        arguments: its own, in which {rank}, {local_rank} and {world_size} are filled in.
    """
    rank = node.node_rank * node.nproc_per_node + local_rank
    files = logs / f"rank-{rank:04d}.{node.host}"
    values = {"{rank}": str(rank), "{local_rank}": str(local_rank), "{world_size}": str(node.world_size)}
    filled = [_fill(argument, values) for argument in arguments] if entrypoint.endswith(".py") else list(arguments)
    environ = _variables(node, local_rank, attempt, name) | {ERROR_FILE: f"{files}.error.json"}
    return Rank(rank, local_rank, entrypoint, filled, environ, f"{files}.log", f"{files}.error.json")


def _fill(argument: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        argument = argument.replace(name, value)
    return argument


def _variables(node: Identity, local_rank: int, attempt: int, name: str) -> dict[str, str]:
    """torch's own variables for one rank, as torchrun sets them.

    Args:
        name: of the run.
    """
    return {
        "RANK": str(node.node_rank * node.nproc_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(node.world_size),
        "LOCAL_WORLD_SIZE": str(node.nproc_per_node),
        "GROUP_RANK": str(node.node_rank),
        "GROUP_WORLD_SIZE": str(node.nnodes),
        "MASTER_ADDR": node.master_addr,
        "MASTER_PORT": str(node.master_port),
        # torch's rendezvous then joins the store that runs already instead of starting one on rank 0
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_RUN_ID": name,
    }


def fork(rank: Rank, in_child: Callable[[], None]) -> int:
    """Start a rank as a copy of this process; returns its pid, which is also its process group.

    Nothing must run in other threads and no CUDA context may exist: see `unsafe_to_fork`.
    """
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    # A stop signal that reaches the child before it has handlers of its own would be noted in its copy of ours, and lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    pid = os.fork()
    if pid == 0:
        try:
            in_child()
            _run(rank, parent)
        finally:
            os._exit(70)  # not reached: _run ends the process
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    _own_group(pid)
    return pid


def spawn(rank: Rank, keep_open: tuple[int, ...] = ()) -> int:
    """Start a rank as a fresh interpreter; returns its pid, which is also its process group."""
    argv = [sys.executable, "-m", "trainer.node.ranks", json.dumps(asdict(rank)), str(os.getpid())]
    process = subprocess.Popen(argv, env={**os.environ, **rank.environ}, pass_fds=keep_open)
    process.returncode = 0  # the watch reaps it by pid; Popen must not
    _own_group(process.pid)
    return process.pid


def unsafe_to_fork() -> str | None:
    """Why ranks must not be forked from this process, or None."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "a CUDA context exists"
    if threading.active_count() > 1:
        return f"the thread {threading.enumerate()[-1].name!r} is running"
    tasks = Path("/proc/self/task")
    if tasks.is_dir() and len(list(tasks.iterdir())) > 1:
        return f"{len(list(tasks.iterdir())) - 1} native threads are running"
    return None if sys.platform == "linux" else f"{sys.platform} does not support it"


def _own_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.setpgid(pid, pid)  # the child does the same; whoever is first


def _run(rank: Rank, parent: int) -> None:
    """Become the rank: never returns."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for number in (*STOP_SIGNALS, signal.SIGCHLD):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.environ.update(rank.environ)
    _redirect(rank.log)
    Path(rank.error_file).unlink(missing_ok=True)
    if sockets := os.environ.get(SOCKETS):  # else multiprocessing makes one for each process, and each that is killed leaves it
        multiprocessing.current_process()._config["tempdir"] = sockets  # type: ignore[attr-defined]
    answer_when_asked()
    pulse = Pulse.of()
    pulse.follow_collectives()
    try:
        code = _call(rank)
    except BaseException as error:  # such a handler, in the moment before that
        write_error_file(rank.error_file, error)
        code = 1
    if code > 0 and code != ExitCode.STOPPED:
        pulse.leave()
    leave(code)


def _redirect(log: str) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(out, descriptor)
    os.close(out)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _call(rank: Rank) -> int:
    """Run the entrypoint as `python -m` or `python FILE` would; returns the exit code."""
    sys.argv = [rank.entrypoint, *rank.arguments]
    try:
        if rank.entrypoint.endswith(".py"):
            sys.path.insert(0, str(Path(rank.entrypoint).resolve().parent))
            runpy.run_path(rank.entrypoint, run_name="__main__")
        else:
            runpy.run_module(rank.entrypoint, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
        if error.code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        if code & 0xFF not in (ExitCode.DONE, ExitCode.STOPPED):
            with suppress(OSError):
                write_error_file(rank.error_file, error)
        return code & 0xFF
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT  # the interpreter, too, dies of the signal then
    except BaseException as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a loader's handler raises once more for each worker that ends
        with suppress(OSError):  # the disk may be what is full
            write_error_file(rank.error_file, error)
            traceback.print_exc()
        return 1
    return 0


def _read(text: str) -> Rank:
    return Rank(**json.loads(text))


if __name__ == "__main__":
    _run(_read(sys.argv[1]), int(sys.argv[2]))
