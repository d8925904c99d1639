"""Which node this is, from whoever started us: `PET_*` (torchrun's own names), else Slurm's, else a single node.

Nothing here ever falls back to localhost: a node that does not know its place says so and ends.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from trainer.errors import ExitCode, Fault, FaultError
from trainer.node.slurmenv import counts, expand_nodelist, gpu_count

# Below the kernel's ephemeral range (net.ipv4.ip_local_port_range, 32768-60999 by default) and torch's usual 29500.
_FIRST_PORT, _PORTS = 20000, 9000


@dataclass(frozen=True)
class Identity:
    """One node's place in the job. `source` names whose variables said so."""

    nnodes: int
    node_rank: int
    nproc_per_node: int
    master_addr: str
    master_port: int  # 0 on a single node: any free port
    source: str
    hosts: tuple[str, ...] = ()  # the nodes' names by node rank, where the scheduler told them

    @property
    def host(self) -> str:
        """This machine's name."""
        return socket.gethostname()

    @property
    def world_size(self) -> int:
        """Ranks of the whole job."""
        return self.nnodes * self.nproc_per_node

    @property
    def address(self) -> str:
        """`address:port` of node 0."""
        return f"{self.master_addr}:{self.master_port}"

    def fault(self, code: str, cause: str, fix: str, exit_code: ExitCode = ExitCode.REFUSED) -> FaultError:
        """A fault of this node, from before it has ranks."""
        return FaultError(Fault(code, self.host, cause, fix, exit_code, node_rank=self.node_rank))


def identify(environ: Mapping[str, str], nodes: int, ranks_per_node: int, one_machine: bool, gpus_per_node: int = 0) -> Identity:
    """Read this node's identity.

    Args:
        nodes: resources.nodes, to be agreed with.
        ranks_per_node: ranks on each node.
        gpus_per_node: GPUs that the ranks of a node will use.
        one_machine: all nodes run on this machine (backend local), so a loopback address is right.

    Raises:
        FaultError: variables that are missing, no numbers, or contradict the config or each other.
    """
    if any(name.startswith("PET_") for name in environ):
        found = _from_pet(environ, ranks_per_node)
    elif "SLURM_JOB_ID" in environ and "SLURM_NODEID" in environ:
        found = _from_slurm(environ, ranks_per_node)
    elif nodes > 1:
        cause = f"resources.nodes={nodes} but neither PET_* nor Slurm's variables say which node this is"
        raise _refuse(
            "A15", cause, "start it with trainer submit, or set PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, PET_MASTER_PORT"
        )
    else:
        found = Identity(1, 0, ranks_per_node, "127.0.0.1", 0, "a single node")
    _check(found, nodes, ranks_per_node, one_machine)
    if not one_machine:
        _check_others(environ, found)
    _check_gpus(environ, found, gpus_per_node)
    return replace(found, hosts=_hosts(environ, found.nnodes))


def port_for(job: str) -> int:
    """A port that follows from a job's id, so that every node can work it out; outside the ephemeral range, never 29500.

    Neighbouring ids (array tasks, jobs sent one after another) get neighbouring ports, so they cannot meet.
    """
    digits = re.sub(r"\D", "", job)
    return _FIRST_PORT + int(digits or "0") % _PORTS


def _from_pet(environ: Mapping[str, str], ranks_per_node: int) -> Identity:
    nnodes = _number(environ, "PET_NNODES", "1")
    node_rank = _number(environ, "PET_NODE_RANK", "0" if nnodes == 1 else None)
    nproc = _number(environ, "PET_NPROC_PER_NODE", str(ranks_per_node))
    if nnodes == 1 and "PET_MASTER_ADDR" not in environ:
        return Identity(1, node_rank, nproc, "127.0.0.1", 0, "PET_*")
    address = environ.get("PET_MASTER_ADDR") or environ.get("MASTER_ADDR")
    if not address:
        raise _refuse("A15", "PET_MASTER_ADDR is not set", "set it to the address of the node with PET_NODE_RANK=0", node_rank)
    name = "PET_MASTER_PORT" if "PET_MASTER_PORT" in environ else "MASTER_PORT"
    return Identity(nnodes, node_rank, nproc, address, _number(environ, name, None), "PET_*")


def _from_slurm(environ: Mapping[str, str], ranks_per_node: int) -> Identity:
    nnodes = _number(environ, "SLURM_STEP_NUM_NODES", environ.get("SLURM_JOB_NUM_NODES"))
    node_rank = _number(environ, "SLURM_NODEID", None)
    nodelist = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    try:
        master = expand_nodelist(nodelist)[0]
    except ValueError:
        raise _refuse("H6", f"SLURM_JOB_NODELIST={nodelist!r} is no node list", "report it with this value", node_rank) from None
    _check_tasks(environ, nnodes, node_rank)
    job = environ["SLURM_JOB_ID"]
    return Identity(nnodes, node_rank, ranks_per_node, master, port_for(job) if nnodes > 1 else 0, "Slurm")


