"""A state as the files of a checkpoint: taken apart into tensors, shared out over the ranks, laid out as safetensors, read back.

Each rank writes one part: an eighth of the tensors where there are eight ranks, and under `__rest__` what is no tensor
(containers, numbers and, from every rank, what is its own), as bytes of torch.save that load with weights_only=True.
"""

from __future__ import annotations

import errno
import heapq
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.train.stored import part_files

REST = "__rest__"
_TENSOR = "__tensor__"
_PAGE = 4096
# The format's own names, https://huggingface.co/docs/safetensors
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Layout:
    """Where the bytes of one part go."""

    header: bytes  # with its length in front; a whole number of pages
    offsets: Mapping[str, int]  # of each tensor and of `__rest__`, from the beginning of the file
    size: int  # bytes of the file


def take_apart(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors by names that tell where they were, and the same containers with those names in their places.

    A tensor that safetensors cannot hold (sparse, complex) stays where it is.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _strip(state, "", tensors)


def put_together(stripped: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What was taken apart; strides are as they were."""
    if isinstance(stripped, dict):
        if _TENSOR in stripped:
            return _strided(tensors[stripped[_TENSOR]], stripped.get("stride"))
        return {key: put_together(value, tensors) for key, value in stripped.items()}
    if isinstance(stripped, (list, tuple)):
        return type(stripped)(put_together(value, tensors) for value in stripped)
    return stripped


def share_out(tensors: Mapping[str, torch.Tensor], ranks: int) -> list[list[str]]:
    """Which tensors each rank writes: the largest first, always to the rank that has least. The same on every rank."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    loads = [(0, rank) for rank in range(ranks)]
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        load, rank = loads[0]
        shares[rank].append(name)
        heapq.heapreplace(loads, (load + tensors[name].nbytes, rank))
    return shares


def lay_out(tensors: Mapping[str, torch.Tensor], rest: int) -> Layout:
    """The layout of a part: wide elements first, so that each stands at a multiple of its width.

    Args:
        rest: bytes of `__rest__`.
    """
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        tensor = tensors[name]
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape)}
        entries[name] = {**entry, "data_offsets": [end, end := end + tensor.nbytes]}
    entries[REST] = {"dtype": "U8", "shape": [rest], "data_offsets": [end, end + rest]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    length = -(-(8 + len(text)) // _PAGE) * _PAGE - 8
    offsets = {name: 8 + length + entry["data_offsets"][0] for name, entry in entries.items()}
    return Layout(length.to_bytes(8, "little") + text.ljust(length), offsets, 8 + length + end + rest)


def to_bytes(value: Any) -> bytes:
    """Plain types and tensors as torch.save writes them."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def from_bytes(content: bytes) -> Any:
    """What `to_bytes` wrote.

    Raises:
        pickle.UnpicklingError: there is more in it than plain types and tensors.
    """
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def read(checkpoint: Path) -> dict[str, Any]:
    """The state of a checkpoint, on the CPU; what each rank had of its own, in rank order, is under `ranks`.

    It is read into memory, not mapped: the file may be deleted while tensors live on.

    Raises:
        OSError: a part cannot be read.
    """
    tensors: dict[str, torch.Tensor] = {}
    rests = []
    if not (paths := part_files(checkpoint)):
        raise OSError(errno.EINVAL, "holds no parts (another version of the kit?)", str(checkpoint))
    for path in paths:
        part = _read_part(path)
        rests.append(from_bytes(part.pop(REST).numpy().tobytes()))
        tensors.update(part)
    state: dict[str, Any] = put_together(rests[0]["state"], tensors)
    return {**state, "ranks": [rest["own"] for rest in rests]}


def _read_part(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with open(path, "rb") as file:
        header: Mapping[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):  # front to back
            tensors[name] = torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]])
            place = memoryview(tensors[name].view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
            if file.readinto(place) != tensors[name].nbytes:
                raise OSError(errno.EIO, "shorter than its header says", str(path))
    return tensors


def _strip(value: Any, place: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.dtype not in _NAMES:
            return value
        while place in tensors or place == REST:
            place += "'"
        tensors[place] = value.detach()
        return {_TENSOR: place, **_stride(value)}
    if isinstance(value, Mapping):
        return {key: _strip(each, _below(place, key), tensors) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return _like(value, (_strip(each, _below(place, number), tensors) for number, each in enumerate(value)))
    return value


def _stride(tensor: torch.Tensor) -> dict[str, list[int]]:
    """The strides of a tensor that fills its memory in another order than usual; they may matter for speed."""
    natural, dense = torch.empty(tensor.shape, device="meta").stride(), 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != dense:
            return {}
        dense *= size
    return {} if tensor.stride() == natural or not dense else {"stride": list(tensor.stride())}


def _like(value: Any, parts: Iterable[Any]) -> Any:
    return tuple(parts) if isinstance(value, tuple) else list(parts)


def _below(place: str, key: object) -> str:
    return f"{place}.{key}" if place else str(key)


def _strided(tensor: torch.Tensor, stride: list[int] | None) -> torch.Tensor:
    if stride is None:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)
