"""Saves in flight: what their writers answer, how all ranks agree on what came of them, and who is told."""

from __future__ import annotations

import errno
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainer.errors import ExitCode, Fault, FaultError
from trainer.train.behind import Writer
from trainer.train.distributed import World
from trainer.train.loading import TURN_SECONDS
from trainer.train.place import Place

logger = logging.getLogger(__name__)

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_WAIT_SECONDS = 1.0  # a shorter wait for the save before is not worth a warning


@dataclass
class Save:
    """A save that is not known to be whole yet."""

    step: int
    mark: str
    kept: bool = False  # this rank's part is on its node's own disk
    not_kept: str | None = None  # why it could not be
    answer: dict[str, Any] | None = None  # what came of this rank's part in the end


class Flight:
    """The saves in flight, the oldest first. Every rank has one and calls `settle` alike."""

    def __init__(self, world: World, place: Place, go_on: bool, local_folder: str | None) -> None:
        self.world, self.place, self.go_on, self._local_folder = world, place, go_on, local_folder
        self.saves: list[Save] = []
        self.writer: Writer | None = None
        self.seconds = 0.0  # the longest that one has taken
        self._warned: set[str] = set()

    def settle(self, behind: int) -> bool:
        """Wait for saves: all but the newest `behind` are whole then, and those are on the nodes' own disks.

        Returns:
            Whether all that were waited for are whole.

        Raises:
            FaultError: one failed, unless the run is to go on: the same on every rank.
        """
        good, urgent = True, False
        while self.saves:
            save, last = self.saves[0], len(self.saves) <= behind
            if save.answer is None and (urgent or not (last and save.kept)):
                self._hear()
            lacks, failed = save.answer is None and not (last and save.kept), "error" in (save.answer or {})
            lacking, pending, any_failed, news = self.world.largest_numbers(lacks, save.answer is None, failed, self._news(save))
            if news:
                self._tell_not_kept(save)
            if pending and any_failed:
                self._abandon(save)
                urgent = True
            elif not pending:
                good, urgent = self._whole_or_failed(bool(any_failed)) and good, False
            elif not lacking:
                break
        return good

    def _hear(self) -> None:
        """Wait a while for the next answer of the writer."""
        answer = self.writer.answer(TURN_SECONDS) if self.writer else None
        if answer is None:
            return
        for save in self.saves:
            if save.answer is None and (answer.get("dead") or answer["step"] == save.step):
                if "kept" in answer:
                    save.kept = True
                elif "not_kept" in answer:
                    save.not_kept = answer["not_kept"]
                else:
                    save.answer = answer

    def _abandon(self, save: Save) -> None:
        if self.world.rank == 0 and save.answer is None and self.writer:
            self.writer.ask({"abandon": save.mark})

    def _whole_or_failed(self, failed: bool) -> bool:
        """End the oldest save, of which every rank has an answer."""
        save = self.saves.pop(0)
        mine = save.answer or {}
        if mine.get("dead") and self.writer:
            self.writer.close()
            self.writer = None
        if failed:
            self._failed(save, mine)
        else:
            self.seconds = max(self.seconds, mine["seconds"])
        return not failed

    def _news(self, save: Save) -> bool:
        return save.not_kept is not None and "local" not in self._warned

    def _tell_not_kept(self, save: Save) -> None:
        """Once in a run: every rank calls it when one has news."""
        told = self.world.gather((self.world.host, save.not_kept) if save.not_kept else None)
        self._warned.add("local")
        for host, why in [each for each in told if each][:1]:
            where = f"checkpoint.local_folder={self._local_folder}: cannot be written on {host}"
            logger.warning(f"warning: {where} ({why}): its parts go straight to {self.place}; make room there")

    def tell_wait(self, step: int, before: int, seconds: float) -> None:
        """Warn, once in a run, of a save that had to wait for the one before it."""
        if self.world.rank == 0 and before != step and seconds >= _WAIT_SECONDS and "wait" not in self._warned:
            self._warned.add("wait")
            waited = f"the save of step {step} waited {seconds:.1f} s for that of step {before}, and the training with it"
            logger.warning(f"warning: {waited}; raise checkpoint.every_steps")

    def _failed(self, save: Save, answer: Mapping[str, Any]) -> None:
        """Every rank learns the one reason."""
        told = self.world.gather((answer.get("abandoned", False), self._fault(save.step, answer)) if "error" in answer else None)
        faults = sorted((each for each in told if each), key=lambda each: each[0])  # first those that did not only give up
        fault = self.world.from_rank_0(faults[0][1] if faults else None)
        if self.world.rank == 0:
            with suppress(OSError):
                self.place.drop(save.step, save.mark)  # no writer is at it any more
        if not self.go_on:
            raise FaultError(fault)
        if self.world.rank == 0:
            logger.warning("%s; going on, as checkpoint.on_failure=continue says", fault.cause)

    def _fault(self, step: int, answer: Mapping[str, Any]) -> Fault:
        free, size = answer.get("free"), answer.get("size")
        space = f": {free / 1e6:.1f} MB free, {size / 1e6:.1f} MB needed" if free is not None and size else ""
        words = f"no space{space}" if answer.get("errno") in _NO_SPACE else answer["error"]
        cause = f"the checkpoint of step {step} could not be written to {self.place}: {words}; those before it stand"
        fix = "make room there, or correct what is wrong with the storage, and start again to go on"
        return Fault("G2", self.world.host, cause, fix, ExitCode.RANK_FAILED, self.world.rank)
