"""From a dataset to this rank's batches, in a global order that no launch can change."""

from __future__ import annotations

import hashlib
import logging
import resource
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from trainer.errors import SAMPLE, ConfigError
from trainer.pulse import FOLLOWER
from trainer.train.random_state import random_state_kept, seed_cpu

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
_FEW_FILES = 4096  # open files that a process may have
_HARMLESS = (FOLLOWER, "QueueFeederThread", "_pin_memory_loop)")  # ours, and of a loader that waits while another one starts
_DYING_SECONDS = 1.0  # a connection to a loader worker breaks a moment before that counts as dead
Sample = tuple[torch.Tensor, Any]
Chosen = tuple[int, torch.Tensor]  # (epoch, sample indices (B,)): one micro-batch
Key = tuple[int, int]  # (epoch, index): one sample, as a loader worker is asked for it


def mix(*numbers: int) -> int:
    """A 63-bit seed from several numbers, so that neighbouring seeds, epochs and samples share nothing."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class GlobalOrder:
    """Which samples make which micro-batch of which rank.

    The order of an epoch is a permutation by (seed, epoch) alone. Global batch k is its k-th run of `batch_size` samples, and
    rank r takes from it, in accumulation step a, the micro-batch number a * world_size + r: the same batches in the same order
    at any world size. The samples behind the last whole global batch are left out, others in each epoch.

    With blocks, samples that lie together are used near each other in time, so that storage is read in long pieces: each place
    in the batch takes one block after the other, in random order, and each block's samples in random order. All samples of a
    batch come from different blocks, so it is mixed as well as without; but batches that are d < `block_size` steps apart have
    1 - d / block_size of their blocks in common. A rank's part of the batch are places of its own, so it reads blocks of its own.
    """

    def __init__(
        self, samples: int, batch_size: int, accumulation: int, rank: int, world_size: int, seed: int, block_size: int = 1
    ) -> None:
        """
        Args:
            block_size: samples that are read together; 1: any sample in any place.

        Raises:
            ConfigError: no such batch, or no such blocks, can be made of the samples.
        """
        if samples < batch_size:
            raise ConfigError(
                f"training.batch_size={batch_size}: the training data has only {samples} samples; make it at most {samples}"
            )
        self.samples, self.batch_size, self.accumulation = samples, batch_size, accumulation
        self.rank, self.world_size, self.seed = rank, world_size, seed
        self.micro_batch_size = batch_size // (accumulation * world_size)
        self.steps_per_epoch, self.block_size = samples // batch_size, block_size
        if block_size > self.steps_per_epoch:
            raise ConfigError(
                f"data.shuffle_block_size={block_size}: a batch would have several samples of one block; make it at most "
                f"{self.steps_per_epoch}, the steps of an epoch"
            )

    def global_batch(self, step: int) -> torch.Tensor:
        """Sample indices of the global batch of optimizer step `step` (from 0, over all epochs): shape (batch_size,)."""
        epoch, inside = divmod(step, self.steps_per_epoch)
        return self._permutation(epoch)[inside * self.batch_size : (inside + 1) * self.batch_size]

    def micro_batches(self, first_step: int, last_step: int) -> Iterator[Chosen]:
        """This rank's micro-batches for steps first_step <= step < last_step."""
        permutation, known = torch.empty(0), -1
        for step in range(first_step, last_step):
            epoch, inside = divmod(step, self.steps_per_epoch)
            if epoch != known:
                permutation, known = self._permutation(epoch), epoch
            for micro in range(self.accumulation):
                start = inside * self.batch_size + (micro * self.world_size + self.rank) * self.micro_batch_size
                yield epoch, permutation[start : start + self.micro_batch_size]

    def _permutation(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(mix(self.seed, epoch))
        if self.block_size == 1:
            return torch.randperm(self.samples, generator=generator)
        order = torch.randperm(-(-self.samples // self.block_size), generator=generator)
        within = torch.rand(self.samples, dtype=torch.float64, generator=generator)
        keys = order[torch.arange(self.samples) // self.block_size] + within
        places = keys.argsort(stable=True)[: self.steps_per_epoch * self.batch_size].view(self.batch_size, -1)
        return places.t().reshape(-1)


class WholeBatches(Dataset[Sample]):
    """A dataset that gives whole batches itself, faster than loader workers could hand them over."""

    def batches(self, chosen: Iterator[Chosen], seed: int, device: torch.device, block_size: int = 1) -> Iterator[Sample]:
        """The batches chosen, in order; they may be on the device already."""
        raise NotImplementedError


class TensorImages(WholeBatches):
    """Images held in memory as bytes and handed out as whole batches: shape (N, C, H, W), normalised float32."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, mean: float, std: float) -> None:
        self.images, self.labels, self.mean, self.std = images, labels, mean, std

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Sample:
        image, label = self.batch(torch.tensor([index]))
        return image[0], label[0]

    def batches(self, chosen: Iterator[Chosen], seed: int, device: torch.device, block_size: int = 1) -> Iterator[Sample]:
        """As `batch`, in the CPU's memory."""
        return (self.batch(indices) for _, indices in chosen)

    def batch(self, indices: torch.Tensor) -> Sample:
        """For indices (B,): images (B, C, H, W) float32 and labels (B,) int64."""
        images = self.images.index_select(0, indices)  # much faster than [indices]
        return images.float().sub_(self.mean).div_(self.std), self.labels.index_select(0, indices)


class Seeded(Dataset[Any]):
    """A dataset whose random augmentation is a function of (seed, epoch, sample), not of the worker or rank that loads it."""

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        """DataLoader's own name for fetching a whole batch at once."""
        with random_state_kept():
            return [self._sample(*key) for key in keys]

    def _sample(self, epoch: int, index: int) -> Any:
        seed_cpu(mix(self.seed, epoch, index))
        try:
            return self.dataset[index]
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on; it also reaches the rank from a loader worker
                error.add_note(f"{SAMPLE}{index}")
            raise


@dataclass(frozen=True)
class Loading:
    """How batches are loaded."""

    num_workers: int = 0  # processes of each rank; 0: in the rank itself
    prefetch_factor: int = 2  # batches that each of them keeps ready
    pin_memory: bool = False
    multiprocessing_context: str = "fork"
    timeout_seconds: float = 0  # a worker that gives nothing for so long is an error; 0: wait for ever
    device: torch.device = CPU  # where whole batches are wanted
    block_size: int = 1  # samples that are used near each other in time, and had better be read together


def batches(dataset: Dataset[Any], chosen: Iterator[Chosen], seed: int, loading: Loading) -> Iterator[Any]:
    """The batches that were chosen, in order. Loader workers, if any, live until the last of them."""
    if isinstance(dataset, WholeBatches):
        return dataset.batches(chosen, seed, loading.device, loading.block_size)
    workers = loading.num_workers
    if workers:
        _prepare_for_workers(loading)
    loader = DataLoader(
        Seeded(dataset, seed),
        batch_sampler=_Once(chosen),
        num_workers=workers,
        multiprocessing_context=loading.multiprocessing_context if workers else None,
        prefetch_factor=loading.prefetch_factor if workers else None,
        pin_memory=loading.pin_memory,
        timeout=loading.timeout_seconds if workers else 0,
        collate_fn=getattr(dataset, "collate_fn", default_collate),
        generator=torch.Generator(),  # else it draws a number from the rank's own generator, and a resume would draw once more
    )
    return _with_exit_codes(iter(loader)) if workers else iter(loader)


def _with_exit_codes(loaded: Iterator[Any]) -> Iterator[Any]:
    """Of a loader worker that is found dead, also tell how it ended, in torch's words where it hears of it in another way."""
    try:
        yield from loaded
    except (RuntimeError, OSError, EOFError) as error:
        known = isinstance(error, RuntimeError) and not str(error).endswith("exited unexpectedly")
        if known or "Original Traceback" in str(error):
            raise
        workers = getattr(loaded, "_workers", ())
        ending = wait([worker.sentinel for worker in workers], _DYING_SECONDS)
        for worker in workers:
            worker.join(_DYING_SECONDS if worker.sentinel in ending else 0)
        dead = [worker for worker in workers if worker.exitcode is not None]
        if not dead:
            raise
        code = dead[0].exitcode
        how = f"is killed by signal: {signal.strsignal(-code)}" if code < 0 else f"exited unexpectedly with exit code {code}"
        raise RuntimeError(f"DataLoader worker (pid {dead[0].pid}) {how}") from error


def _prepare_for_workers(loading: Loading) -> None:
    """See to what breaks loader workers."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < _FEW_FILES:  # else each tensor that a worker hands over takes a descriptor here for as long as it is kept
        torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    others = [name for name in names if not name.endswith(_HARMLESS)]
    if others and loading.multiprocessing_context == "fork":
        _tell_of_threads(*others)


@cache
def _tell_of_threads(*names: str) -> None:
    """Once, and not again for each evaluation."""
    logger.warning(
        "warning: E5: %d other threads run while loader workers are forked (%s): a lock that one of them holds stays locked "
        "in the workers; fix: start them later, or data.multiprocessing_context=forkserver",
        *(len(names), ", ".join(names)),
    )


class _Once:
    """A batch sampler over an iterator that is used up once: DataLoader asks for its iterator a single time."""

    def __init__(self, chosen: Iterator[Chosen]) -> None:
        self.chosen = chosen

    def __iter__(self) -> Iterator[list[Key]]:
        return ([(epoch, index) for index in indices.tolist()] for epoch, indices in self.chosen)
