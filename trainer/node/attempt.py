"""One attempt of a run on this node: start its ranks, and watch them to their end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import ExitCode, Fault
from trainer.node import ranks
from trainer.node.guard import Guard
from trainer.node.identity import Identity
from trainer.node.logs import say
from trainer.node.vitals import Limits, Vitals
from trainer.node.watch import Watch

TERMINAL = "TRAINER_TERMINAL_FD"  # tells rank 0 where to draw its progress bar


@dataclass(frozen=True)
class Work:
    """What the ranks are to do."""

    name: str  # of the run
    entrypoint: str  # a module, or a path ending in .py
    arguments: Sequence[str]
    logs: Path  # the attempt's folder of them
    limits: Limits


def on_terminal(node: Identity) -> bool:
    """Whether rank 0 can draw a progress bar on this console."""
    return node.node_rank == 0 and os.isatty(2)


def run(node: Identity, number: int, work: Work, guard: Guard, watch: Watch) -> tuple[ExitCode, Fault | None]:
    """Returns this node's exit code and the job's fault. All ranks are gone then.

    Args:
        number: of the attempt.
    """
    if reason := ranks.unsafe_to_fork():
        say(f"[{node.host}] starting ranks as fresh processes, which is slower than forking them: {reason}")
    keep = [os.dup(2)] if on_terminal(node) else []
    try:
        if fault := watch.stopped_before_start():
            return fault.exit_code, fault
        for local_rank in range(node.nproc_per_node):
            rank = ranks.plan(node, local_rank, number, work.name, work.logs, work.entrypoint, work.arguments)
            if keep and rank.rank == 0:
                rank.environ[TERMINAL] = str(keep[0])
            vitals = Vitals(work.limits, node.world_size, time.monotonic())
            rank.environ.update({**vitals.environ, ranks.SOCKETS: guard.sockets})
            pid = ranks.spawn(rank, (*keep, *vitals.fds)) if reason else ranks.fork(rank, guard.forget)
            watch.add(rank, pid, vitals)
        return watch.run()
    finally:
        watch.kill()
        for running in watch.ranks:
            running.vitals.close()
        for fd in keep:
            os.close(fd)
