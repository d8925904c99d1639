from __future__ import annotations

from pathlib import Path

import pytest

from trainer.image import pinned
from trainer.node.software import COMPATIBLE, OLDEST_DRIVER, cuda_problem, driver_problem

PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Mon Feb  3 21:04:08 UTC 2025\nGCC version:  gcc 12.2.0\n"
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (dvs-builder)  Mon Aug 11 2026\n"


@pytest.mark.parametrize("text", [PROPRIETARY, OPEN])
@pytest.mark.parametrize(
    ("cuda", "driver", "too_old"),
    [
        ("13.4", "570.86.15", True),
        ("13.0", "580.65.06", False),
        ("12.8", "525.60.13", False),
        ("12.1", "470.1", True),
        (None, "1.0", False),
    ],
)
def test_a_driver_too_old_for_torchs_cuda_is_named(
    text: str, cuda: str | None, driver: str, too_old: bool, tmp_path: Path
) -> None:
    file = tmp_path / "version"
    file.write_text(text.format(driver))
    found = driver_problem(cuda, "", file)
    assert (found is not None) == too_old
    if found:
        assert found.startswith(f"the driver {driver} is too old for torch's CUDA {cuda}, which needs ")
        assert driver_problem(cuda, COMPATIBLE, file) is None, "forward compatibility"


def test_no_driver_is_not_an_old_driver(tmp_path: Path) -> None:
    assert driver_problem("13.4", "", tmp_path / "nothing") is None


def test_the_pinned_image_needs_what_its_cuda_needs() -> None:
    assert int(pinned().driver) == OLDEST_DRIVER[int(pinned().cuda.split(".")[0])]


def test_cuda_versions() -> None:
    assert cuda_problem("13.4", "2.14.1", "13.4") is None
    assert (
        cuda_problem("13.4", "2.14.1+cu130", "13.0") == "torch 2.14.1+cu130 here is made for CUDA 13.0, the job wants CUDA 13.4"
    )
    assert cuda_problem("13.4", "2.14.1+cpu", None) == "torch 2.14.1+cpu here is made for the CPU, the job wants CUDA 13.4"
