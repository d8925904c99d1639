"""Checkpoints that a kill cannot spoil and that cost the loop next to nothing.

Every rank has a writer process (see `writer`) and memory that both share (see `behind`). A save copies this rank's share of the
state there, behind the next step's forward and backward pass, and `join` ends that before the weights change; the rest happens
beside the training. Parts become a checkpoint once all are where it lies (see `place`); sha256 tells damage before one is used.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from trainer.train.behind import Arena, Writer
from trainer.train.distributed import World
from trainer.train.flight import Flight, Save
from trainer.train.loading import Loading, in_turns
from trainer.train.local import Local, local_place
from trainer.train.parts import REST, Layout, from_bytes, lay_out, share_out, take_apart, to_bytes
from trainer.train.place import place_of

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and loads in one place that all ranks see. Every rank has one, and calls `save`, `finish` and `load` alike."""

    def __init__(
        self, folder: Path | str, world: World, keep_last: int = 3, go_on: bool = False, local_folder: str | None = None
    ) -> None:
        """
        Args:
            folder: of the checkpoints, or their URL.
            go_on: after a save that failed: warn and train on, instead of ending the run.
            local_folder: on this node's own disk; a part that is there lets the next save begin.

        Raises:
            ConfigError: what a URL of this kind needs is not installed.
        """
        scratch = Path(local_folder or tempfile.gettempdir()).expanduser()
        self._scratch = scratch / f"ddp-job-kit-download-{socket.gethostname()}-{os.getuid()}-{world.rank - world.local_rank}"
        self.folder, self.place = folder, place_of(folder, self._scratch)
        self.world, self.keep_last = world, keep_last
        self._mark = f"{time.time_ns() ^ os.getpid():x}"
        self._prepared, self._local_folder = False, local_folder
        self._local: Local | None = None
        self._arena = Arena(pinned=world.device.type == "cuda")
        self._copying: threading.Thread | None = None
        self._begun = 0
        self._flight = Flight(world, self.place, go_on, local_folder)

    @property
    def seconds(self) -> float:
        """The longest that writing one has taken."""
        return self._flight.seconds

    def save(self, step: int, state: dict[str, Any], own: dict[str, Any], behind: bool = False) -> None:
        """Begin to save. A save in flight is waited for; with a local folder until it is there, and the one before it is whole.

        Args:
            step: optimizer steps done.
            state: what is equal on all ranks; each writes its share.
            own: what differs between ranks, such as random state.
            behind: the caller sees to it that tensors in `state` stay as they are until `join`.

        Raises:
            FaultError: the save before this one, or with a local folder the one before that, has failed.
        """
        started, before = time.monotonic(), self._flight.saves[0].step if self._flight.saves else step
        self.join()
        self._flight.settle(1 if self._local else 0)
        self._flight.tell_wait(step, before, time.monotonic() - started)
        self._prepare()
        if any(each.step == step for each in self._flight.saves) or self._is_there(step):
            return
        self._begun += 1
        self._flight.saves.append(Save(step, f"{self._mark}-{self._begun}"))
        try:
            self._begin({**state, "step": step}, own)
        except Exception as error:  # the other ranks are to hear of it, and not to wait for this part
            self._flight.saves[-1].answer = _failure(error)
        if not behind:
            self.join()

    def join(self) -> None:
        """Wait until the save in flight has all it needs: from here on, tensors may change."""
        if self._copying:
            self._copying.join()
            self._copying = None

    def finish(self) -> bool:
        """Wait until all saves in flight are whole where checkpoints lie, or have failed; returns whether they are whole.

        Raises:
            FaultError: one failed (unless the run is to go on): the same on every rank.
        """
        self.join()
        good = self._flight.settle(0)
        if good and self._local and self._begun:
            self._local.drop(self.world.rank)  # the writer is idle
        return good

    def load(self, required: bool = False) -> dict[str, Any] | None:
        """The newest whole checkpoint's state, on the CPU, the same on all ranks; None if there is none.

        Raises:
            ConfigError: `required` and there is none, all are damaged, or this rank cannot see the one that rank 0 chose.
        """
        self.finish()
        self._prepare()
        return Loading(self.world, self.place, self._local, self.keep_last, self._mark).load(required)

    def close(self) -> None:
        """End the writer; a save that has not been waited for is lost."""
        if self._copying:
            self._copying.join()
        if self._flight.writer:
            self._flight.writer.close()
        self._arena.close()

    def _prepare(self) -> None:
        """Have what all ranks need alike: it keeps this start's files apart from others'."""
        if self._prepared:
            return
        wanted = self.world.rank == 0 and self._local_folder is not None
        identity, wrong = in_turns(self.world, self.place.identity if wanted else None)
        self._mark, identity = self.world.from_rank_0((self._mark, identity))
        if self._local_folder and identity:
            self._local = Local(local_place(self._local_folder, str(self.place), identity))
        elif wrong:  # the first save will say it if that lasts
            logger.warning("warning: checkpoint.local_folder is not used: %s: %s", self.place, wrong)
        self._prepared = True

    def _is_there(self, step: int) -> bool:
        """Whether a run that went on from an older checkpoint has come to one that is there already."""
        exists = False
        if self.world.rank == 0:
            with suppress(OSError):
                exists = self.place.exists(step)
        there = False
        if self.world.largest_numbers(exists)[0]:
            found, _ = in_turns(self.world, (lambda: self.place.newest(logger.warning, step)) if self.world.rank == 0 else None)
            there = self.world.from_rank_0(found == step)
            self.place.forget()
        if there and self.world.rank == 0:
            logger.info("checkpoint of step %d is there already", step)
        return there

    def _begin(self, state: dict[str, Any], own: dict[str, Any]) -> None:
        """Lay this rank's part out, and start to copy."""
        rest: dict[str, Any] = {"own": own}
        tensors, stripped = take_apart(state)
        if self.world.rank == 0:
            rest["state"] = stripped
        mine = {name: tensors[name] for name in share_out(tensors, self.world.world_size)[self.world.rank]}
        content = to_bytes(rest)
        if self._begun == 1:  # what could not be loaded is told now and not at a resume
            from_bytes(content)
        layout = lay_out(mine, len(content))
        self._arena.reserve(layout.size)
        self._arena.put(0, layout.header)
        self._arena.put(layout.offsets[REST], content)
        self._flight.writer = self._flight.writer or Writer(self._arena)
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
            assert self._flight.writer is not None
            self._flight.writer.ask(self._request(layout.size))
        except Exception as error:
            self._flight.saves[-1].answer = _failure(error)

    def _request(self, size: int) -> dict[str, Any]:
        """For the newest save."""
        save, local = self._flight.saves[-1], str(self._local.folder) if self._local else None
        place = {"place": str(self.place), "scratch": str(self._scratch), "local": local, "keep_last": self.keep_last}
        who = {"rank": self.world.rank, "ranks": self.world.world_size}
        return {"step": save.step, "mark": save.mark, "size": size, **who, **place}


def _failure(error: Exception) -> dict[str, Any]:
    """A rank's own failure, as its writer would tell one."""
    return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}", "errno": getattr(error, "errno", None)}
