"""What NVIDIA's management library tells of this node's GPUs, before any rank touches one.

It makes no CUDA context, so that ranks can still be forked. Where `nvidia-ml-py` or the driver is absent, nothing is known, and
nothing is wrong.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

_PROHIBITED = 2  # NVML_COMPUTEMODE_PROHIBITED
_FABRIC_COMPLETED, _FABRIC_ABSENT = 3, 0  # NVML_GPU_FABRIC_STATE_*
_UNCORRECTED, _SINCE_LOADED = 1, 0  # NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this node may use."""

    models: list[str] = field(default_factory=list)
    driver: str = ""
    trouble: str | None = None  # why one of them cannot be used
    warnings: list[str] = field(default_factory=list)

    @property
    def traits(self) -> dict[str, str]:
        """What may differ between nodes, and should not."""
        kinds = ", ".join(f"{self.models.count(model)} x {model}" for model in sorted(set(self.models)))
        return {"driver": self.driver, "GPUs": kinds}


def look(environ: Mapping[str, str], library: str = "pynvml") -> Gpus | None:
    """Ask the library; None if it is not there."""
    try:
        nvml: Any = importlib.import_module(library)
        nvml.nvmlInit()
    except Exception:  # ImportError, or whatever error a library without a driver raises
        return None
    try:
        driver = nvml.nvmlSystemGetDriverVersion()
        models, warnings, trouble = [], [], None
        for index in _visible(environ, nvml.nvmlDeviceGetCount()):
            try:
                gpu = nvml.nvmlDeviceGetHandleByIndex(index)
                models.append(str(nvml.nvmlDeviceGetName(gpu)))
                trouble = trouble or _trouble(nvml, gpu, index)
                warnings += [f"GPU {index} {said}" for said in _doubts(nvml, gpu)]
            except nvml.NVMLError as error:
                trouble = trouble or f"GPU {index}: {error}"
        return Gpus(models, str(driver), trouble, warnings)
    except nvml.NVMLError as error:
        return Gpus(trouble=f"the driver does not answer: {error}")
    finally:
        nvml.nvmlShutdown()


def _visible(environ: Mapping[str, str], count: int) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, as CUDA reads it: up to the first entry that names none, and none at all if one
    comes twice. UUIDs are counted only."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(range(count))
    found: list[int] = []
    for name in given.split(","):
        uuid = name.strip().startswith(("GPU-", "MIG-"))
        index = len(found) if uuid else int(name) if name.strip().isdecimal() else count
        if index >= count:
            break
        found.append(index)
    return found if len(set(found)) == len(found) else []


def _trouble(nvml: Any, gpu: Any, index: int) -> str | None:
    if _ask(nvml, "nvmlDeviceGetComputeMode", gpu) == _PROHIBITED:
        return f"GPU {index} is set to compute mode Prohibited"
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", gpu)
    if rows and rows[3]:
        return f"GPU {index} has memory that could not be remapped"
    if hasattr(nvml, "c_nvmlGpuFabricInfo_t"):
        fabric = nvml.c_nvmlGpuFabricInfo_t()
        _ask(nvml, "nvmlDeviceGetGpuFabricInfo", gpu, ctypes.byref(fabric))
        if fabric.state not in (_FABRIC_ABSENT, _FABRIC_COMPLETED):
            return f"GPU {index} is not registered with the fabric manager"
    return None


def _doubts(nvml: Any, gpu: Any) -> Iterator[str]:
    errors = _ask(nvml, "nvmlDeviceGetTotalEccErrors", gpu, _UNCORRECTED, _SINCE_LOADED)
    if errors:
        yield f"has {errors} uncorrected memory errors since the driver was loaded; fix: drain the node and reset the GPU"
    rows = _ask(nvml, "nvmlDeviceGetRemappedRows", gpu)
    if rows and rows[2]:
        yield "has memory that is to be remapped; fix: reset the GPU"
    processes = _ask(nvml, "nvmlDeviceGetComputeRunningProcesses", gpu) or []
    if processes:
        others = ", ".join(str(process.pid) for process in processes[:3])
        yield f"is in use by pid {others}; fix: end it, or ask for the GPU alone"


def _ask(nvml: Any, question: str, gpu: Any, *more: Any) -> Any:
    """An answer, or None where this GPU, driver or library has none."""
    with suppress(nvml.NVMLError, AttributeError):
        return getattr(nvml, question)(gpu, *more)
    return None
