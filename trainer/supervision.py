"""How a run is looked after: what is saved, what is checked before it starts, and its deadlines."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from trainer.placement import NonNegativeInt, PositiveInt, Seconds, Section


class Checkpoint(Section):
    """What is saved, and how a start uses it."""

    every_steps: PositiveInt = 500
    """Save every so many optimizer steps; the end and a stop signal save too."""
    keep_last: Annotated[int, Field(json_schema_extra={"minimum": 2})] = 3
    """How many to keep; at least 2, so that a damaged newest one has one before it."""
    folder: Annotated[str, Field(min_length=1)] | None = None
    """A URL to keep them at, one for each run: s3://bucket/path, gs://..., any that fsspec knows (extra `remote`); null:
    RUN/checkpoints."""
    local_folder: Annotated[str, Field(min_length=1)] | None = None
    """A folder on each node's own disk, such as /tmp: a part that is written there lets training and the next save go on, and is
    copied on behind it. null: none (with checkpoint.folder: RUN/local)."""
    on_failure: Literal["stop", "continue"] = "stop"
    """What a save that failed (no space, storage that cannot be written) does to the run. The checkpoints before it stand."""
    resume: Literal["auto", "required"] = "auto"
    """auto: go on from the newest whole checkpoint, if there is one; not if all are damaged; required: never start at step 0."""

    @field_validator("folder")
    @classmethod
    def _url(cls, folder: str | None) -> str | None:
        if folder is not None and (not re.match(r"[a-z][a-z0-9+.]*://.", folder) or "::" in folder):
            raise ValueError(
                f"checkpoint.folder={folder}: is no URL; write one such as s3://bucket/path, or null for RUN/checkpoints"
            )
        if folder is not None and folder.startswith("memory:"):
            raise ValueError(f"checkpoint.folder={folder}: is gone when the process ends; use s3://, gs:// or file://")
        return folder

    @field_validator("local_folder")
    @classmethod
    def _on_each_node(cls, folder: str | None) -> str | None:
        if folder is not None and not folder.startswith(("/", "~")):
            raise ValueError(
                f"checkpoint.local_folder={folder}: is not the same place on every node (only ~ is expanded); write a full path"
            )
        return folder

    @field_validator("keep_last")
    @classmethod
    def _two(cls, keep_last: int) -> int:
        if keep_last < 2:
            raise ValueError(
                f"checkpoint.keep_last={keep_last}: where the newest is damaged, the one before it is needed; make it at least 2"
            )
        return keep_last


class RollCall(Section):
    """What the nodes tell and try before any rank starts."""

    parity: Literal["refuse", "warn"] = "refuse"
    """What to do about nodes that differ in kit, Python, torch, CUDA, cuDNN, NCCL, config or script, or share no run folder."""
    probe: Literal["off", "quick", "full"] = "quick"
    """Whether nodes try each other's ports, and how long they measure the way between them: quick 0.25 s, full 2 s."""
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9._@-]{1,15}$")] = "auto"
    """Network interface over which the ranks talk: a name; auto: the one that leads to node 0; off: what gloo and NCCL choose."""
    only: bool = False
    """End after the roll call, as `trainer rollcall` does."""


class Watch(Section):
    """Deadlines. They count from the moment the imports are done."""

    join_seconds: Seconds = 120
    """How long node 0 waits for the other nodes."""
    stall_seconds: Seconds | None = None
    """How long a rank may make no progress in a step; null: learned, 20 times its slowest step so far and at least 120 s (own
    scripts: 600 s)."""
    phase_seconds: Seconds = 1800
    """How long the start up to the end of the first step may take, a save, and the first batch of an evaluation."""
    straggler_factor: Annotated[float, Field(gt=1)] | None = 2
    """Warn of a rank whose own part of a step (without waiting for others) takes so many times the others'; null: never."""
    checksum_every_steps: PositiveInt | None = 500
    """Compare a checksum of the parameters over all ranks every so many steps, and at each save; null: never."""
    max_restarts: NonNegativeInt = 0
    """How often ranks that failed, were killed or hung are started again, all together, without giving the allocation back."""
    stop_seconds: Seconds = 60
    """How long the ranks may take to save after a stop signal before they are killed."""