def _check_tasks(environ: Mapping[str, str], nnodes: int, node_rank: int) -> None:
    """One task on each node: srun starts nodes, and each node starts its own ranks."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    try:
        tasks = counts(text) if text else [1] * nnodes
    except ValueError as error:
        raise _refuse("H6", f"SLURM_TASKS_PER_NODE: {error}", "report it with this value", node_rank) from None
    if tasks != [1] * nnodes:
        raise _refuse("H7", f"SLURM_TASKS_PER_NODE={text} on {nnodes} nodes", "start with srun --ntasks-per-node=1", node_rank)


def _check_gpus(environ: Mapping[str, str], found: Identity, gpus_per_node: int) -> None:
    """Slurm's own word on this node's GPUs, in any of its spellings."""
    name = "SLURM_GPUS_ON_NODE" if "SLURM_GPUS_ON_NODE" in environ else "SLURM_GPUS_PER_NODE"
    if not gpus_per_node or name not in environ:
        return
    try:
        given = gpu_count(environ[name])
    except ValueError as error:
        raise found.fault("H6", f"{name}: {error}", "report it with this value") from None
    if given < gpus_per_node:
        cause = f"resources.gpus_per_node={gpus_per_node}, but Slurm gave {given} ({name}={environ[name]})"
        raise found.fault("H5", cause, f"submit with --gpus-per-node={gpus_per_node}, or ask for fewer")


def _check_others(environ: Mapping[str, str], found: Identity) -> None:
    """What others say of the same: the operator's WORLD_SIZE and RANK (of nodes or of ranks), and Slurm's number of this node."""
    if found.source != "PET_*":
        return
    given = environ.get("WORLD_SIZE")
    if given is not None and given not in (str(found.nnodes), str(found.world_size)):
        cause = f"WORLD_SIZE={given}, but PET_NNODES={found.nnodes} with {found.nproc_per_node} ranks on each"
        raise found.fault("A13", cause, "unset WORLD_SIZE, or make the two agree")
    names = ["RANK"]
    if environ.get("SLURM_STEP_NUM_NODES", str(found.nnodes)) == str(found.nnodes):  # else the step is of other nodes
        names.append("SLURM_NODEID")
    for name in names if found.nnodes > 1 else []:
        if environ.get(name, str(found.node_rank)) != str(found.node_rank):
            cause = f"{name}={environ[name]}, but PET_NODE_RANK={found.node_rank}"
            raise found.fault("A13", cause, f"unset {name}, or make the two agree")


def _hosts(environ: Mapping[str, str], nnodes: int) -> tuple[str, ...]:
    with suppress(ValueError):
        hosts = expand_nodelist(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""))
        if len(hosts) == nnodes:
            return tuple(hosts)
    return ()


def _number(environ: Mapping[str, str], name: str, default: str | None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise _refuse("A15", f"{name} is not set", "set it, or start the job with trainer submit")
    if not text.isdecimal():
        hint = " (a Kubernetes service named master injects such a value)" if text.startswith("tcp://") else ""
        raise _refuse("A15", f"{name}={text} is no number{hint}", f"correct {name}")
    return int(text)


def _check(found: Identity, nodes: int, ranks_per_node: int, one_machine: bool) -> None:
    if found.nnodes != nodes:
        raise found.fault("A13", f"{found.source} says {found.nnodes} nodes, resources.nodes={nodes}", "make the two agree")
    if found.nproc_per_node != ranks_per_node:
        cause = f"PET_NPROC_PER_NODE={found.nproc_per_node}, the config says {ranks_per_node} ranks on each node"
        raise found.fault("A13", cause, "make the two agree")
    if found.node_rank >= found.nnodes:
        raise found.fault("A14", f"node rank {found.node_rank} of {found.nnodes} nodes", "node ranks count from 0 to nodes - 1")
    if not (0 if found.nnodes == 1 else 1) <= found.master_port < 65536:
        raise found.fault(
            "A19", f"master port {found.master_port}", "set PET_MASTER_PORT to a port from 1 to 65535, equal on all nodes"
        )
    if found.nnodes > 1 and not one_machine and _is_loopback(found.master_addr):
        cause = f"{found.nnodes} nodes but the master address {found.master_addr} is loopback: each node would talk to itself"
        raise found.fault("A16", cause, "set PET_MASTER_ADDR to an address of node 0 that the others reach")


def _is_loopback(address: str) -> bool:
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _refuse(code: str, cause: str, fix: str, node_rank: int = 0) -> FaultError:
    return FaultError(Fault(code, socket.gethostname(), cause, fix, ExitCode.REFUSED, node_rank=node_rank))
