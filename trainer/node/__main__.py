"""The entry of a node: `trainer node CONFIG` is what runs on every node, everywhere. Only this module here knows the config."""

from __future__ import annotations

import importlib
import math
import os
import socket
import sys
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config import TRAIN, Config
from trainer.errors import ExitCode, Fault, FaultError, KitError
from trainer.node import gpus, health, judge, network, parity, prepare, ranks, rendezvous, rollcall, signals
from trainer.node.guard import Guard
from trainer.node.identity import Identity, identify
from trainer.node.logs import RunFolder, say
from trainer.node.record import Attentive, Record
from trainer.node.vitals import Limits, Vitals
from trainer.placement import END_TIME
from trainer.settings import changed, check_resume, dump_config, load_config, refuse_stopped

if TYPE_CHECKING:
    from trainer.node.store import Roll
    from trainer.node.watch import Watch

TERMINAL = "TRAINER_TERMINAL_FD"  # tells rank 0 where to draw its progress bar
HEALTH_FILE = "TRAINER_HEALTH_FILE"  # touched while this node lives, for the health check of a container
_LOOK_SECONDS = 5.0  # to see whether what listens at node 0's port is a store
_SECOND_SECONDS = 15.0  # how long a second node 0 tries to reach the first, which may still be loading its libraries
EXIT_CODES = "TRAINER_EXIT_CODES"  # folder where a batch script looks, as srun tells only by which signal it ended the tasks


def main(arguments: list[str]) -> int:
    """Run this node to its end; returns the exit code."""
    _leave(None)
    code = _main(arguments)
    _leave(code)
    return code


def _main(arguments: list[str]) -> int:
    node = record = None
    try:
        config = load_config(*arguments)
        record = Record(RunFolder(Path(config.folder)))
        refuse_stopped(config, Path(config.stop_file).exists())
        gpus = config.resources.gpus_per_node if config.training.device == "auto" else 0
        place = identify(os.environ, config.resources.nodes, config.resources.ranks, config.backend == "local", gpus)
        node = _Node(config, place, record)
        return node.run()
    except FaultError as error:
        code, lines = error.exit_code, [error.fault.line()]
    except KitError as error:
        code, lines = error.exit_code, [f"error: {line}" for line in error.lines]
    if record:
        record.end(node.node.node_rank if node else 0, socket.gethostname(), code, lines[0])
    for line in lines:
        say(line)
    return code


