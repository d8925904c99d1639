"""Whether there is room for what a node's ranks will need, before the first step: shared memory and disk."""

from __future__ import annotations

import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate

from trainer.errors import ExitCode, Fault, FaultError
from trainer.process import die_with_parent
from trainer.train.batches import Loading, Seeded, WholeBatches
from trainer.train.distributed import World

_SHARED_MEMORY = Path("/dev/shm")
_MIB = 1 << 20
_PATIENCE_SECONDS = 60.0


def check_shared_memory(dataset: Dataset[Any], batch: int, loading: Loading, world: World, place: Path = _SHARED_MEMORY) -> None:
    """Loader workers hand over batches in shared memory: each keeps `prefetch_factor` of them ready.

    Args:
        batch: samples of one rank in one forward.

    Raises:
        FaultError: it does not hold them.
    """
    if not loading.num_workers or isinstance(dataset, WholeBatches) or world.local_rank != 0 or not place.exists():
        return
    sample = _sample_bytes(dataset, loading.timeout_seconds or _PATIENCE_SECONDS)
    need = world.local_world_size * loading.num_workers * loading.prefetch_factor * batch * sample
    free = _free(place)
    if need <= free:
        return
    cause = (
        f"{place} has {free / _MIB:.0f} MiB free, and {world.local_world_size} ranks x {loading.num_workers} loader workers x "
        f"{loading.prefetch_factor} batches x {batch} samples x {sample} bytes need {need / _MIB:.0f} MiB"
    )
    size = f"{max(1, -(-2 * need // (1 << 30)))}g"
    fix = (
        f"shm_size: {size} (compose), --shm-size={size} (docker run), a larger emptyDir of medium Memory "
        "(kubernetes.shm_gb), or fewer data.num_workers"
    )
    raise FaultError(Fault("E1", world.host, cause, fix, ExitCode.REFUSED, world.rank))


def check_disk(folder: Path | str, states: Sequence[Mapping[str, Any]], keep_last: int) -> str | None:
    """On rank 0: whether the run folder's disk holds checkpoints of at least these states (an optimizer has none before a step).

    Returns:
        A warning, if it holds one but not all that are to be kept and one more: the oldest goes when the newest is whole.

    Raises:
        FaultError: it does not hold a single one.
    """
    if isinstance(folder, str):  # a URL: nobody knows how much it holds
        return None
    need = sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))
    there = [path for path in folder.rglob("*") if path.is_file()]
    free = _free(next(place for place in (folder, *folder.parents) if place.exists()))
    if need * (keep_last + 1) <= free + sum(path.stat().st_size for path in there):
        return None
    cause = f"{folder}: {free / _MIB:.0f} MiB free, one checkpoint needs {need / _MIB:.0f} MiB or more"
    if need > free:
        fix = "make room there, or use another run_dir"
        raise FaultError(Fault("G2", socket.gethostname(), f"no space for a checkpoint in {cause}", fix, ExitCode.REFUSED, 0))
    return f"{cause}, and checkpoint.keep_last={keep_last} needs {keep_last + 1} of them while one is written; make room there"


def _free(place: Path) -> int:
    about = os.statvfs(place)
    return about.f_bavail * about.f_frsize


def _sample_bytes(dataset: Dataset[Any], seconds: float) -> int:
    """Bytes of the tensors of one sample, loaded in a child: a dataset may open its files at the first one, and loader workers
    must not share them. 0 if it cannot be loaded: the loader will say why."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            die_with_parent(parent)
            torch.set_num_threads(1)
            collate = getattr(dataset, "collate_fn", default_collate)
            os.write(writer, str(_bytes(collate(Seeded(dataset, 0).__getitems__([(0, 0)])))).encode())
        finally:
            os._exit(0)
    os.close(writer)
    told = os.read(reader, 64) if select.select([reader], [], [], seconds)[0] else b""
    os.close(reader)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return int(told or b"0")


def _bytes(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, Mapping):
        batch = batch.values()
    elif not isinstance(batch, (list, tuple)):
        return 0
    return sum(_bytes(part) for part in batch)
