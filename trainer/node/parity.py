"""What must be the same on all nodes of a job, and what must not: each tells it when it reports in, and node 0 judges."""

from __future__ import annotations

import hashlib
import platform
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer import __version__
from trainer.errors import ExitCode, Fault

_SOFTWARE = ("kit", "Python", "torch", "CUDA", "cuDNN", "NCCL")  # the catalogue's B1; anything else is another job's, B4


def facts(settings: Mapping[str, str], entrypoint: Path | None, modules: Sequence[str], torch: Any) -> dict[str, str]:
    """This node's side: item -> value, as a person would name both.

    Args:
        settings: those of the resolved config that are not at their default.
        entrypoint: the user's own script, if there is one.
        modules: names of those that the config's targets are in, which the caller has loaded.
        torch: the module, which the caller has loaded.
    """
    found = {
        "kit": f"{__version__} ({_digest(*sorted(Path(__file__).parents[1].rglob('*.py')))})",
        "Python": ".".join(platform.python_version_tuple()[:2]),
        "torch": str(torch.__version__),
        "CUDA": torch.version.cuda or "none",
        **_libraries(torch),
        **settings,
    }
    own = [file for file in map(_own_file, modules) if file]
    code = {"code": f"{_digest(*own)} ({', '.join(file.name for file in own)})"} if own else {}
    return {**found, **code, **({"entrypoint": _digest(entrypoint)} if entrypoint else {})}


def _own_file(module: str) -> Path | None:
    """A module's file, if the user wrote it: installed packages have versions of their own, and the kit's are in its hash."""
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or "site-packages" in file or "dist-packages" in file or module.partition(".")[0] in ("trainer", "torch"):
        return None
    return Path(file)


def _libraries(torch: Any) -> dict[str, str]:
    """cuDNN and NCCL as they are loaded here, whatever torch was built with; reading them touches no GPU."""
    if not torch.version.cuda:
        return {}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if hasattr(torch._C, "_nccl_version") else "none"
    return {"cuDNN": str(torch.backends.cudnn.version() or "none"), "NCCL": nccl}


def difference(nodes: Mapping[int, tuple[str, Mapping[str, str]]]) -> tuple[str, str, int] | None:
    """The first item in which nodes differ: the fault's code, its cause, and the rank of the first odd node; None if all agree.

    Args:
        nodes: node rank -> (host, facts).
    """
    return next(_differences(nodes), None)


def _differences(nodes: Mapping[int, tuple[str, Mapping[str, str]]]) -> Iterator[tuple[str, str, int]]:
    for item in dict.fromkeys(item for _, told in nodes.values() for item in told):
        absent = "nothing" if item in _SOFTWARE else "the default"
        values = {rank: told.get(item, absent) for rank, (_, told) in nodes.items()}
        counted = Counter(values.values()).most_common()
        if len(counted) == 1:
            continue
        usual, times = counted[0]
        odd = [rank for rank, value in values.items() if value != usual]
        holder = next(rank for rank, value in values.items() if value == usual)
        others = f"{times} others {usual}" if times > 1 else f"node {holder} ({nodes[holder][0]}) {usual}"
        more = f", {len(odd) - 1} more differ too" if len(odd) > 1 else ""
        first = odd[0]
        cause = f"{item}: node {first} ({nodes[first][0]}) has {values[first]}, {others}{more}"
        yield "B1" if item in _SOFTWARE else "B4", cause, first


def may_differ(claims: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """A line for each trait in which nodes differ."""
    return [cause for _, cause, _ in _differences({rank: (claim["host"], claim["traits"]) for rank, claim in claims.items()})]


def compare(claims: Mapping[int, Mapping[str, Any]]) -> Fault | None:
    """The fault of the node that is not like the others, if there is one.

    Args:
        claims: node rank -> what the node told: host, address, facts.
    """
    found = difference({rank: (claim["host"], claim["facts"]) for rank, claim in claims.items()})
    if found is None:
        return None
    code, cause, rank = found
    fix = "start the same image, code and config on every node, or let them differ with rollcall.parity=warn"
    return Fault(code, claims[rank]["host"], cause, fix, ExitCode.REFUSED, node_rank=rank)


def same_address(claims: Mapping[int, Mapping[str, Any]]) -> Fault | None:
    """Two hosts that tell the others one address: a bridge of Docker's or of virtual machines, which each host has for itself."""
    seen: dict[str, int] = {}
    for rank, claim in claims.items():
        first, address = seen.setdefault(claim["address"], rank), claim["address"]
        if address and claims[first]["host"] != claim["host"]:
            cause = f"nodes {first} ({claims[first]['host']}) and {rank} ({claim['host']}) both have the address {address}"
            fix = "give PET_MASTER_ADDR on a network that all share, not on a bridge of one host"
            return Fault("A7", claim["host"], cause, fix, ExitCode.REFUSED, node_rank=rank)
    return None


def _digest(*files: Path) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.read_bytes() if file.is_file() else b"missing")
    return total.hexdigest()[:12]
