"""Who this rank is: torch's environment variables -> process group and devices -> one value that is passed down."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.errors import ConfigError
from trainer.names import without_dns

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This rank among all ranks. `devices` has one entry, or several where a model is split inside a rank."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)
    grouped: bool = False  # a process group exists (also with one rank)

    @property
    def device(self) -> torch.device:
        """The first device: where inputs go."""
        return self.devices[0]

    @property
    def host(self) -> str:
        """This machine's name."""
        return socket.gethostname()

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Each number added up over all ranks. Every rank must call it."""
        return self._reduce(numbers, dist.ReduceOp.SUM)

    def largest_numbers(self, *numbers: float) -> list[float]:
        """The largest of each number over all ranks. Every rank must call it."""
        return self._reduce(numbers, dist.ReduceOp.MAX)

    def _reduce(self, numbers: tuple[float, ...], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return list(numbers)
        values = torch.tensor(numbers, dtype=torch.float64)  # on the CPU: gloo carries it, beside nccl
        dist.all_reduce(values, op=operation)
        return values.tolist()

    def from_rank_0(self, value: Any) -> Any:
        """What rank 0 passed in, on every rank. Every rank must call it."""
        box = [value]
        if self.grouped:
            dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks in rank order; filled on rank 0, empty elsewhere. Every rank must call it."""
        if not self.grouped:
            return [value]
        values: list[Any] = [None] * self.world_size if self.rank == 0 else []
        dist.gather_object(value, values if self.rank == 0 else None, dst=0)
        return values


def device_indices(local_rank: int, local_world_size: int, visible: int) -> list[int]:
    """The GPUs of one rank, by index among the visible ones.

    With fewer ranks than GPUs each rank gets an equal, adjacent share. Where the scheduler shows each rank one GPU of its own
    (Slurm's --gpus-per-task), that one is index 0 for every rank.
    """
    share = max(1, visible // local_world_size)
    first = local_rank * share % visible
    return list(range(first, first + share))


@contextmanager
def joined(gpus_per_node: int, timeout_seconds: float) -> Iterator[World]:
    """Join the process group that the environment describes, or be a single process where it describes none.

    Args:
        gpus_per_node: 0 for the CPU and gloo; else CUDA and nccl.
        timeout_seconds: limit of one collective.

    Raises:
        ConfigError: half an environment, values that are no numbers, or GPUs asked for and none visible.
    """
    environ = os.environ
    numbers = _numbers(environ)
    local_rank, local_world_size = numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"]
    devices = _devices(gpus_per_node, local_rank, local_world_size)
    grouped = "RANK" in environ
    if grouped:
        gpu = devices[0].type == "cuda"
        with without_dns() if _needs_no_names(environ) else nullcontext():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if gpu else "gloo",
                timeout=timedelta(seconds=timeout_seconds),
                device_id=devices[0] if gpu else None,
            )
    world = World(numbers["RANK"], local_rank, numbers["WORLD_SIZE"], local_world_size, devices, grouped)
    yield world
    # Only after a good end: with an exception on its way, peers may be inside a collective, and leaving one can wait for them.
    if grouped:
        dist.destroy_process_group()


def _needs_no_names(environ: Mapping[str, str]) -> bool:
    """The node process has given the address in numbers, and gloo the interface."""
    address = environ.get("MASTER_ADDR", "")
    return "GLOO_SOCKET_IFNAME" in environ and not any(letter.isalpha() for letter in address)


def _numbers(environ: Mapping[str, str]) -> dict[str, int]:
    missing = [name for name in VARIABLES if name not in environ]
    if missing and "RANK" in environ:
        raise ConfigError(f"{missing[0]}: RANK is set but this is not; start ranks with `trainer node` or torchrun")
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    if "RANK" not in environ:
        return numbers
    for name, default in list(numbers.items()):
        text = environ.get(name, str(default))
        if not text.isdecimal():
            raise ConfigError(f"{name}={text}: is no number; start ranks with `trainer node` or torchrun")
        numbers[name] = int(text)
    if numbers["RANK"] >= numbers["WORLD_SIZE"]:
        raise ConfigError(f"RANK={numbers['RANK']}: must be below WORLD_SIZE={numbers['WORLD_SIZE']}; correct one of them")
    return numbers


def _devices(gpus_per_node: int, local_rank: int, local_world_size: int) -> tuple[torch.device, ...]:
    if not gpus_per_node:
        return (torch.device("cpu"),)
    visible = torch.cuda.device_count()
    if not visible:
        raise ConfigError(
            f"resources.gpus_per_node={gpus_per_node}: no GPU is visible on {socket.gethostname()} (CUDA_VISIBLE_DEVICES="
            f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}); check the driver and the container's GPU flags, or set 0"
        )
    devices = tuple(torch.device("cuda", index) for index in device_indices(local_rank, local_world_size, visible))
    torch.cuda.set_device(devices[0])
    return devices
