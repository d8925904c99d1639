"""The entry of a node: `trainer node CONFIG` is what runs on every node, everywhere. Only this module here knows the config."""

from __future__ import annotations

import importlib
import math
import os
import signal
import socket
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from trainer.config import TRAIN, Config
from trainer.errors import ExitCode, Fault, FaultError, KitError
from trainer.node import gpus, health, judge, network, parity, prepare, rendezvous, rollcall, signals
from trainer.node.guard import Guard
from trainer.node.identity import Identity, identify
from trainer.node.logs import RunFolder, say
from trainer.node.record import Attentive, Record, leave_code
from trainer.node.restarts import Restarts
from trainer.node.vitals import Limits
from trainer.placement import END_TIME
from trainer.process import leave
from trainer.settings import changed, check_resume, dump_config, load_config, refuse_stopped

if TYPE_CHECKING:
    from trainer.node.roll import Roll

HEALTH_FILE = "TRAINER_HEALTH_FILE"  # touched while this node lives, for the health check of a container
_LOOK_SECONDS = 5.0  # to see whether what listens at node 0's port is a store
_SECOND_SECONDS = 15.0  # how long a second node 0 tries to reach the first, which may still be loading its libraries


def main(arguments: list[str]) -> NoReturn:
    """Run this node to its end, and leave with its exit code."""
    leave_code(None)
    code = _main(arguments)
    leave_code(code)
    leave(code)


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
        self.restarts, self.store_pid = Restarts(config.watch.max_restarts), 0
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
        prepare.warm_up(self.config.entrypoint, self._targets)
        if listener and not self.unwritable:
            check_resume(self.config, self.folder.folder)
            self.folder.keep_config(dump_config(self.config))
        while True:
            place = self._join(listener)
            if self.config.rollcall.only:
                self.record.end(node.node_rank, node.host, ExitCode.DONE, None)
                return ExitCode.DONE
            if interface == "auto" and self.config.backend != "local" and (chosen := network.choose(os.environ, place.address)):
                say(f"[{node.host}] the ranks talk over {chosen} ({place.address})")
            if (code := self._attempt(place, listener)) is not None:
                self.guard.close()
                return code
            listener = rendezvous.listen(self.node) if listener else None

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
        trouble = trouble or self.restarts.trouble
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
            self.store_pid = store.serve(listener, self.guard.forget)
        try:
            if listener is None and not store.answers(place.master, node.master_port):
                raise ConnectionError
            line = store.connect(place.master, node.master_port)
            roll: Roll = importlib.import_module("trainer.node.roll").Roll(node, *line, place.attempt, place.address)
            if fault := roll.all_arrived(place.hosts):
                raise FaultError(fault)
        except ConnectionError:
            cause = f"lost node 0 after the roll call: its store at {node.address} does not answer"
            raise node.fault("C3", cause, "look at node 0's log", ExitCode.NODE_LOST) from None
        return roll

    def _attempt(self, place: rollcall.Place, listener: socket.socket | None) -> ExitCode | None:
        """Run the ranks once; returns the exit code, or None if they are to start again."""
        config, roll = self.config, self._roll(place, listener)
        node, watch, attempt = (
            self.node,
            *map(importlib.import_module, ("trainer.node.watch", "trainer.node.attempt")),
        )  # with torch
        what = (attempt.on_terminal(node), config.watch.stop_seconds, place.hosts, self.folder, config.watch.straggler_factor)
        watcher = watch.Watch(roll, self.guard, self.waker, *what)
        arguments = [str(self.folder.config_file)] if config.entrypoint == TRAIN else config.entrypoint_args
        limits = Limits(config.watch.stall_seconds, config.watch.phase_seconds)
        work = attempt.Work(config.name, config.entrypoint, arguments, self.folder.logs(roll.attempt), limits)
        self.record.attempt = roll.attempt
        self.record.begin(node.node_rank, node.host, node.nnodes, node.source)
        code, fault = attempt.run(node, roll.attempt, work, self.guard, watcher)
        seen = config.entrypoint == TRAIN and not config.checkpoint.folder
        again = fault is not None and self.restarts.wanted(fault, seen, self.folder.newest_checkpoint())
        if fault and again:
            self.record.restart(node.node_rank, node.host, self.restarts.done, fault)
        else:
            self.record.end(node.node_rank, node.host, code, fault.line() if fault else None)
        if fault:
            roll.linger()
        for text in watcher.last_words:
            say(text)
        if fault and not again:
            say(fault.line())
        elif fault and not self.restarts.trouble:
            say(f"[{node.host}] restart {self.restarts.done} of {self.restarts.most}: {fault.line()}")
        if again:
            self._end_store(roll)
            self.record.attempt = roll.attempt + 1
        return None if again else code

    def _end_store(self, roll: Roll) -> None:
        """Its keys are those of an attempt that is over. All see its end before they look for the next one's."""
        if self.store_pid:
            os.kill(self.store_pid, signal.SIGKILL)
            os.waitpid(self.store_pid, 0)
        roll.outlive()
