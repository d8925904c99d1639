"""Two machines with networks, names and files of their own, on which a test starts `trainer node` by hand."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from tests.conftest import DIGITS, ROOT
from tests.jobs import overrides
from tests.lab.slurm import Cluster

PORT = "23456"


class Nodes:
    """`trainer node` on two machines of the lab, started by hand."""

    def __init__(self, cluster: Cluster, place: Path) -> None:
        self.cluster, self.run = cluster, place / "run"
        self.started: dict[int, subprocess.Popen[str]] = {}

    def start(
        self,
        rank: int,
        *settings: str,
        prepare: str = "true",
        address: str = "node1",
        patch: str = "",
        machine: int = 0,
        **environ: str,
    ) -> None:
        """Start node `rank` on machine `rank` + 1, or another, in a mount namespace of its own.

        Args:
            prepare: a shell command that comes first.
            patch: Python statements that come before the kit's own, to have something happen at the right moment.
        """
        machine = machine or rank + 1
        place = {"PET_NNODES": "2", "PET_NODE_RANK": str(rank), "PET_MASTER_ADDR": address, "PET_MASTER_PORT": PORT, **environ}
        variables = [f"{name}={value}" for name, value in {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **place}.items()]
        shape = ["backend=slurm", "resources.nodes=2", "resources.ranks_per_node=1", "training.max_steps=3", overrides(self.run)]
        argv = ["node", str(DIGITS), *shape, "training.log_every_steps=1", *settings]
        script = f"import os, signal\nimport trainer.node.__main__ as node\n{patch}\nfrom trainer.cli import main\nraise SystemExit(main({argv}))"
        node = [sys.executable, *(["-c", script] if patch else ["-m", "trainer", *argv])]
        inside = f"{prepare} && exec env {shlex.join(variables)} {shlex.join(node)}"
        argv = [
            *self.cluster.enter(f"node{machine}"),
            "setpriv",
            "--pdeathsig",
            "KILL",
            "unshare",
            "--mount",
            "sh",
            "-c",
            inside,
        ]
        self.started[machine - 1] = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/")

    def end(self, seconds: float = 60) -> list[tuple[int, str]]:
        """Exit code and output of each, by node rank."""
        ended = [(process.communicate(timeout=seconds)[0], process.returncode) for process in self.started.values()]
        return [(code, output) for output, code in ended]

    def kill(self, rank: int) -> None:
        """End one, and with it all that it has started."""
        process = self.started.pop(rank)
        process.kill()
        process.communicate()


def fault(output: str) -> str:
    return next((line for line in output.splitlines() if line.startswith("FAULT ")), output)
