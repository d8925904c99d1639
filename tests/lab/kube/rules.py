"""What no schema says: rules of the API server, of training-operator's and trainer's webhooks and of JobSet, in our own words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.lab.kube.workload import Manifest

Path = tuple[str, ...]

_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_VALUE = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")
_LONGEST_NAME = 63
_RESERVED = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
_MANAGERS = {
    "PyTorchJob": ("kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue"),
    "TrainJob": ("trainer.kubeflow.org/trainjob-controller", "kueue.x-k8s.io/multikueue"),
}


def violations(manifest: Manifest) -> Iterator[str]:
    """What would be refused, or would never run, though its schema allows it; as PATH: TEXT."""
    for key, value in ((manifest.get("metadata") or {}).get("labels") or {}).items():
        if not isinstance(value, str) or len(value) > _LONGEST_NAME or not _LABEL_VALUE.fullmatch(value):
            yield f"metadata.labels.{key}: not a label value: {value!r}"
    for path, template in pod_templates(manifest):
        yield from _pod(".".join((*path, "spec")), template["spec"])
    kinds = {"PyTorchJob": _pytorchjob, "TrainJob": _trainjob, "Job": _job}
    if manifest.get("kind") in kinds:
        yield from kinds[manifest["kind"]](manifest, manifest.get("spec") or {})


def pod_templates(value: Any, path: Path = ()) -> Iterator[tuple[Path, Manifest]]:
    """All pods and pod templates in a manifest, with where they are."""
    if isinstance(value, dict):
        if isinstance(value.get("spec"), dict) and "containers" in value["spec"]:
            yield path, value
        for key, child in value.items():
            yield from pod_templates(child, (*path, str(key)))
    elif isinstance(value, list):
        for place, child in enumerate(value):
            yield from pod_templates(child, (*path, str(place)))


def _pod(path: str, spec: Manifest) -> Iterator[str]:
    containers = [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]
    names = [container.get("name") for container in containers]
    volumes = {volume.get("name") for volume in spec.get("volumes") or []}
    if not spec.get("containers"):
        yield f"{path}.containers: none"
    for name in sorted({str(name) for name in names if names.count(name) > 1}):
        yield f"{path}.containers: two are named {name}"
    for container in containers:
        where = f"{path}.containers.{container.get('name')}"
        if not container.get("image"):
            yield f"{where}.image: required"
        for mount in container.get("volumeMounts") or []:
            if mount.get("name") not in volumes:
                yield f"{where}.volumeMounts: no volume is named {mount.get('name')}"


def _name(manifest: Manifest, longest_suffix: str) -> Iterator[str]:
    name = (manifest.get("metadata") or {}).get("name") or ""
    if len(name) > _LONGEST_NAME or not _DNS_LABEL.fullmatch(name):
        yield f"metadata.name: not an RFC 1035 label: {name!r}"
    elif len(name + longest_suffix) > _LONGEST_NAME:
        yield f"metadata.name: {name}{longest_suffix} has more than {_LONGEST_NAME} characters"


def _manager(kind: str, holder: Manifest, path: str) -> Iterator[str]:
    manager = holder.get("managedBy")
    if manager is not None and manager not in _MANAGERS[kind]:
        yield f"{path}.managedBy: {manager!r}; one of {', '.join(_MANAGERS[kind])}"


def _pytorchjob(manifest: Manifest, spec: Manifest) -> Iterator[str]:
    replicas = spec.get("pytorchReplicaSpecs") or {}
    workers = (replicas.get("Worker") or {}).get("replicas") or 1
    yield from _name(
        manifest, f"-worker-{workers - 1}" if "Worker" in replicas else "-master-0"
    )  # admitted, but its Service is not made
    yield from _manager("PyTorchJob", spec.get("runPolicy") or {}, "spec.runPolicy")
    elastic = spec.get("elasticPolicy")
    if elastic is not None and "Worker" not in replicas:
        yield "spec.elasticPolicy: needs a Worker"
    if elastic is not None and "nProcPerNode" in elastic and "nprocPerNode" in spec:
        yield "spec.elasticPolicy.nProcPerNode: excludes spec.nprocPerNode"
    for kind, replica in replicas.items():
        yield from _replica(f"spec.pytorchReplicaSpecs.{kind}", kind, replica or {})


def _replica(path: str, kind: str, replica: Manifest) -> Iterator[str]:
    if kind not in ("Master", "Worker"):
        yield f"{path}: only Master and Worker"
    containers = ((replica.get("template") or {}).get("spec") or {}).get("containers") or []
    if "pytorch" not in [container.get("name") for container in containers]:
        yield f"{path}.template.spec.containers: none is named pytorch"
    if kind == "Master" and replica.get("replicas") != 1:
        yield f"{path}.replicas: must be written out and be 1"
    if kind == "Worker" and replica.get("replicas", 1) < 1:
        yield f"{path}.replicas: must be 1 or more"
    if replica.get("restartPolicy", "Never") not in ("Always", "OnFailure", "Never", "ExitCode"):
        yield f"{path}.restartPolicy: {replica['restartPolicy']!r} (admitted, but the pod is never made)"


def _trainjob(manifest: Manifest, spec: Manifest) -> Iterator[str]:
    trainer = spec.get("trainer") or {}
    yield from _name(manifest, f"-node-0-{(trainer.get('numNodes') or 1) - 1}-abcde")  # JobSet's check
    yield from _manager("TrainJob", spec, "spec")
    for variable in trainer.get("env") or []:
        if variable.get("name") in _RESERVED:
            yield f"spec.trainer.env: {variable['name']} is reserved"


def _job(manifest: Manifest, spec: Manifest) -> Iterator[str]:
    policy = ((spec.get("template") or {}).get("spec") or {}).get("restartPolicy")
    indexed = spec.get("completionMode") == "Indexed"
    yield from _name(manifest, f"-{(spec.get('completions') or 1) - 1}" if indexed else "")  # the host name
    if policy not in ("Never", "OnFailure"):
        yield f"spec.template.spec.restartPolicy: {policy!r}; Never or OnFailure"
    if spec.get("podFailurePolicy") and policy != "Never":
        yield "spec.podFailurePolicy: needs restartPolicy Never"
    if spec.get("completionMode", "NonIndexed") not in ("Indexed", "NonIndexed"):
        yield f"spec.completionMode: {spec['completionMode']!r}; Indexed or NonIndexed"
    if indexed and spec.get("completions") is None:
        yield "spec.completions: needed by completionMode Indexed"
