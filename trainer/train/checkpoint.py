"""Checkpoints that a kill cannot spoil and that cost the loop next to nothing.

Every rank has a writer process (see `writer`) and memory that both share (see `arena`). A save copies this rank's share of the
state there, behind the next step's forward and backward pass, and `join` ends that before the weights change; the rest happens
beside the training. Parts become a checkpoint by a rename once all are on disk; sha256 tells damage before one is used.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.errors import ConfigError, ExitCode, Fault, FaultError
from trainer.train.behind import Arena, Writer
from trainer.train.distributed import World
from trainer.train.parts import REST, Layout, lay_out, read, share_out, take_apart, to_bytes
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
        self._failure: BaseException | None = None  # of the copy
        self._step: int | None = None  # of the save in flight

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
        rest: dict[str, Any] = {"own": own}
        tensors, stripped = take_apart({"step": step, **state})
        if self.world.rank == 0:
            rest["state"] = stripped
        mine = {name: tensors[name] for name in share_out(tensors, self.world.world_size)[self.world.rank]}
        content = to_bytes(rest)
        layout = lay_out(mine, len(content))
        self._arena.reserve(layout.size)
        self._arena.put(0, layout.header)
        self._arena.put(layout.offsets[REST], content)
        self._step = step
        ready = torch.cuda.current_stream().record_event() if self._arena.pinned else None
        self._writer = self._writer or Writer(self._arena)
        self._copying = threading.Thread(target=self._copy, args=(mine, layout, step, ready), daemon=True)
        self._copying.start()
        if not behind:
            self.join()

    def join(self) -> None:
        """Wait until the save in flight has all it needs: from here on, tensors may change."""
        if self._copying:
            self._copying.join()
            self._copying = None
            if self._failure:
                raise self._failure

    def finish(self) -> None:
        """Wait until the save in flight is whole on disk, or has failed.

        Raises:
            FaultError: it failed (unless the run is to go on).
        """
        self.join()
        if self._step is None:
            return
        writer, step, mine = self._writer, self._step, None
        assert writer is not None
        while True:
            mine = mine or writer.answer(_TURN_SECONDS)
            failed = mine is not None and "error" in mine
            pending, any_failed = self.world.largest_numbers(mine is None, failed)
            if not pending:
                break
            if any_failed and self.world.rank == 0 and mine is None:
                writer.ask({"abandon": step})
        self._step = None
        self.seconds = max(self.seconds, (mine or {}).get("seconds", 0.0))
        if failed:
            self._failed(step, mine or {})
        elif any_failed and self.world.rank == 0 and self.go_on:
            logger.warning("the checkpoint of step %d failed on another rank; going on", step)

    def load(self, required: bool = False) -> dict[str, Any] | None:
        """The newest whole checkpoint's state, on the CPU, the same on all ranks; None if there is none.

        Raises:
            ConfigError: `required` and there is none, or this rank cannot see the one that rank 0 chose.
        """
        self.finish()
        name = self.world.from_rank_0(self._newest() if self.world.rank == 0 else None)
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
        except OSError as error:
            where = f"{error.filename or path} cannot be read on {self.world.host} ({error.strerror or error})"
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

    def _newest(self) -> str | None:
        for path, _ in staging_steps(self.folder):  # of a start that was killed
            remove(path)
        found = newest_of(self.folder, logger.warning)
        return None if found is None else name_of(found)

    def _is_there(self, step: int) -> bool:
        """Whether a run that went on from an older checkpoint has come to one that is there already."""
        there = False
        if self.world.rank == 0 and (self.folder / name_of(step)).exists():
            there = newest_of(self.folder, logger.warning, step) == step
        if not self._marked:
            self._mark, self._marked = self.world.from_rank_0(self._mark), True
        (found,) = self.world.largest_numbers(there)
        if there:
            logger.info("checkpoint of step %d is there already", step)
        return bool(found)

    def _copy(self, tensors: Mapping[str, torch.Tensor], layout: Layout, step: int, ready: Any) -> None:
        try:
            if self._arena.pinned:
                stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                stream.wait_event(ready)
                with torch.cuda.stream(stream):
                    self._fill(tensors, layout)
                stream.synchronize()
                for device in self.world.devices[1:]:  # what lies there was copied on that device's own stream
                    torch.cuda.current_stream(device).synchronize()
            else:
                self._fill(tensors, layout)
            assert self._writer is not None
            staging = str(self.folder / staging_name(step, self._mark))
            place = {"rank": self.world.rank, "ranks": self.world.world_size, "keep_last": self.keep_last}
            self._writer.ask({"step": step, "staging": staging, "size": layout.size, **place})
        except BaseException as error:
            self._failure = error

    def _fill(self, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
        for name, tensor in tensors.items():
            self._arena.copy(layout.offsets[name], tensor)

    def _failed(self, step: int, answer: Mapping[str, Any]) -> None:
        free = "" if answer.get("free") is None else f": {answer['free'] / 1e6:.1f} MB free, {answer['size'] / 1e6:.1f} MB needed"
        words = f"no space{free}" if answer.get("errno") in _NO_SPACE else answer["error"]
        cause = f"the checkpoint of step {step} could not be written to {self.folder}: {words}; those before it stand"
        if self.go_on:
            logger.warning("%s; going on, as checkpoint.on_failure=continue says", cause)
            return
        fix = "make room there, or correct what is wrong with the storage, and start again to go on"
        raise FaultError(Fault("G2", self.world.host, cause, fix, ExitCode.RANK_FAILED, self.world.rank))
