"""Whether this machine has what the ranks will need, apart from GPUs: cores, limits, leftovers. Nothing here touches torch."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from trainer.process import usable_cores

_FEW_FILES = 4096
_LITTLE_LOCKED = 1 << 30
_SHARED_MEMORY = Path("/dev/shm")
_INFINIBAND = Path("/dev/infiniband")
_OURS = ("torch_", "nccl-", "sem.loky-")


def raise_file_limit() -> None:
    """Loader workers hand over each tensor as a file descriptor: let this process and its children open as many as they may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def warnings(
    ranks: int, workers: int, environ: Mapping[str, str], shared_memory: Path = _SHARED_MEMORY, infiniband: Path = _INFINIBAND
) -> Iterator[str]:
    """What is doubtful, a line each, with its kind in the catalogue.

    Args:
        ranks: of this node.
        workers: loader processes of each.
    """
    cores = usable_cores()
    if workers and ranks * workers > cores:
        yield (
            f"E10: data.num_workers={workers} for each of {ranks} ranks, and {cores} usable cores; "
            f"fix: data.num_workers={cores // ranks}, or ask for more (resources.cpus_per_node)"
        )
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and ranks * int(threads) > max(cores, ranks):
        yield f"E12: OMP_NUM_THREADS={threads} for each of {ranks} ranks, and {cores} usable cores; fix: unset it"
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if workers and files != resource.RLIM_INFINITY and files < _FEW_FILES:
        yield f"E2: {files} open files allowed, loader workers need more; fix: ulimit -n {_FEW_FILES} (docker: --ulimit nofile)"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if any(infiniband.glob("uverbs*")) and locked != resource.RLIM_INFINITY and locked < _LITTLE_LOCKED:
        yield (
            f"{locked >> 10} KiB of locked memory allowed, InfiniBand needs more; fix: ulimit -l unlimited "
            "(docker: --ulimit memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK)"
        )
    if environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield "B7: TORCH_DISTRIBUTED_DEBUG=DETAIL is known to crash DDP with gloo; fix: unset it"
    left = sorted(_leftovers(shared_memory))
    if left:
        size = sum(count for _, count in left)
        names = ", ".join(name for name, _ in left[:3]) + (", ..." if len(left) > 3 else "")
        yield (
            f"E17: {size >> 20} MiB in {len(left)} files of dead processes in {shared_memory} ({names}); "
            "fix: remove them if no other job of yours runs here"
        )


def _leftovers(folder: Path) -> Iterator[tuple[str, int]]:
    """Name and bytes of shared memory of torch's, NCCL's and joblib's that is this user's and that no process holds."""
    found = {}
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                about = path.stat()
                if path.name.startswith(_OURS) and about.st_uid == os.getuid():
                    found[about.st_dev, about.st_ino] = path.name, about.st_size
    held = _held() if found else set()
    return (found[file] for file in found.keys() - held)


def _held() -> set[tuple[int, int]]:
    """Device and inode of files that some process has mapped or open, as far as this user can see."""
    held = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for line in (process / "maps").read_text(errors="replace").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                    major, minor = (int(number, 16) for number in fields[3].split(":"))
                    held.add((os.makedev(major, minor), int(fields[4])))
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    about = link.stat()
                    held.add((about.st_dev, about.st_ino))
    return held