class _Node:
    """The phases of a node's life, in order."""

    def __init__(self, config: Config, node: Identity, record: Record) -> None:
        self.config, self.node, self.record, self.folder = config, node, record, record.folder
        self.unwritable: str | None = None  # why the run folder cannot be written
        if (end := config.resources.end_time(os.environ, record.born)) != math.inf:
            os.environ[END_TIME] = str(end)

    def run(self) -> int:
        node = self.node
        self.guard = Guard()  # first: before any thread exists
        with ExitStack() as stack:
            if node.node_rank > 0:
                self.unwritable = self.folder.problem()
                return self._run()
            try:
                stack.enter_context(self.folder.held(node.host))
            except BlockingIOError as error:
                self.record.silent = True
                raise self._second(str(error)) from None
            except OSError as error:
                self.unwritable = error.strerror or str(error)
            return self._run()

    def _second(self, holder: str) -> FaultError:
        """Another node 0 has the run folder: of this start, which then learns of both, or of another."""
        node = self.node
        if node.nnodes > 1:
            try:
                rollcall.attempt(node, rollcall.Terms(job=self.record.job), time.monotonic() + _SECOND_SECONDS)
            except FaultError as error:
                return error
        cause = f"the run folder {self.folder.folder} is in use by {holder}"
        return node.fault("G7", cause, "wait for its end, cancel it, or use another run_dir")

    def _run(self) -> int:
        node = self.node
        listener = rendezvous.listen(node) if node.node_rank == 0 else None
        if listener:
            node = self.node = replace(node, master_port=listener.getsockname()[1])
        self.waker, interface = signals.Signals(os.environ.get(HEALTH_FILE)), self.config.rollcall.interface
        prepare.environment(os.environ, node.nproc_per_node, node.master_addr == "127.0.0.1", interface)
        prepare.warm_up(TRAIN if self._targets else None, self._targets)
        if listener and not self.unwritable:
            check_resume(self.config, self.folder.folder)
            self.folder.keep_config(dump_config(self.config))
        place = self._join(listener)
        if self.config.rollcall.only:
            self.record.end(node.node_rank, node.host, ExitCode.DONE, None)
            return ExitCode.DONE
        if interface == "auto" and self.config.backend != "local" and (chosen := network.choose(os.environ, place.address)):
            say(f"[{node.host}] the ranks talk over {chosen} ({place.address})")
        roll = self._roll(place, listener)
        watch = importlib.import_module("trainer.node.watch")  # it brings torch
        evidence = partial(self.folder.evidence, attempt=roll.attempt)
        stop_seconds = self.config.watch.stop_seconds
        return self._train(watch.Watch(roll, self.guard, self.waker, _on_terminal(node), stop_seconds, place.hosts, evidence))

    @property
    def _targets(self) -> dict[str, str]:
        """Section of the config -> target; none for the user's own script."""
        parts = ("model", "data", "loss", "optimizer") if self.config.entrypoint == TRAIN else ()
        return {name: getattr(self.config, name).target for name in parts}

    def _join(self, listener: socket.socket | None) -> rollcall.Place:
        """The roll call."""
        config, node = self.config, self.node
        deadline = time.monotonic() + config.watch.join_seconds
        found = gpus.look(os.environ) if config.resources.gpus_per_node else None
        wanted, cuda = config.resources.gpus_per_node, config.container.cuda_version
        trouble = prepare.own_trouble(node, os.environ, config.rollcall.interface, wanted, found, cuda)
        try:
            self._pause(0)  # a stop may have come while the libraries were loaded
        except FaultError as stop:
            trouble = stop
        if self.unwritable:
            cause = f"the run folder {self.folder.folder} cannot be written: {self.unwritable}"
            trouble = node.fault("K4", cause, "correct run_dir, or give the node the right to write there")
        if trouble:
            if node.nnodes == 1:
                raise trouble
            say(f"[{node.host}] {trouble.fault.cause}: telling the other nodes")
        terms = self._terms(trouble.fault if trouble else None, found)
        pause = Attentive(self._pause, self.record.other_end)
        try:
            if listener:
                keep = partial(self.folder.report, node.nnodes, config.rollcall.only)
                return judge.preside(node, terms, listener, deadline, say, pause, config.rollcall.probe, keep)
            is_store = partial(importlib.import_module("trainer.node.store").answers, seconds=_LOOK_SECONDS)
            return rollcall.join(node, terms, deadline, pause, is_store)
        except FaultError as error:
            if trouble and error.exit_code.retryable:  # the others could not be told
                raise trouble from None
            raise

    def _pause(self, seconds: float) -> None:
        """Sleep as part of a wait that a stop request ends."""
        self.waker.wait(seconds)
        if self.waker.waiting:
            cause = f"{self.waker.waiting.pop(0).name} before the ranks were started"
            raise self.node.fault("D8", cause, "start again to go on", ExitCode.STOPPED)

    def _terms(self, trouble: Fault | None, found: gpus.Gpus | None) -> rollcall.Terms:
        config = self.config
        script = Path(config.entrypoint) if config.entrypoint != TRAIN else None
        modules = sorted({target.partition(":")[0] for target in self._targets.values()})
        workers = config.data.num_workers if config.data else 0
        warnings = [*health.warnings(self.node.nproc_per_node, workers, os.environ), *(found.warnings if found else [])]
        for warning in warnings:
            say(f"[{self.node.host}] warning: {warning}")
        return rollcall.Terms(
            self.record.attempt,
            parity.facts(changed(config), script, modules, sys.modules["torch"]),
            prepare.traits(os.environ, found),
            warnings,
            config.rollcall.parity == "warn",
            trouble,
            self.record.job,
            self.folder,
            network.named_address(os.environ),
        )

    def _roll(self, place: rollcall.Place, listener: socket.socket | None) -> Roll:
        """The store, which takes over node 0's port."""
        self.node = node = replace(self.node, master_addr=place.master)  # ranks need no name server to find it
        store = importlib.import_module("trainer.node.store")
        if listener:
            store.serve(listener, self.guard.forget)
        try:
            if listener is None and not store.answers(place.master, node.master_port):
                raise ConnectionError
            roll: Roll = store.Roll(node, store.connect(place.master, node.master_port), place.attempt, place.address)
            if fault := roll.all_arrived(place.hosts):
                raise FaultError(fault)
        except ConnectionError:
            cause = f"lost node 0 after the roll call: its store at {node.address} does not answer"
            raise node.fault("C3", cause, "look at node 0's log", ExitCode.NODE_LOST) from None
        return roll

    def _train(self, watch: Watch) -> int:
        node, attempt = self.node, watch.roll.attempt
        self.record.attempt = attempt
        self.record.begin(node.node_rank, node.host, node.nnodes, node.source)
        reason = ranks.unsafe_to_fork()
        if reason:
            say(f"[{node.host}] starting ranks as fresh processes, which is slower than forking them: {reason}")
        keep = [os.dup(2)] if _on_terminal(node) else []
        limits = Limits(self.config.watch.stall_seconds, self.config.watch.phase_seconds)
        try:
            fault = watch.stopped_before_start()
            logs, entrypoint = self.folder.logs(attempt), self.config.entrypoint
            arguments = [str(self.folder.config_file)] if entrypoint == TRAIN else self.config.entrypoint_args
            for local_rank in range(0 if fault else node.nproc_per_node):
                rank = ranks.plan(node, local_rank, attempt, self.config.name, logs, entrypoint, arguments)
                if keep and rank.rank == 0:
                    rank.environ[TERMINAL] = str(keep[0])
                seen = Vitals(limits, node.world_size, time.monotonic())
                rank.environ.update(seen.environ)
                pid = ranks.spawn(rank, (*keep, *seen.fds)) if reason else ranks.fork(rank, self.guard.forget)
                watch.add(rank, pid, seen)
            code, fault = (fault.exit_code, fault) if fault else watch.run()
        finally:
            watch.kill()
        self.record.end(node.node_rank, node.host, code, fault.line() if fault else None)
        if fault:
            watch.roll.linger()
        for text in watch.last_words:
            say(text)
        if fault:
            say(fault.line())
        self.guard.close()
        return code


def _leave(code: int | None) -> None:
    """Leave this node's exit code for the batch script, in a file of its own; None: a sign that the node came up."""
    if folder := os.environ.get(EXIT_CODES):
        with suppress(OSError):
            (Path(folder) / f"{socket.gethostname()}-{os.getpid()}").write_text("" if code is None else f"{int(code)}\n")


def _on_terminal(node: Identity) -> bool:
    return node.node_rank == 0 and os.isatty(2)
