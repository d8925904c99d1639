"""Weights that leave the kit and weights that come from elsewhere: plain state dicts by the bare model's own names."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.errors import ConfigError
from trainer.train.listing import whole_or_refused
from trainer.train.parts import read
from trainer.train.place import place_of

SAFE = ".safetensors"
# What wrappers put in front of names, and the keys under which others keep a state dict.
_WRAPPERS = ("module.", "_orig_mod.")
_KEYS = ("model", "state_dict", "model_state_dict", "module")
_SHOWN = 3


def export(checkpoints: Path | str, out: Path, step: int | None = None, average: bool = True) -> tuple[Path, int]:
    """Write a checkpoint's weights for use elsewhere: `model.load_state_dict(torch.load(out), strict=True)` takes them.

    Args:
        checkpoints: a run's folder of them, or their URL.
        out: a .safetensors file, or any other name for torch.save.
        step: of the checkpoint; None: the newest whole one.
        average: the exponential moving average, if the run kept one.

    Returns:
        The checkpoint that was used, and the number of parameters and buffers.

    Raises:
        ConfigError: there is none, or the file cannot be written.
    """
    with tempfile.TemporaryDirectory() as scratch:
        chosen = whole_or_refused(place_of(checkpoints, Path(scratch)), step)
        try:
            state = read(chosen)
        except OSError as error:
            raise ConfigError(f"{error.filename or chosen}: {error.strerror or error}; choose another --step") from None
    weights = {name: value.contiguous() for name, value in ((average and state["average"]) or state["model"]).items()}
    partial = out.with_name(f".{out.name}.tmp")
    try:
        partial.touch()  # each library has an error of its own for a place that cannot be written
        if out.suffix == SAFE:
            # A tied weight has two names and one memory: safetensors wants each for itself.
            _safetensors().save_file({name: value.clone() for name, value in weights.items()}, partial)
        else:
            torch.save(weights, partial)
        partial.replace(out)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ConfigError(f"{out}: {error.strerror or error}; choose another place") from None
    return chosen, len(weights)


def load(model: nn.Module, file: Path, skip: Iterable[str] = ()) -> int:
    """Start from weights of another run, or of another program's; returns how many were taken.

    Args:
        model: the bare module.
        file: .safetensors, or what torch.save wrote: a state dict, with or without `module.`, alone or under `model`.
        skip: beginnings of names that keep their fresh values, such as a head for other classes.

    Raises:
        ConfigError: the file holds no weights, or not this model's; the text names the first ones that do not fit.
    """
    found, left = _read(file), tuple(skip)
    own = model.state_dict()
    wanted = {name for name in own if not name.startswith(left)} if left else set(own)
    found = {name: value for name, value in found.items() if not (left and name.startswith(left))}
    wrong = [f"it has no {name}" for name in own if name in wanted and name not in found]
    wrong += [f"{name} is not in the model" for name in found if name not in own]
    for name in wanted & found.keys():
        if own[name].shape != found[name].shape:
            wrong.append(f"{name} is {tuple(found[name].shape)}, not {tuple(own[name].shape)}")
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        told = "; ".join(sorted(wrong)[:_SHOWN])
        raise ConfigError(
            f"model.weights={file}: does not fit: {told}{more}; correct model.args, or name parts in model.weights_skip"
        )
    model.load_state_dict(found, strict=not left)
    return len(found)


def _read(file: Path) -> dict[str, torch.Tensor]:
    try:
        read: Any = (
            _safetensors().load_file(file) if file.suffix == SAFE else torch.load(file, map_location="cpu", weights_only=True)
        )
    except OSError as error:
        raise ConfigError(f"model.weights={file}: {error.strerror or error}; correct the path") from None
    except ConfigError:
        raise
    except Exception as error:  # a damaged file, or a pickle of more than tensors: each library has its own kinds
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"model.weights={file}: cannot be read ({reason}); save a plain state dict") from None
    for key in _KEYS:
        if isinstance(read, Mapping) and isinstance(read.get(key), Mapping):
            read = read[key]
            break
    if not isinstance(read, Mapping) or not read or not all(isinstance(value, torch.Tensor) for value in read.values()):
        raise ConfigError(f"model.weights={file}: holds no state dict; give one that maps names to tensors")
    return {_bare(str(name)): value for name, value in read.items()}


def _bare(name: str) -> str:
    while name.startswith(_WRAPPERS):
        name = name.partition(".")[2]
    return name


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError:
        raise ConfigError(
            "safetensors: not installed; pip install 'ddp-job-kit[export]', or use a file that ends in .pt"
        ) from None
