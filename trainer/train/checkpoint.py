"""Checkpoints that a kill cannot spoil and that cost the loop next to nothing.

Every rank has a writer process (see `writer`) and memory that both share (see `behind`). A save copies this rank's share of the
state there, behind the next step's forward and backward pass, and `join` ends that before the weights change; the rest happens
beside the training. Parts become a checkpoint by a rename once all are on disk; sha256 tells damage before one is used.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from trainer.errors import ConfigError, ExitCode, Fault, FaultError
from trainer.train.behind import Arena, Writer
from trainer.train.distributed import World
from trainer.train.parts import REST, Layout, from_bytes, lay_out, read, share_out, take_apart, to_bytes
from trainer.train.stored import name_of, newest_of, remove, staging_name, staging_steps

logger = logging.getLogger(__name__)

_TURN_SECONDS = 5.0  # ranks that wait for a slow disk tell each other so, well within the limit of one collective
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Checkpointer:
    """Saves and loads in one folder that all ranks see. Every rank has one, and calls `save`, `finish` and `load` alike."""

    def __init__(self, folder: Path, world: World, keep_last: int = 3, go_on: bool = False) -> None:
        """
        Args:
            go_on: after a save that failed: warn and train on, instead of ending the run.
        """
        self.folder, self.world, self.keep_last, self.go_on = folder, world, keep_last, go_on
        self.seconds = 0.0  # the longest that writing one has taken
        self._mark = f"{time.time_ns() ^ os.getpid():x}"
        self._marked = not world.grouped  # whether all ranks have the same: it keeps this start's files apart from others'
        self._writer: Writer | None = None
        self._arena = Arena(pinned=world.device.type == "cuda")
        self._copying: threading.Thread | None = None
        self._saves = 0
        self._step: int | None = None  # of the save in flight
        self._staging = folder
        self._answer: dict[str, Any] | None = None  # what came of this rank's part of it

    def save(self, step: int, state: dict[str, Any], own: dict[str, Any], behind: bool = False) -> None:
        """Begin to save. A save in flight is waited for.

        Args:
            step: optimizer steps done.
            state: what is equal on all ranks; each writes its share.
            own: what differs between ranks, such as random state.
            behind: the caller sees to it that tensors in `state` stay as they are until `join`.

        Raises:
            FaultError: the save before this one has failed.
        """
        self.finish()
        if self._is_there(step):
            return
        self._step, self._answer, self._saves = step, None, self._saves + 1
        self._staging = self.folder / staging_name(step, f"{self._mark}-{self._saves}")
        try:
            self._begin({**state, "step": step}, own)
        except Exception as error:  # the other ranks are to hear of it, and not to wait for this part
            self._answer = _failure(error)
        if not behind:
            self.join()

    def join(self) -> None:
        """Wait until the save in flight has all it needs: from here on, tensors may change."""
        if self._copying:
            self._copying.join()
            self._copying = None

    def finish(self) -> bool:
        """Wait until the save in flight is whole on disk, or has failed; returns whether it is whole.

        Raises:
            FaultError: it failed (unless the run is to go on): the same on every rank.
        """
        self.join()
        if self._step is None:
            return True
        while True:
            if self._answer is None and self._writer:
                self._answer = self._writer.answer(_TURN_SECONDS)
            mine = self._answer or {}
            pending, failed = self.world.largest_numbers(self._answer is None, "error" in mine)
            if not pending:
                break
            if failed and self._answer is None and self._writer and self.world.rank == 0:
                self._writer.ask({"abandon": self._step})
        step, self._step = self._step, None
        if mine.get("dead") and self._writer:
            self._writer.close()
            self._writer = None
        if failed:
            self._failed(step, mine)
        else:
            self.seconds = max(self.seconds, mine["seconds"])
        return not failed

    def load(self, required: bool = False) -> dict[str, Any] | None:
        """The newest whole checkpoint's state, on the CPU, the same on all ranks; None if there is none.

        Raises:
            ConfigError: `required` and there is none, or this rank cannot see the one that rank 0 chose.
        """
        self.finish()
        name, wrong = self._from_rank_0(self._newest)
        if wrong:
            raise ConfigError(f"run_dir: {wrong}; start again when the storage answers")
        if name is None:
            if required:
                raise ConfigError(
                    f"checkpoint.resume=required: no whole checkpoint in {self.folder}; correct run_dir or set auto"
                )
            logger.info("no checkpoint in %s: starting at step 0", self.folder)
            return None
        path = self.folder / name
        try:
            state = read(path)
        except (OSError, ValueError, KeyError) as error:
            where = f"{getattr(error, 'filename', None) or path} cannot be read on {self.world.host} ({error})"
            raise ConfigError(f"run_dir: {where}; put run_dir on storage that all nodes share") from None
        logger.info("resuming at step %d from %s", state["step"], path)
        return state

    def close(self) -> None:
        """End the writer; a save that has not been waited for is lost."""
        if self._copying:
            self._copying.join()
        if self._writer:
            self._writer.close()
        self._arena.close()

    def _from_rank_0(self, work: Callable[[], Any]) -> Any:
        """Rank 0's result of work that may take longer than one collective may."""
        found: list[Any] = []
        working = threading.Thread(target=lambda: found.append(work()), daemon=True)
        if self.world.rank == 0:
            working.start()
        while True:
            if self.world.rank == 0:
                working.join(_TURN_SECONDS)
            (pending,) = self.world.largest_numbers(working.is_alive())
            if not pending:
                return self.world.from_rank_0(found[0] if found else None)

    def _newest(self) -> tuple[str | None, str | None]:
        """Name of the newest whole checkpoint, if there is one; or why that cannot be told."""
        try:
            for path, _ in staging_steps(self.folder):  # of a start that was killed
                remove(path)
            found = newest_of(self.folder, logger.warning)
        except OSError as error:
            return None, str(error)
        return (None if found is None else name_of(found)), None

    def _is_there(self, step: int) -> bool:
        """Whether a run that went on from an older checkpoint has come to one that is there already."""
        if not self._marked:
            self._mark, self._marked = self.world.from_rank_0(self._mark), True
        (exists,) = self.world.largest_numbers(self.world.rank == 0 and (self.folder / name_of(step)).exists())
        there = bool(exists) and self._from_rank_0(lambda: self._is_whole(step))
        if there and self.world.rank == 0:
            logger.info("checkpoint of step %d is there already", step)
        return bool(there)

    def _is_whole(self, step: int) -> bool:
        with suppress(OSError):
            return newest_of(self.folder, logger.warning, step) == step
        return False

    def _begin(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Lay this rank's part out, and start to copy."""
        rest: dict[str, Any] = {"own": own}
        tensors, stripped = take_apart(state)
        if self.world.rank == 0:
            rest["state"] = stripped
        mine = {name: tensors[name] for name in share_out(tensors, self.world.world_size)[self.world.rank]}
        content = to_bytes(rest)
        if self._saves == 1:  # what could not be loaded is told now and not at a resume
            from_bytes(content)
        layout = lay_out(mine, len(content))
        self._arena.reserve(layout.size)
        self._arena.put(0, layout.header)
        self._arena.put(layout.offsets[REST], content)
        self._writer = self._writer or Writer(self._arena)
        ready = [torch.cuda.current_stream(device).record_event() for device in self._gpus]
        self._copying = threading.Thread(target=self._copy, args=(mine, layout, ready), daemon=True)
        self._copying.start()

    @property
    def _gpus(self) -> list[torch.device]:
        return list(self.world.devices) if self._arena.pinned else []

    def _copy(self, tensors: Mapping[str, torch.Tensor], layout: Layout, ready: Sequence[torch.cuda.Event]) -> None:
        """In a thread of its own: copy, then have the writer write."""
        try:
            with ExitStack() as stack:
                streams = [torch.cuda.Stream(device) for device in self._gpus]  # type: ignore[no-untyped-call]
                for stream, event in zip(streams, ready, strict=True):
                    stream.wait_event(event)
                    stack.enter_context(torch.cuda.stream(stream))  # the last one's device is the current one; all are set
                for name, tensor in tensors.items():
                    self._arena.copy(layout.offsets[name], tensor)
                for stream in streams:
                    stream.synchronize()
            assert self._writer is not None
            place = {"rank": self.world.rank, "ranks": self.world.world_size, "keep_last": self.keep_last}
            self._writer.ask({"step": self._step, "staging": str(self._staging), "size": layout.size, **place})
        except Exception as error:
            self._answer = _failure(error)

    def _failed(self, step: int, answer: Mapping[str, Any]) -> None:
        """Every rank learns the one reason."""
        told = self.world.gather((answer.get("abandoned", False), self._fault(step, answer)) if "error" in answer else None)
        faults = sorted((each for each in told if each), key=lambda each: each[0])  # first those that did not only give up
        fault = self.world.from_rank_0(faults[0][1] if faults else None)
        if self.world.rank == 0:
            remove(self._staging)  # all writers are idle
        if not self.go_on:
            raise FaultError(fault)
        if self.world.rank == 0:
            logger.warning("%s; going on, as checkpoint.on_failure=continue says", fault.cause)

    def _fault(self, step: int, answer: Mapping[str, Any]) -> Fault:
        free, size = answer.get("free"), answer.get("size")
        space = f": {free / 1e6:.1f} MB free, {size / 1e6:.1f} MB needed" if free is not None and size else ""
        words = f"no space{space}" if answer.get("errno") in _NO_SPACE else answer["error"]
        cause = f"the checkpoint of step {step} could not be written to {self.folder}: {words}; those before it stand"
        fix = "make room there, or correct what is wrong with the storage, and start again to go on"
        return Fault("G2", self.world.host, cause, fix, ExitCode.RANK_FAILED, self.world.rank)


def _failure(error: Exception) -> dict[str, Any]:
    """A rank's own failure, as its writer would tell one."""
    return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}", "errno": getattr(error, "errno", None)}
