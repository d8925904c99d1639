"""The one config of a run: strict, frozen models with units in the names. Reading a file is `trainer.settings`.

The world size is not in here: it comes from the process group, so the two cannot disagree.
"""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, model_validator

from trainer.learning import Ddp, Profile, Schedule, Training
from trainer.placement import Container, Kubernetes, NonNegativeInt, PositiveInt, Resources, Section, Slurm
from trainer.supervision import Checkpoint, RollCall, Watch

TRAIN = "trainer.train"  # the entrypoint that is the kit's own training loop


def _target(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", value):
        raise ValueError("is no target; write package.module:callable, such as torch.optim:SGD")
    return value


def _job_name(value: str) -> str:
    # Kubernetes names are the narrowest: 63 characters with "-worker-999" behind (RFC 1123 labels).
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?", value):
        raise ValueError("is no job name; use at most 52 of a-z, 0-9 and '-', a letter or digit at both ends")
    return value


def _folder(value: str) -> str:
    return _path(value, "folder")


def _file(value: str) -> str:
    return _path(value, "file")


def _path(value: str, kind: str) -> str:
    if not value.strip() or "\0" in value or "\n" in value:
        raise ValueError(f"is no {kind}; name one")
    return os.path.expanduser(value)  # noqa: PTH111 (a string stays a string)


FileName = Annotated[str, AfterValidator(_file)]
FolderName = Annotated[str, AfterValidator(_folder)]
TargetName = Annotated[str, AfterValidator(_target)]
JobName = Annotated[str, AfterValidator(_job_name)]


class Target(Section):
    """A callable by its import path, and the arguments to call it with."""

    target: TargetName
    """`package.module:callable`."""
    args: dict[str, Any] = {}
    """Keyword arguments for it."""


class Model(Target):
    """The network: `target(**args)` gives a torch.nn.Module. A target with a parameter `devices` gets this rank's devices
    and places its own parts on them (a model split inside a rank)."""

    weights: FileName | None = None
    """Weights to start from: a .safetensors file, or what torch.save wrote, with or without `module.`. A resume wins."""
    weights_skip: list[str] = []
    """Beginnings of names that keep their fresh values, such as `fc.` for other classes."""
    channels_last: bool = False
    """Keep images and weights in channels_last memory format."""
    sync_batchnorm: bool = False
    """Turn BatchNorm layers into SyncBatchNorm (GPU only)."""
    find_unused_parameters: bool = False
    """For models in which some parameters get no gradient in some steps."""


class Data(Target):
    """The data: `target(**args)` gives (training dataset, evaluation dataset or None), both map-style."""

    num_workers: NonNegativeInt = 0
    """Loader processes of each rank; 0 loads in the rank itself."""
    pin_memory: bool = True
    """Copy batches into pinned memory (matters on GPUs only)."""
    multiprocessing_context: Literal["fork", "forkserver", "spawn"] = "fork"
    """How loader processes start; the other two are slower and inherit no lock that a thread holds."""
    prefetch_factor: PositiveInt = 2
    """Batches that each loader process keeps ready."""
    shuffle_block_size: PositiveInt = 1
    """Samples that lie together and are read together, for slow storage (docs/data.md); 1: any sample in any place."""


class Loss(Target):
    """The loss: `target(**args)` gives a callable (outputs, targets) -> mean loss."""

    target: TargetName = "torch.nn:CrossEntropyLoss"
    """`package.module:callable`."""


class Optimizer(Target):
    """The optimizer: `target(parameters, **args)`."""

    target: TargetName = "torch.optim:SGD"
    """`package.module:callable`."""
    scale_lr_from_batch_size: PositiveInt | None = None
    """Multiply the learning rate by batch_size / this (linear scaling, arXiv:1706.02677)."""


class Config(Section):
    """One run."""

    name: JobName
    """Name of the job."""
    backend: Literal["slurm", "kubernetes", "compose", "local"] = "local"
    """Where `submit` sends it."""
    entrypoint: str = TRAIN
    """trainer.train, or the path of a script of your own, ending in .py."""
    entrypoint_args: list[str] = []
    """Arguments of that script."""
    runs_dir: FolderName = "runs"
    """Folder in which each submitted run gets a folder of its own."""
    run_dir: FolderName | None = None
    """This run's folder; null: `submit` makes a new one, everything else uses RUNS_DIR/NAME."""
    resources: Resources = Resources()
    container: Container = Container()
    slurm: Slurm = Slurm()
    kubernetes: Kubernetes = Kubernetes()
    model: Model | None = None
    data: Data | None = None
    loss: Loss = Loss()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    training: Training = Training()
    ddp: Ddp = Ddp()
    profile: Profile = Profile()
    checkpoint: Checkpoint = Checkpoint()
    rollcall: RollCall = RollCall()
    watch: Watch = Watch()

    @property
    def world_size(self) -> int:
        """Ranks that the launch side will start. The train side asks the process group instead."""
        return self.resources.nodes * self.resources.ranks

    @property
    def folder(self) -> str:
        """The run's folder when nobody has made a new one."""
        return self.run_dir or f"{self.runs_dir}/{self.name}"

    @property
    def stop_file(self) -> str:
        """While it is there, the run is stopped: it saves, ends, and does not start again."""
        return f"{self.folder}/stop"

    @model_validator(mode="after")
    def _whole(self) -> Config:
        if self.entrypoint != TRAIN and not self.entrypoint.endswith(".py"):
            raise ValueError(f"entrypoint={self.entrypoint}: is neither {TRAIN} nor a path that ends in .py; correct it")
        if self.entrypoint == TRAIN:
            for section in ("model", "data"):
                if getattr(self, section) is None:
                    raise ValueError(f"{section}: missing; give {section}.target (see configs/digits.yaml)")
            if self.entrypoint_args:
                raise ValueError(f"entrypoint_args={self.entrypoint_args}: {TRAIN} takes none; remove them")
            accumulation_steps(self.training.batch_size, self.training.micro_batch_size, self.world_size)
        if self.backend == "slurm" and self.slurm.signal_seconds >= self.resources.slurm_minutes * 60:
            raise ValueError(
                f"slurm.signal_seconds={self.slurm.signal_seconds}: the warning would come before the job starts "
                f"(resources.time_minutes={self.resources.slurm_minutes}); make it shorter"
            )
        if self.model and self.model.sync_batchnorm and not self.resources.gpus_per_node:
            raise ValueError("model.sync_batchnorm=true: SyncBatchNorm runs on GPUs only; set resources.gpus_per_node")
        return self


def accumulation_steps(batch_size: int, micro_batch_size: int | None, world_size: int) -> int:
    """Forward passes of each rank in one optimizer step: batch_size / (micro_batch_size * world_size).

    Raises:
        ValueError: it is no whole number; the text has the three numbers.
    """
    micro = micro_batch_size or max(1, batch_size // world_size)
    if micro_batch_size is None and batch_size % world_size:
        raise ValueError(
            f"training.batch_size={batch_size}: cannot be shared out evenly among {world_size} ranks; make it a multiple of "
            f"{world_size}"
        )
    steps, rest = divmod(batch_size, micro * world_size)
    if rest or not steps:
        raise ValueError(
            f"training.batch_size={batch_size}: cannot be split into micro-batches of {micro} on {world_size} ranks; make "
            f"it a multiple of {micro * world_size}"
        )
    return steps
