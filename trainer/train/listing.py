"""What people are told of the checkpoints of a run, and what a start that finds none whole is refused with. No torch."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trainer.errors import ConfigError
from trainer.train.files import DamagedError
from trainer.train.place import Place, place_of
from trainer.train.stored import DAMAGED

_T = TypeVar("_T")


def listing(checkpoints: Path | str) -> str:
    """See `table`, of a folder or a URL."""
    with tempfile.TemporaryDirectory() as scratch:
        return table(place_of(checkpoints, Path(scratch)))


def table(place: Place) -> str:
    """All checkpoints, also damaged and unfinished ones: step, age, size, and how each is.

    Raises:
        ConfigError: there is none.
    """
    found = _told(place, lambda: list(place.rows()))
    if not found:
        raise ConfigError(f"{place}: no checkpoint there yet; checkpoint.every_steps says how often one is written")
    lines = [f"{'step':>10}  {'saved':19}  {'MB':>10}  "]
    for row in reversed(found):
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row.saved))
        lines.append(f"{row.step:10d}  {saved}  {row.size / 1e6:10.1f}  {row.how}")
    return "\n".join(lines)


def whole_or_refused(place: Place, step: int | None = None) -> Path:
    """The files of the newest whole checkpoint, or of that of a step; what is damaged stays where it is.

    Raises:
        ConfigError: there is none.
    """

    def find() -> Path | None:
        for row in place.rows():
            if row.how == "whole" and step in (None, row.step):
                try:
                    return place.fetch(row.step)
                except DamagedError:
                    continue
        return None

    if found := _told(place, find):
        return found
    which = "no whole checkpoint" if step is None else f"no whole checkpoint of step {step}"
    raise ConfigError(f"{place}: {which} there; see trainer checkpoints")


def refuse_if_all_damaged(place: Place) -> None:
    """For a start that has found no whole checkpoint.

    Raises:
        ConfigError: there are damaged ones, and the run would begin again at step 0 in silence.
    """
    damaged = sorted({row.step for row in _told(place, lambda: list(place.rows())) if row.how.startswith(DAMAGED)})
    if damaged:
        steps = f"step {damaged[0]}" if len(damaged) == 1 else f"steps {', '.join(map(str, damaged))}"
        raise ConfigError(
            f"checkpoint.resume=auto: every checkpoint in {place} is damaged ({steps}); restore one, or move the folder away "
            "to start at step 0"
        )


def _told(place: Place, work: Callable[[], _T]) -> _T:
    try:
        return work()
    except OSError as error:
        raise ConfigError(f"{place}: cannot be read ({error}); try again when the storage answers") from None
