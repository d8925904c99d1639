"""What a node does before it looks for the others: its environment, the imports that all its ranks share, a look at itself."""

from __future__ import annotations

import ast
import gc
import importlib
import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from trainer import targets
from trainer.errors import ConfigError, FaultError
from trainer.node import network, software
from trainer.node.gpus import Gpus
from trainer.node.health import raise_file_limit
from trainer.node.identity import Identity
from trainer.process import usable_cores

_QUIET = ("numpy", "torch", "torchvision")


def environment(environ: MutableMapping[str, str], ranks: int, one_machine: bool, interface: str) -> None:
    """Before torch is loaded: limits, thread counts (a torchrun of several ranks would set one), network interface.

    Args:
        interface: over which the ranks are to talk; `auto` and `off` name none.
    """
    raise_file_limit()
    environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a lost connection is told by the one line, not by pages of C++ frames
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "64")  # torch's record of the last collectives, for `trainer explain`
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start a thread here, and forked ranks would miss it
    if interface not in ("auto", "off"):
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    elif one_machine and sys.platform == "linux":
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.path.insert(0, os.getcwd())  # targets of the user's own


def warm_up(entrypoint: str, parts: Mapping[str, str]) -> None:
    """Import once what every rank needs, so that forked ranks start in a moment. Nothing here may touch CUDA.

    Python looks through all objects for garbage again and again while modules are loaded, which is a fifth of the time and finds
    nothing; what is there at the end is not looked at any more, so that ranks share its pages.

    Args:
        entrypoint: the kit's own training package, or the path of a script of the user's.
        parts: section of the config -> target, for the kit's own.

    Raises:
        ConfigError: a target does not exist, or a library of the kit's: no rank starts then.
    """
    gc.disable()
    try:
        _bring("torch")
        if entrypoint.endswith(".py"):
            for name in _known_imports(Path(entrypoint)):
                with suppress(Exception):  # the script may know what to do then
                    importlib.import_module(name)
        else:
            _bring(f"{entrypoint}.__main__")
            del sys.modules[f"{entrypoint}.__main__"]  # each rank runs it as its own __main__; what it imported stays warm
            importlib.import_module("torch._dynamo")  # the DDP constructor loads it
        for name, target in parts.items():
            targets.resolve(name, target)
    finally:
        gc.freeze()
        gc.enable()


def _known_imports(script: Path) -> list[str]:
    """What a script imports of the libraries that are known to start no thread and to leave GPUs alone; other modules of the
    user's are not run before their time."""
    try:
        source = script.read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(source)))
    except (OSError, SyntaxError, ValueError):  # the ranks will say it
        return []
    found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    if "DistributedDataParallel" in source:
        found.append("torch._dynamo")  # its constructor loads it
    return [name for name in dict.fromkeys(found) if name.partition(".")[0] in _QUIET]


def _bring(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        remedy = "pip install 'ddp-job-kit[train]' there, or use the kit's image"
        raise ConfigError(f"{sys.executable}: has no module {error.name}; {remedy}") from None


def own_trouble(
    node: Identity,
    environ: Mapping[str, str],
    interface: str,
    gpus_per_node: int,
    found: Gpus | None,
    wanted_cuda: str | None,
) -> FaultError | None:
    """What is wrong with this node by itself.

    Args:
        interface: over which the ranks are to talk (rollcall.interface).
        found: what NVML tells of its GPUs.
        wanted_cuda: CUDA version that torch must be made for (container.cuda_version).
    """
    if found_wrong := network.problem(environ, interface, 1 if node.master_addr == "127.0.0.1" else node.nnodes):
        fix = "name another, or let the kit find the right one (rollcall.interface=auto, GLOO_SOCKET_IFNAME unset)"
        return node.fault(*found_wrong, fix)
    torch = sys.modules["torch"]
    if wanted_cuda and (cause := software.cuda_problem(wanted_cuda, torch.__version__, torch.version.cuda)):
        return node.fault("B3", cause, "start the image that has it, or correct container.cuda_version (IMAGE_CUDA)")
    if not gpus_per_node:
        return None
    if cause := software.driver_problem(torch.version.cuda, environ.get("_CUDA_COMPAT_STATUS", "")):
        return node.fault("B3", cause, "install a newer driver on this machine, or start an image for an older CUDA version")
    if found and found.trouble:
        return node.fault("E18", found.trouble, "drain this machine and have it looked at, or leave it out")
    if found and len(found.models) < gpus_per_node:
        cause = f"resources.gpus_per_node={gpus_per_node}, and {len(found.models)} GPUs to be seen here"
        return node.fault("K2", cause, "give the node its GPUs (--gpus-per-node, --gpus all, nvidia.com/gpu), or ask for fewer")
    return None


def traits(environ: Mapping[str, str], found: Gpus | None) -> dict[str, str]:
    """What may differ between nodes, and is told if it does: item -> value."""
    own = {"usable cores": str(usable_cores()), "OMP_NUM_THREADS": environ.get("OMP_NUM_THREADS", "")}
    nccl = {name: environ[name] for name in ("NCCL_NET_PLUGIN", "NCCL_NET", "NCCL_ALGO", "NCCL_PROTO") if name in environ}
    return {**own, **nccl, **(found.traits if found else {})}
