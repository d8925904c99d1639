"""What keeps the nodes from finding each other: host names, ports, and torchrun's flags against the manifest.

Letters and numbers (A3, A16) are the fault catalogue's, C.1-C.3 sections of the project's notes on the real controllers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from trainer.launch.lint.fields import Field
from trainer.launch.lint.jobs import Job, Pods

_OPERATORS_PORT = ("pytorchjob-port", 23456)
_TRAINERS_PORT = 29500


def _host_network(job: Job, pods: Pods) -> Iterator[str]:
    """J13: a pod on its machine's network asks the machine's DNS, which knows no pods."""
    policy = pods.spec["dnsPolicy"]
    if pods.spec["hostNetwork"].value is True and policy.text != "ClusterFirstWithHostNet":
        yield policy.line("with hostNetwork the names of the other pods do not resolve", "write ClusterFirstWithHostNet")


def _flags(job: Job, pods: Pods) -> Iterator[str]:
    """A13, A16, H7: torchrun's flags win over the variables that the controller sets."""
    flags = pods.main.flags if pods.main is not None else {}
    nodes, nproc, rank = (flags.get(name) for name in ("nnodes", "nproc-per-node", "node-rank"))
    if nodes is not None and job.nodes and nodes.number not in (None, job.nodes):
        yield nodes.line(f"--nnodes contradicts the manifest, which makes {job.nodes} pods", f"write {job.nodes}")
    if nproc is not None and nproc.number is not None and job.nproc.number not in (None, nproc.number):
        wrong = f"--nproc-per-node contradicts {job.nproc.path} {job.nproc.text}"
        yield nproc.line(wrong, "leave the flag out")
    first = 0 if pods.replica_type in ("", "Master") else 1
    if rank is not None and rank.number is not None and job.nodes > 1 and (pods.count > 1 or rank.number != first):
        fix = "write --node-rank=$(JOB_COMPLETION_INDEX)" if job.kind == "Job" else "leave the flag out: PET_NODE_RANK is set"
        yield rank.line(f"--node-rank is the same on {pods.count} pod(s) of {job.nodes}", fix)
    if "standalone" in flags and job.nodes > 1:
        yield flags["standalone"].line("--standalone: each node trains alone", "leave the flag out")
    port, set_port = flags.get("master-port"), _master_port(job)
    if port is not None and job.kind != "Job" and port.number not in (None, set_port):
        yield port.line(f"--master-port contradicts MASTER_PORT {set_port} of the controller", "leave the flag out")


def _addresses(job: Job, pods: Pods) -> Iterator[str]:
    """A1, A2, A16, C.1-C.3: the address of node 0, where the manifest writes it out."""
    main = pods.main
    if main is None or job.nodes < 2:
        return
    said = [main.flags[name] for name in ("master-addr", "rdzv-endpoint") if name in main.flags]
    said += [e["value"] for e in main.env if e["name"].text in {"MASTER_ADDR", "PET_MASTER_ADDR"} - job.injected]
    for field in said:
        host = re.sub(r":\d+$", "", field.text)
        if not host or "$" in host:
            continue
        if host == "localhost" or host.startswith("127.") or host == "::1":
            yield field.line(f"each of the {job.nodes} pods would talk to itself", f"write {_node0(job, pods)}")
        elif _wrong_host(job, pods, host):
            yield field.line("is not node 0's name", f"write {_node0(job, pods)}")


def _node0(job: Job, pods: Pods) -> str:
    if job.kind == "PyTorchJob":
        return f"{job.name}-{'master' if 'MASTER_ADDR' in job.injected else 'worker'}-0"
    if job.kind == "Job":
        return f"{job.name}-0.{pods.spec['subdomain'].text or 'SERVICE'}"
    return f"{job.name}-node-0-0.{job.name}"


def _wrong_host(job: Job, pods: Pods, host: str) -> bool:
    """Whether it is meant to be a pod's name, and is not node 0's; any other name may be right."""
    right = _node0(job, pods).split(".")
    first, _, rest = host.partition(".")
    if job.kind == "Job" and not pods.spec["subdomain"].text:
        return False
    if first == right[0]:  # a full name may go on behind the service
        return len(right) > 1 and rest.split(".")[0] != right[1]
    pod = rf"[a-z0-9-]+-{'(master|worker)-' if job.kind == 'PyTorchJob' else ''}\d+"
    of_service = len(right) < 2 or rest.split(".")[0] == right[1]
    return bool(re.fullmatch(pod, first) and of_service) or (len(right) > 1 and host == right[1])


def _master_port(job: Job) -> int | None:
    if job.kind != "PyTorchJob":
        return _TRAINERS_PORT if job.kind != "Job" else _written_port(job)
    masters = sorted(job.pods, key=lambda pods: pods.replica_type != "Master")
    main = masters[0].main if masters else None
    ports = main.own["ports"].each() if main is not None else []
    named = [port["containerPort"].number for port in ports if port["name"].text == _OPERATORS_PORT[0]]
    return named[0] if named else _OPERATORS_PORT[1]


def _written_port(job: Job) -> int | None:
    main = job.pods[0].main
    fields = [e["value"] for e in main.env if e["name"].text in ("MASTER_PORT", "PET_MASTER_PORT")] if main is not None else []
    return next((field.number for field in fields), None)


def _ports(job: Job, pods: Pods) -> Iterator[str]:
    """A3, A15: the containers of a pod share one network, so a port has one listener."""
    master = _master_port(job)
    for container in pods.containers:
        for port in container.own["ports"].each():
            other = not container.trains or (job.kind == "PyTorchJob" and port["name"].text != _OPERATORS_PORT[0])
            if other and master is not None and port["containerPort"].number == master:
                yield port["containerPort"].line("is the job's MASTER_PORT", "take another port")
    for entry in [e for c in pods.containers if c.trains for e in c.env if e["name"].text in ("MASTER_PORT", "PET_MASTER_PORT")]:
        value = entry["value"]
        if value.value is not None and "$" not in value.text and not 0 < (value.number or 0) < 1 << 16:
            yield value.line("is no port", "write a number from 1 to 65535, in quotes")


def _service_links(job: Job, pods: Pods) -> Iterator[str]:
    """A15: for a Service named master every pod gets MASTER_PORT=tcp://..."""
    if job.kind == "PyTorchJob" or pods.spec["enableServiceLinks"].value is False:
        return
    given = {entry["name"].text for entry in pods.main.env} if pods.main is not None else set()
    for service in job.documents("Service"):
        name: Field = service.at("metadata.name")
        if name.text == "master" and service.at("spec.clusterIP").text != "None" and "MASTER_PORT" not in given:
            yield name.line("gives every pod MASTER_PORT=tcp://...", "rename it, or set enableServiceLinks: false in the pods")


RULES: list[Callable[[Job, Pods], Iterator[str]]] = [_host_network, _flags, _addresses, _ports, _service_links]
