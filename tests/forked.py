"""Real ranks for a test, forked from the test process so that torch is loaded once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.train.distributed import World, joined

_CONTEXT = multiprocessing.get_context("fork")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def on_ranks(world_size: int, function: Callable[[World], Any], timeout_seconds: float = 120) -> list[Any]:
    """Run `function(world)` on every rank of a gloo process group; returns what each returned, in rank order.

    If one fails, the output of all ranks is in the error.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}.log" for rank in range(world_size)]
        processes = [
            _CONTEXT.Process(target=_rank, args=(rank, world_size, port, function, logs[rank]), daemon=False)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_seconds)
        stuck = [process for process in processes if process.exitcode is None]
        for process in stuck:
            process.kill()
            process.join()
        if stuck or any(process.exitcode for process in processes):
            told = "\n".join(f"--- rank {rank}\n{log.read_text() if log.exists() else ''}" for rank, log in enumerate(logs))
            codes = [process.exitcode for process in processes]
            raise AssertionError(f"{len(stuck)} ranks stuck, exit codes {codes}\n{told}")
        return [pickle.loads(log.with_suffix(".result").read_bytes()) for log in logs]


def _rank(rank: int, world_size: int, port: int, function: Callable[[World], Any], log: Path) -> None:
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    names = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    try:
        with joined(0, 30) as world:
            log.with_suffix(".result").write_bytes(pickle.dumps(function(world)))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
