"""Whether this node's torch is the one that the job wants, and whether its driver can run it. Nothing here touches a GPU."""

from __future__ import annotations

import re
from pathlib import Path

# CUDA's major version -> the oldest driver that runs its programs, from
# https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html
OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
_DRIVER = Path("/proc/driver/nvidia/version")
# NVIDIA's entrypoint says so when the image's own, newer driver library serves an older kernel driver (forward compatibility)
COMPATIBLE = "CUDA Driver OK"


def cuda_problem(wanted: str, torch: str, built_for: str | None) -> str | None:
    """The cause if torch is made for another CUDA version than the job wants (container.cuda_version).

    Args:
        torch: torch.__version__.
        built_for: torch.version.cuda.
    """
    if wanted == built_for:
        return None
    return f"torch {torch} here is made for {f'CUDA {built_for}' if built_for else 'the CPU'}, the job wants CUDA {wanted}"


def driver_problem(built_for: str | None, compat_status: str, driver: Path = _DRIVER) -> str | None:
    """The cause if the driver is too old for torch's CUDA version.

    Args:
        built_for: torch.version.cuda.
        compat_status: _CUDA_COMPAT_STATUS of an NVIDIA image's entrypoint, or empty.
        driver: the kernel module's own word.
    """
    oldest = OLDEST_DRIVER.get(int((built_for or "0").split(".")[0]))
    try:
        found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+)([\d.]*)", driver.read_text())
    except OSError:
        return None  # no driver here, or not to be seen: the ranks will say that they find no GPU
    if oldest is None or found is None or int(found[1]) >= oldest or compat_status == COMPATIBLE:
        return None
    return f"the driver {found[1]}{found[2]} is too old for torch's CUDA {built_for}, which needs {oldest} or newer"
