"""The entry of a node: `trainer node CONFIG` is what runs on every node, everywhere. Only this module here knows the config."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from trainer.config import TRAIN, Config
from trainer.errors import ERROR_FILE, ExitCode, FaultError, KitError
from trainer.node import network, parity, prepare, ranks, rendezvous, signals, software
from trainer.node.guard import Guard
from trainer.node.identity import Identity, identify
from trainer.node.logs import RunFolder, say
from trainer.settings import check_resume, dump_config, load_config

if TYPE_CHECKING:
    from trainer.node.rollcall import Roll
    from trainer.node.watch import Watch

TERMINAL = "TRAINER_TERMINAL_FD"  # tells rank 0 where to draw its progress bar
HEALTH_FILE = "TRAINER_HEALTH_FILE"  # touched while this node lives, for the health check of a container
EXIT_CODES = "TRAINER_EXIT_CODES"  # folder where a batch script looks, as srun tells only by which signal it ended the tasks


def main(arguments: list[str]) -> int:
    """Run this node to its end; returns the exit code."""
    _leave(None)
    code = _main(arguments)
    _leave(code)
    return code


def _main(arguments: list[str]) -> int:
    node = None
    try:
        config = load_config(*arguments)
        gpus = config.resources.gpus_per_node if config.training.device == "auto" else 0
        place = identify(os.environ, config.resources.nodes, config.resources.ranks, config.backend == "local", gpus)
        node = _Node(config, place)
        return node.run()
    except FaultError as error:
        code, lines = error.exit_code, [error.fault.line()]
    except KitError as error:
        code, lines = error.exit_code, [f"error: {line}" for line in error.lines]
    if node:
        node.end(code, lines[0])
    for line in lines:
        say(line)
    return code


class _Node:
    """The phases of a node's life, in order."""

    def __init__(self, config: Config, node: Identity) -> None:
        self.config, self.node = config, node
        self.folder = RunFolder(Path(config.folder))
        self.attempt = self.folder.attempts()
        self.config_file = self.folder.folder / "config.yaml"

    def run(self) -> int:
        node = self.node
        self.guard = Guard()  # first: before any thread exists
        if node.node_rank > 0:
            return self._run()
        try:
            with self.folder.held(node.host):
                return self._run()
        except BlockingIOError as error:
            cause = f"the run folder {self.folder.folder} is in use by {error}"
            raise node.fault("G7", cause, "wait for its end, cancel it, or use another run_dir") from None

    def end(self, code: int, fault: str | None) -> None:
        """Record how this node ended."""
        facts = {"node_rank": self.node.node_rank, "host": self.node.host}
        self.folder.event("node_end", attempt=self.attempt, **facts, exit_code=int(code), fault=fault)

    def _run(self) -> int:
        node = self.node
        listener = rendezvous.listen(node) if node.node_rank == 0 else None
        if listener:
            node = self.node = _with_port(node, listener.getsockname()[1])
        prepare.environment(os.environ, node.nproc_per_node, node.master_addr == "127.0.0.1")
        kit = self.config.entrypoint == TRAIN
        parts = {name: getattr(self.config, name).target for name in ("model", "data", "loss", "optimizer")} if kit else {}
        prepare.warm_up(TRAIN if kit else None, parts)
        # Loaded here and not at the top: it brings torch, and the threads of its libraries are counted from the environment.
        rollcall = importlib.import_module("trainer.node.rollcall")
        watch = importlib.import_module("trainer.node.watch")
        waker = signals.Signals(os.environ.get(HEALTH_FILE))
        deadline = time.monotonic() + self.config.watch.join_seconds
        if listener:
            importlib.import_module("trainer.node.store").serve(listener, self.guard.forget)
            self._keep_config()
        try:
            roll = self._join(rollcall, deadline, waker)
        except signals.StopRequest as stop:
            say(f"[{node.host}] {stop}: stopped before the ranks were started")
            self.end(ExitCode.STOPPED, None)
            return ExitCode.STOPPED
        if self.config.backend != "local" and (chosen := network.choose(os.environ, roll.address)):
            say(f"[{node.host}] the ranks talk over {chosen} ({roll.address})")
        limits = self.config.watch
        watcher = watch.Watch(roll, self.guard, waker, _on_terminal(node), limits.stop_seconds, limits.stall_seconds)
        return self._train(watcher)

    def _join(self, rollcall: ModuleType, deadline: float, waker: signals.Signals) -> Roll:
        config, trouble = self.config, self._own_trouble()
        if trouble and self.node.nnodes == 1:
            raise trouble
        if trouble:
            say(f"[{self.node.host}] {trouble.fault.cause}: telling the other nodes")
        script = Path(config.entrypoint) if config.entrypoint != TRAIN else None
        facts = parity.facts(dump_config(config), script, sys.modules["torch"])
        terms = rollcall.Terms(self.attempt, facts, config.watch.parity == "warn", trouble.fault if trouble else None)
        try:
            roll: Roll = rollcall.join(self.node, terms, deadline, say, waker.pause)
        except FaultError as error:
            if trouble and error.exit_code.retryable:  # the others could not be told
                raise trouble from None
            raise
        return roll

    def _own_trouble(self) -> FaultError | None:
        """What is wrong with this node by itself."""
        if cause := network.problem(os.environ):
            return self.node.fault("A8", cause, "name one of them, or unset it: the kit finds the right one")
        torch, wanted = sys.modules["torch"], self.config.container.cuda_version
        cause = software.cuda_problem(wanted, torch.__version__, torch.version.cuda) if wanted else None
        fix = "start the image that has it, or correct container.cuda_version (IMAGE_CUDA)"
        if cause is None and self.config.resources.gpus_per_node:
            cause = software.driver_problem(torch.version.cuda, os.environ.get("_CUDA_COMPAT_STATUS", ""))
            fix = "install a newer driver on this machine, or start an image for an older CUDA version"
        return self.node.fault("B3", cause, fix) if cause else None

    def _keep_config(self) -> None:
        check_resume(self.config, self.folder.folder)
        text = dump_config(self.config)
        self.folder.folder.mkdir(parents=True, exist_ok=True)
        if not self.config_file.exists() or self.config_file.read_text(encoding="utf-8") != text:
            temporary = self.config_file.with_suffix(".tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.config_file)

    def _train(self, watch: Watch) -> int:
        node, attempt = self.node, watch.roll.attempt
        self.attempt = attempt
        facts = {"attempt": attempt, "node_rank": node.node_rank, "host": node.host}
        self.folder.event("node_start", **facts, pid=os.getpid(), nnodes=node.nnodes, identity=node.source)
        reason = ranks.unsafe_to_fork()
        if reason:
            say(f"[{node.host}] starting ranks as fresh processes, which is slower than forking them: {reason}")
        keep = [os.dup(2)] if _on_terminal(node) else []
        try:
            for local_rank in range(node.nproc_per_node):
                rank = self._rank(local_rank, attempt, keep)
                watch.add(rank, ranks.spawn(rank, tuple(keep)) if reason else ranks.fork(rank, self.guard.forget))
            code, fault = watch.run()
        finally:
            watch.kill()
        self.end(code, fault.line() if fault else None)
        if fault:
            self._linger(watch)
        for text in watch.last_words:
            say(text)
        if fault:
            say(fault.line())
        self.guard.close()
        return code

    def _linger(self, watch: Watch) -> None:
        """After a fault: node 0 keeps the store a little longer, so that all can read the verdict."""
        roll = watch.roll
        with suppress(ConnectionError):
            roll.say_goodbye(self.node.node_rank * self.node.nproc_per_node)
            until = time.monotonic() + 5
            while self.node.node_rank == 0 and not roll.all_said_goodbye() and time.monotonic() < until:
                time.sleep(0.1)

    def _rank(self, local_rank: int, attempt: int, keep: list[int]) -> ranks.Rank:
        node, config = self.node, self.config
        rank = node.node_rank * node.nproc_per_node + local_rank
        name = self.folder.logs(attempt) / f"rank-{rank:04d}.{node.host}"
        environ = {
            "RANK": str(rank),
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
            "TORCHELASTIC_RUN_ID": config.name,
            ERROR_FILE: f"{name}.error.json",
        }
        if keep and rank == 0:
            environ[TERMINAL] = str(keep[0])
        if config.entrypoint == TRAIN:
            arguments = [str(self.config_file)]
        else:
            values = {"{rank}": str(rank), "{local_rank}": str(local_rank), "{world_size}": str(node.world_size)}
            arguments = [_fill(argument, values) for argument in config.entrypoint_args]
        return ranks.Rank(rank, local_rank, config.entrypoint, arguments, environ, f"{name}.log", f"{name}.error.json")


def _leave(code: int | None) -> None:
    """Leave this node's exit code for the batch script, in a file of its own; None: a sign that the node came up."""
    if folder := os.environ.get(EXIT_CODES):
        with suppress(OSError):
            (Path(folder) / f"{socket.gethostname()}-{os.getpid()}").write_text("" if code is None else f"{int(code)}\n")


def _with_port(node: Identity, port: int) -> Identity:
    return replace(node, master_port=port)


def _fill(argument: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        argument = argument.replace(name, value)
    return argument


def _on_terminal(node: Identity) -> bool:
    return node.node_rank == 0 and os.isatty(2)
