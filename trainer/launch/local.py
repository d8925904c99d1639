"""The local backend: N nodes are N `trainer node` processes on this machine, each with its own `PET_*`."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.launch.plan import Command, Plan, Submission, keep, locked, new_run_dir, resolved, write_plan
from trainer.launch.run import Run, Status
from trainer.process import die_with_parent, leave, process_state, started_at

_ADDRESS = "127.0.0.1"
_FIRST_PORT, _PORTS = 20000, 9000  # outside the ephemeral range
_FOLLOW_SECONDS = 5.0  # after a node's bad end
_POLL_SECONDS = 0.05
_LISTENER = "TRAINER_MASTER_FD"  # node 0 gets the bound port itself, so that no other job can take it in between


def plan(submission: Submission, run_dir: str) -> Plan:
    """The plan with the port that `submit` would take now."""
    submission.refuse_queue()
    with _free_port(run_dir) as listener:
        return _plan(submission.config, run_dir, listener.getsockname()[1])


def submit(submission: Submission) -> Run:
    """Start the nodes in the background."""
    submission.refuse_queue()
    run, processes = _start(submission.config, new_run_dir(submission.config, make=True), attached=False)
    for process in processes:
        process.returncode = 0  # they go on without us
    return run


def run_here(config: Config, run_dir: str) -> NoReturn:
    """Run the nodes in the foreground, node 0 on this terminal, and leave with the job's exit code.

    Ctrl-C reaches the nodes by the terminal, other stop signals are passed on, and the nodes stop when this process is killed.
    """
    _, processes = _start(config, run_dir, attached=True)

    def pass_on(number: int, frame: object) -> None:
        for process in processes:
            process.send_signal(number)

    signal.signal(signal.SIGINT, signal.SIG_IGN if os.isatty(0) else pass_on)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            signal.signal(number, pass_on)
    codes = _ends(processes)
    for rank, code in enumerate(codes):
        if code < 0:
            print(f"node {rank} was killed by signal {-code}; its ranks are gone, the last checkpoint stands", file=sys.stderr)
    bad = [code for code in codes if code]
    leave(next((code for code in bad if code > 0), 128 - bad[0] if bad else 0))


def _ends(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait for all; returns their exit codes. One that is stopped (SIGSTOP) cannot follow another's bad end: it is killed."""
    until = math.inf
    while late := [process for process in processes if process.poll() is None]:
        if any(process.returncode for process in processes):
            until = min(until, time.monotonic() + _FOLLOW_SECONDS)
        if time.monotonic() > until:
            for process in late:
                if process_state(process.pid) == "T":
                    process.kill()
        time.sleep(_POLL_SECONDS)
    return [process.returncode for process in processes]


def status(run: Run) -> Status:
    """How the run stands, from its processes and what the nodes wrote."""
    job = run.job
    nodes = job["processes"]
    alive = [node["pid"] for node in nodes if started_at(node["pid"]) == node["started"]]
    if alive:
        return Status("running", f"{len(alive)} of {len(nodes)} nodes, pids {', '.join(map(str, alive))}")
    return run.outcome("the run")


def cancel(run: Run, now: bool = False) -> str:
    """Ask the nodes to save and stop, or kill them and their ranks; returns a line for the user."""
    number = signal.SIGKILL if now else signal.SIGTERM
    reached = 0
    for node in run.job["processes"]:
        if started_at(node["pid"]) == node["started"]:
            with suppress(ProcessLookupError):
                os.kill(node["pid"], number)
                reached += 1
    if not reached:
        return "not running"
    return f"killed {reached} nodes" if now else f"asked {reached} nodes to save and stop; see trainer status {run.folder}"


def _start(config: Config, run_dir: str, attached: bool) -> tuple[Run, list[subprocess.Popen[bytes]]]:
    with locked(Submission([config]), run_dir), _free_port(run_dir) as listener:
        made = _plan(config, run_dir, listener.getsockname()[1])
        run = write_plan(made)
        processes = []
        for node_rank, command in enumerate(made.commands):
            processes.append(_start_node(run, node_rank, command, listener, attached))
        facts: list[dict[str, Any]] = [
            {"node_rank": rank, "pid": process.pid, "started": started_at(process.pid)} for rank, process in enumerate(processes)
        ]
        keep(run, made, {"nodes": len(facts), "processes": facts})
    return run, processes


def _plan(config: Config, run_dir: str, port: int) -> Plan:
    commands = []
    for node_rank in range(config.resources.nodes):
        environ = {
            "PET_NNODES": str(config.resources.nodes),
            "PET_NPROC_PER_NODE": str(config.resources.ranks),
            "PET_NODE_RANK": str(node_rank),
            "PET_MASTER_ADDR": _ADDRESS,
            "PET_MASTER_PORT": str(port),
            **config.container.env,
        }
        commands.append(Command([sys.executable, "-m", "trainer", "node", f"{run_dir}/config.yaml"], environ))
    return Plan("local", run_dir, {"config.yaml": resolved(config, run_dir)}, commands)


def _start_node(run: Run, rank: int, command: Command, listener: socket.socket, attached: bool) -> subprocess.Popen[bytes]:
    environ = {**os.environ, **command.environ}
    fds: tuple[int, ...] = ()
    if rank == 0:
        fds = (listener.fileno(),)
        environ[_LISTENER] = str(listener.fileno())
    with open(run.folder / "logs" / f"node-{rank:04d}.log", "ab") as log:
        output = None if attached and rank == 0 else log
        return subprocess.Popen(
            command.argv,
            env=environ,
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=not attached,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM) if attached else None,  # noqa: PLW1509
        )


def _free_port(run_dir: str) -> socket.socket:
    """A listening socket on the first free port, counted from one that follows from the run folder."""
    first = zlib.crc32(run_dir.encode())
    for offset in range(_PORTS):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # node 0 takes the port again when ranks are restarted
        try:
            listener.bind((_ADDRESS, _FIRST_PORT + (first + offset) % _PORTS))
            listener.listen(1024)
            return listener
        except OSError:
            listener.close()
    raise ConfigError(f"backend=local: no free port from {_FIRST_PORT} to {_FIRST_PORT + _PORTS - 1}; stop other jobs")
