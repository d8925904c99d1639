"""What a node does before it looks for the others: its environment, and the imports that all its ranks share."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, MutableMapping

from trainer import targets
from trainer.errors import ConfigError
from trainer.process import usable_cores


def environment(environ: MutableMapping[str, str], ranks: int, one_machine: bool) -> None:
    """Before torch is loaded: thread counts (a torchrun of several ranks would set one), and loopback for one machine."""
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start a thread here, and forked ranks would miss it
    if one_machine and sys.platform == "linux":
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path.insert(0, os.getcwd())  # targets of the user's own


def warm_up(entrypoint: str | None, parts: Mapping[str, str]) -> None:
    """Import once what every rank needs, so that forked ranks start in a moment. Nothing here may touch CUDA.

    Args:
        entrypoint: the kit's own training package, or None for a script of the user's.
        parts: section of the config -> target, for the kit's own.

    Raises:
        ConfigError: a target does not exist, or a library of the kit's: no rank starts then.
    """
    _bring("torch")
    if entrypoint:
        _bring(f"{entrypoint}.__main__")
        del sys.modules[f"{entrypoint}.__main__"]  # each rank runs it as its own __main__; what it imported stays warm
        importlib.import_module("torch._dynamo")  # the DDP constructor loads it
    for name, target in parts.items():
        targets.resolve(name, target)


def _bring(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        remedy = "pip install 'ddp-job-kit[train]' there, or use the kit's image"
        raise ConfigError(f"{sys.executable}: has no module {error.name}; {remedy}") from None
