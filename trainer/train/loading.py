"""How a start finds the newest whole checkpoint: where checkpoints lie, or complete on the nodes' own disks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from trainer.errors import ConfigError
from trainer.train.distributed import World
from trainer.train.files import DamagedError, mapped_file
from trainer.train.listing import refuse_if_all_damaged
from trainer.train.local import Entry, Local, complete_saves
from trainer.train.parts import read
from trainer.train.place import Place

logger = logging.getLogger(__name__)

TURN_SECONDS = 5.0  # ranks that wait for a slow disk tell each other so, well within the limit of one collective
_T = TypeVar("_T")
_Parts = list[tuple[int, Entry]]  # by rank of the part: the rank that has it on its node's disk, and its entry


def in_turns(world: World, work: Callable[[], _T] | None) -> tuple[_T | None, Exception | None]:
    """This rank's result of work that may take longer than one collective may, or its error. Every rank must call it.

    Args:
        work: None on ranks that only wait.
    """
    done: list[_T] = []
    wrong: list[Exception] = []

    def go() -> None:
        try:
            if work:
                done.append(work())
        except Exception as error:
            wrong.append(error)

    working = threading.Thread(target=go, daemon=True)
    working.start()
    while True:
        working.join(TURN_SECONDS if work else 0)
        (pending,) = world.largest_numbers(working.is_alive())
        if not pending:
            return (done[0] if done else None), (wrong[0] if wrong else None)


def from_rank_0(world: World, work: Callable[[], _T]) -> _T:
    """Rank 0's result, on every rank.

    Raises:
        ConfigError: it failed on rank 0; the same on every rank.
    """
    found, wrong = in_turns(world, work if world.rank == 0 else None)
    value, told = world.from_rank_0((found, _line(wrong)))
    if told:
        raise ConfigError(told)
    result: _T = value
    return result


class Loading:
    """A start's look for what it goes on from."""

    def __init__(self, world: World, place: Place, local: Local | None, keep_last: int, mark: str) -> None:
        """
        Args:
            mark: for a checkpoint that is made of the nodes' own copies; no other start has the same.
        """
        self.world, self.place, self.local, self.keep_last, self.mark = world, place, local, keep_last, mark

    def load(self, required: bool) -> dict[str, Any] | None:
        """See `Checkpointer.load`."""
        step = from_rank_0(self.world, self._newest)
        if self.local:
            step = self._recover(self.local, step)
        if step is None:
            if required:
                raise ConfigError(f"checkpoint.resume=required: no whole checkpoint in {self.place}; correct run_dir or set auto")
            from_rank_0(self.world, lambda: refuse_if_all_damaged(self.place))
            logger.info("no checkpoint in %s: starting at step 0", self.place)
            return None
        return self._read(step)

    def _newest(self) -> int | None:
        self.place.clean()  # of a start that was killed
        return self.place.newest(logger.warning)

    def _read(self, step: int) -> dict[str, Any]:
        """Each node fetches it once, and all ranks read it."""
        leads = self.world.local_rank == 0
        _, wrong = in_turns(self.world, (lambda: self.place.fetch(step)) if leads else None)
        told = self._first(wrong)
        if told is None:
            state, wrong = in_turns(self.world, lambda: read(self.place.fetch(step)))
            told = None if wrong is None else self._unreadable(wrong, step)
            # Not told to the others: who cannot see the storage ends with a line of its own.
            if leads:
                self.place.forget()
            if state is not None:
                logger.info("resuming at step %d from %s", state["step"], self.place)
                return state
        raise ConfigError(told or "")

    def _unreadable(self, error: Exception, step: int) -> str:
        where = getattr(error, "filename", None) or f"{self.place}, step {step},"
        return f"run_dir: {where} cannot be read on {self.world.host} ({error}); put run_dir on storage that all nodes share"

    def _recover(self, local: Local, newest: int | None) -> int | None:
        """Bring the newest save that is complete on the nodes' own disks to where the checkpoints lie, if it is newer than those.

        Returns:
            The step of the newest whole checkpoint now.
        """
        held = self.world.gather(local.held() if self.world.local_rank == 0 else [])
        saves = self.world.from_rank_0(complete_saves(held, -1 if newest is None else newest) if self.world.rank == 0 else None)
        for number, parts in enumerate(saves):
            if self._brought(local, parts, f"{self.mark}-l{number}"):
                newest = parts[0][1]["step"]
                if self.world.rank == 0:
                    logger.info("checkpoint of step %d was complete on the nodes' own disks: copied to %s", newest, self.place)
                break
        if self.world.local_rank == 0:
            local.wipe()  # what is of use is where the checkpoints lie; the rest is of no run any more
        self.world.largest_numbers(0)  # nobody writes there before
        return newest

    def _brought(self, local: Local, parts: _Parts, mark: str) -> bool:
        step, mine = parts[0][1]["step"], [entry for teller, entry in parts if teller == self.world.rank]

        def put() -> None:
            for entry in mine:
                with mapped_file(local.file(entry)) as view:
                    self.place.put(step, mark, entry["rank"], view, entry["sha256"])

        _, wrong = in_turns(self.world, put)
        damaged = self.world.largest_numbers(isinstance(wrong, (DamagedError, FileNotFoundError)))[0]
        if damaged:
            if self.world.rank == 0:
                logger.warning("the save of step %d on the nodes' own disks is damaged: it is not used", step)
                self.place.drop(step, mark)
            return False
        if told := self._first(wrong):
            raise ConfigError(told)
        return from_rank_0(self.world, lambda: self.place.commit(step, mark, len(parts), self.keep_last, lambda: True))

    def _first(self, wrong: Exception | None) -> str | None:
        """The first rank's error, on all ranks."""
        told = [line for line in self.world.gather(_line(wrong)) if line]
        line: str | None = self.world.from_rank_0(told[0] if told else None)
        return line


def _line(error: Exception | None) -> str | None:
    if error is None or isinstance(error, ConfigError):
        return str(error) if error else None
    return f"run_dir: {' '.join(str(error).split())}; start again when the storage answers"
