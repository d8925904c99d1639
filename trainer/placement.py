"""The part of the config that says where a run goes: machines, image, schedulers. The rest is `trainer.config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainer.errors import ConfigError

END_TIME = "TRAINER_END_TIME"  # when this start has to be over, in s since the epoch
PositiveInt = Annotated[int, Field(gt=0)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=10**7, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """What all sections share: unknown keys are errors, values are not converted, nothing changes after reading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


class Resources(Section):
    """What the run needs of the machines."""

    nodes: PositiveInt = 1
    """Machines (Slurm nodes, pods, containers)."""
    gpus_per_node: NonNegativeInt = 0
    """GPUs on each node; 0 trains on the CPU with gloo."""
    ranks_per_node: PositiveInt | None = None
    """Processes on each node; null: one per GPU, or one where there is no GPU."""
    cpus_per_node: PositiveInt | None = None
    """CPU cores to ask for on each node; null: what the scheduler gives."""
    memory_gb_per_node: PositiveFloat | None = None
    """Memory to ask for on each node, in GB; null: what the scheduler gives."""
    time_minutes: PositiveInt | None = None
    """Time limit of the job, before which it saves and stops; null: none, and 60 on Slurm."""

    @property
    def ranks(self) -> int:
        """Ranks on each node, with the default filled in."""
        return self.ranks_per_node or max(1, self.gpus_per_node)

    @property
    def slurm_minutes(self) -> int:
        """The limit to ask Slurm for."""
        return self.time_minutes or 60

    def end_time(self, environ: Mapping[str, str], started: float) -> float:
        """When this start has to be over, in s since the epoch: as a batch script has said, or else by `time_minutes`.

        Args:
            started: when it began.

        Raises:
            ConfigError: what stands in the environment is no such time.
        """
        given = environ.get(END_TIME)
        try:
            if given:
                return float(given)
        except ValueError:
            raise ConfigError(f"{END_TIME}={given}: is no time in seconds since the epoch; correct or unset it") from None
        return started + 60 * self.time_minutes if self.time_minutes else math.inf

    @model_validator(mode="after")
    def _devices(self) -> Resources:
        if self.gpus_per_node % self.ranks:
            raise ValueError(
                f"resources.ranks_per_node={self.ranks}: {self.gpus_per_node} GPUs cannot be shared out evenly among "
                f"{self.ranks} ranks; make resources.gpus_per_node a multiple of it"
            )
        return self


class Container(Section):
    """The image the nodes run in."""

    runtime: Literal["pyxis", "enroot", "apptainer", "docker", "podman", "none"] = "none"
    """What starts the image on a Slurm node; none: the nodes use this environment's Python."""
    image: Annotated[str, Field(pattern=r"^[^\s,]+$")] | None = None
    """Image that holds the kit: a name with tag or digest, or a .sqsh or .sif file. null: on Slurm the pinned image with the kit
    mounted, elsewhere the one that `make image` builds."""
    cuda_version: Annotated[str, Field(pattern=r"^\d+\.\d+$")] | None = None
    """CUDA version that torch in the image must have, such as "13.4"; null: the pinned image's there, not checked elsewhere."""
    python: str = "python3"
    """Python in the image."""
    mounts: list[Annotated[str, Field(pattern=r"^/[^:,]*:/[^:,]*(:r[ow])?$")]] = []
    """More folders to mount, each `/host:/container` or `/host:/container:ro`; the run's and the working folder are mounted."""
    env: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = {}
    """Environment of the nodes; it beats the image's own."""

    @model_validator(mode="after")
    def _startable(self) -> Container:
        for name, value in self.env.items():
            if name.startswith(("PET_", "SLURM_", "ON_NODE_", "TRAINER_")):
                raise ValueError(f"container.env.{name}={value}: is set by the kit or by Slurm; remove it")
        if self.runtime == "enroot" and not (self.image and self.image.startswith("/")):
            raise ValueError(
                f"container.image={self.image or 'null'}: enroot starts the file of an image; make one with enroot import "
                "--output FILE.sqsh docker://... and give its path"
            )
        return self


class Slurm(Section):
    """Slurm's side of the run."""

    partition: str | None = None
    """sbatch --partition."""
    account: str | None = None
    """sbatch --account."""
    qos: str | None = None
    """sbatch --qos."""
    max_requeues: NonNegativeInt = 3
    """How often a stopped or broken job may go back into the queue."""
    signal_seconds: PositiveInt = 120
    """How long before the time limit Slurm warns the job, so that it saves."""
    options: dict[str, str | int | bool] = {}
    """Any other sbatch option by its long name, such as `{constraint: h100}`."""


class Kubernetes(Section):
    """Kubernetes' side of the run."""

    kind: Literal["pytorchjob", "trainjob", "indexed-job"] = "pytorchjob"
    """The API object to apply."""
    namespace: str = "default"
    """Namespace of the job."""
    volume: str = "ddp-runs"
    """PersistentVolumeClaim that keeps the runs; all nodes write to it (ReadWriteMany)."""
    shm_gb: PositiveFloat = 2
    """Size of /dev/shm in each pod, in GB, a part of its memory."""
    max_restarts: NonNegativeInt = 3
    """How often all pods may start again after a fault that another try may cure."""
    queue: str | None = None
    """Kueue local queue; the job starts suspended until it is admitted."""
    priority_class: str | None = None
    """Kueue's workload priority class."""
    gang: bool = False
    """Start all pods or none, by the training operator's gang scheduler (kind pytorchjob)."""
    rdma_resource: str | None = None
    """Resource that a pod needs for RDMA, such as rdma/hca_shared_devices_a; brings the capability IPC_LOCK."""
    node_selector: dict[str, str] = {}
    """Labels that the pods' machines must have."""
    secrets: list[str] = []
    """Secrets whose keys become variables of the nodes."""
    image_pull_secrets: list[str] = []
    """Secrets to pull the image with."""
    manifest: str | None = None
    """A manifest of your own to patch instead of the kit's."""
