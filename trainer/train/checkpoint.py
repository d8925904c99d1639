"""Checkpoints that a kill cannot spoil: written aside, synced, renamed, checked by sha256 before they are used (see `stored`)."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any, BinaryIO

import torch

from trainer.errors import ConfigError
from trainer.train.distributed import World
from trainer.train.stored import LATEST, MANIFEST, STATE, file_size, name_of, problem, steps

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves on rank 0 and loads on all ranks, in one folder that all ranks see."""

    def __init__(self, folder: Path, world: World, keep_last: int = 3) -> None:
        self.folder, self.world, self.keep_last = folder, world, keep_last

    def save(self, step: int, state: dict[str, Any], own: dict[str, Any]) -> Path:
        """Save; every rank must call it.

        Args:
            step: optimizer steps done.
            state: what is equal on all ranks; rank 0's is written.
            own: what differs between ranks, such as random state; gathered into `state["ranks"]`.
        """
        target = self.folder / name_of(step)
        ranks = self.world.gather(own)
        if self.world.rank == 0 and not problem(target):
            logger.info("checkpoint of step %d is there already", step)
        elif self.world.rank == 0:
            self._write(target, {"step": step, **state, "ranks": ranks})
            self._prune(step)
        return target

    def load(self, required: bool = False) -> dict[str, Any] | None:
        """The newest whole checkpoint's state, on the CPU, the same on all ranks; None if there is none.

        Raises:
            ConfigError: `required` and there is none, or this rank cannot see the one that rank 0 chose.
        """
        name = self.world.from_rank_0(self._newest() if self.world.rank == 0 else None)
        if name is None:
            if required:
                raise ConfigError(
                    f"checkpoint.resume=required: no whole checkpoint in {self.folder}; correct run_dir or set auto"
                )
            logger.info("no checkpoint in %s: starting at step 0", self.folder)
            return None
        path = self.folder / name / STATE
        if not path.is_file():
            raise ConfigError(f"run_dir: {path} is not visible on {self.world.host}; put run_dir on storage that all nodes share")
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        logger.info("resuming at step %d from %s", state["step"], path.parent)
        return state

    def _newest(self) -> str | None:
        found = steps(self.folder)
        for step in reversed(found):
            name = name_of(step)
            wrong = problem(self.folder / name)
            if wrong is None:
                if step != found[-1]:
                    logger.warning("using the checkpoint of step %d; %d steps are lost", step, found[-1] - step)
                return name
            logger.warning("checkpoint of step %d is damaged: %s", step, wrong)
            _set_aside(self.folder / name)
        return None

    def _write(self, target: Path, state: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("*.tmp"):
            _remove(stale)
        staging = target.with_suffix(".tmp")
        staging.mkdir()
        try:
            with open(staging / STATE, "wb") as file:
                writer = _HashingFile(file)
                torch.save(state, writer)  # type: ignore[arg-type]
                _sync(file)
            files = {STATE: {"bytes": file_size(staging / STATE), "sha256": writer.digest.hexdigest()}}
            with open(staging / MANIFEST, "w", encoding="utf-8") as text:
                json.dump({"step": state["step"], "files": files}, text, indent=2)
                _sync(text)
            _sync_folder(staging)
            _remove(target)  # one that is damaged
            staging.rename(target)
            _sync_folder(self.folder)
            self._point_latest(target.name)
        except BaseException:
            _remove(staging)
            raise

    def _point_latest(self, name: str) -> None:
        link = self.folder / f"{LATEST}.tmp"
        link.symlink_to(name)
        link.replace(self.folder / LATEST)

    def _prune(self, newest: int) -> None:
        """Drop the oldest, and what a run that went on from an older one has made obsolete. The one just written stays."""
        found = steps(self.folder)
        kept = [step for step in found if step <= newest][-self.keep_last :]
        for step in set(found) - set(kept):
            _remove(self.folder / name_of(step))


def _set_aside(folder: Path) -> None:
    """Keep a damaged checkpoint for whoever wants to look, out of the way of those that count."""
    aside = folder.with_suffix(".damaged")
    _remove(aside)
    folder.rename(aside)


class _HashingFile:
    """Hashes what passes through to a file. torch.save writes front to back, so that no second read is needed."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.digest = file, hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
