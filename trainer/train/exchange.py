"""How gradients get from rank to rank: torch's DDP in buckets, behind the backward pass; or one flat buffer and one all-reduce,
where DDP's own work is most of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from trainer.errors import ConfigError
from trainer.train.distributed import World

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_HOOKS = {"bf16": default_hooks.bf16_compress_hook, "fp16": default_hooks.fp16_compress_hook}


@dataclass(frozen=True)
class ExchangeOptions:
    """What is sent, and how."""

    engine: str = "ddp"  # ddp | flat
    compress: str = "none"  # none | bf16 | fp16: what gradients are sent as
    bucket_mb: float = 25.0  # of DDP's buckets
    static_graph: bool = False  # all steps use the same parameters in the same order
    find_unused_parameters: bool = False


def exchange(model: nn.Module, world: World, options: ExchangeOptions) -> Buckets | Flat:
    """The exchange for a model that is on its device or devices already.

    Raises:
        ConfigError: `flat` and a model that it cannot serve.
    """
    return Flat(model, world, options.compress) if options.engine == "flat" else Buckets(model, world, options)


class Buckets:
    """torch's DDP, if there is anybody and anything to exchange with: a rank that is alone does without."""

    def __init__(self, model: nn.Module, world: World, options: ExchangeOptions) -> None:
        self.model = self._bare = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._places, self._whole = list[int](), list[torch.Tensor]()
        self.finds_unused = options.find_unused_parameters
        if world.world_size == 1 or not self._parameters:
            return
        single = len(world.devices) == 1 and world.device.type == "cuda"
        self.model = wrapped = DistributedDataParallel(
            model,
            device_ids=[world.device] if single else None,  # a model on several devices places its inputs itself
            find_unused_parameters=options.find_unused_parameters,
            gradient_as_bucket_view=True,
            bucket_cap_mb=options.bucket_mb,
            static_graph=options.static_graph,
        )
        if options.compress != "none":
            wrapped.register_comm_hook(None, _HOOKS[options.compress])

    @property
    def accumulating(self) -> AbstractContextManager[None]:
        """Around a forward and backward pass whose gradients stay here."""
        return self.model.no_sync() if isinstance(self.model, DistributedDataParallel) else nullcontext()

    @property
    def gradients(self) -> list[torch.Tensor]:
        """All that there are, after the exchange; of DDP's, as few tensors as hold them, which are its buckets."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if self.model is self._bare:
            return gradients
        places = [gradient.data_ptr() for gradient in gradients]
        if places != self._places:
            self._places, self._whole = places, _whole(gradients)
        return self._whole

    def finish(self) -> None:
        """After the last backward pass of a step: have the mean of all ranks' gradients."""

    def forget(self) -> None:
        """Begin the next step without gradients."""
        for parameter in self._parameters:  # optimizer.zero_grad() does this too, and takes ten times as long
            parameter.grad = None


class Flat:
    """Parameters and gradients are views of one buffer each (one of each device and type). A parameter that a step does not use
    has a gradient of zero."""

    finds_unused = True

    def __init__(self, model: nn.Module, world: World, compress: str = "none") -> None:
        self.model, self.world, self._as = model, world, _TYPES.get(compress)
        parameters = [p for p in model.parameters() if p.requires_grad]
        if any(not _dense(p) for p in parameters):
            raise ConfigError("ddp.engine=flat: a parameter of this model is a view of other memory; use ddp.engine=ddp")
        sizes = [parameter.numel() for parameter in parameters]
        if world.world_size > 1 and len(set(map(abs, world.largest_numbers(sum(sizes), -sum(sizes))))) > 1:
            raise ConfigError("ddp.engine=flat: ranks have models of different sizes; build the same one on all")
        self.gradients = [_flatten(group) for group in _alike(parameters)]
        if world.world_size > 1:
            for tensor in (*(p.data for p in parameters), *model.buffers()):
                dist.broadcast(tensor, src=0)

    @property
    def accumulating(self) -> AbstractContextManager[None]:
        """Around a forward and backward pass whose gradients stay here."""
        return nullcontext()

    def finish(self) -> None:
        """After the last backward pass of a step: have the mean of all ranks' gradients. A rank that is alone has it."""
        if self.world.world_size == 1:
            return
        for gradient in self.gradients:
            gradient.div_(self.world.world_size)
            sent = gradient if self._as is None else gradient.to(self._as)
            dist.all_reduce(sent)
            if sent is not gradient:
                gradient.copy_(sent)

    def forget(self) -> None:
        """Begin the next step without gradients."""
        for gradient in self.gradients:
            gradient.zero_()


def _whole(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The memory that gradients fill, if they do; else they themselves."""
    found: dict[int, list[torch.Tensor]] = {}
    for gradient in gradients:
        found.setdefault(gradient.untyped_storage().data_ptr(), []).append(gradient)
    whole = []
    for views in found.values():
        storage = views[0].untyped_storage()
        filled = sum(view.nbytes for view in views) == storage.nbytes() and len({view.dtype for view in views}) == 1
        whole += [views[0].new_empty(0).set_(storage)] if filled else views
    return whole


def _alike(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    def kind(parameter: nn.Parameter) -> tuple[str, str]:
        return str(parameter.device), str(parameter.dtype)

    return (list(group) for _, group in groupby(sorted(parameters, key=kind), key=kind))


def _dense(parameter: nn.Parameter) -> bool:
    """Whether it fills its memory, in whatever order of its dimensions."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(parameter.size(), parameter.stride(), strict=True))
    return parameter.numel() == 0 or span == parameter.numel()


def _flatten(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Move parameters into one buffer, and give them gradients in another, which is returned."""
    total = sum(parameter.numel() for parameter in parameters)
    values = torch.empty(total, dtype=parameters[0].dtype, device=parameters[0].device)
    gradients, start = torch.zeros_like(values), 0
    for parameter in parameters:
        size, stride = parameter.size(), parameter.stride()
        place = values.as_strided(size, stride, start)
        place.copy_(parameter.data)
        parameter.data = place
        parameter.grad = gradients.as_strided(size, stride, start)
        start += parameter.numel()
    return gradients
