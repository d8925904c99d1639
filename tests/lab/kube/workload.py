"""What a job's controller decides once: its pods, and the rules by which it restarts and ends them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any

Manifest = dict[str, Any]
TRAINING_LABEL = "training.kubeflow.org"
INDEX = "batch.kubernetes.io/job-completion-index"

_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


class ManifestError(ValueError):
    """A manifest that no controller would take, or that asks for what this lab does not emulate; the text says which."""


@dataclass(frozen=True)
class Pod:
    """One pod as its controller makes it."""

    name: str  # without the random suffix that the pods of a Job have
    index: int
    replica_type: str  # Master or Worker; empty for a Job's pod
    restart_policy: str  # the controller's: ExitCode is not one of a pod's own
    labels: dict[str, str]
    annotations: dict[str, str]
    spec: dict[str, Any]
    hostname: str
    dns_names: tuple[str, ...]  # within the namespace
    published_before_ready: bool = False  # publishNotReadyAddresses of the Service
    waits_for: str = ""  # the DNS name that its init container looks up; empty: it has none


@dataclass(frozen=True)
class Workload:
    """A job, expanded."""

    kind: str
    name: str
    pods: tuple[Pod, ...]
    namespace: str = "default"
    suspended: bool = False
    backoff_limit: int | None = None
    active_deadline_seconds: float | None = None
    clean_pod_policy: str = "None"  # PyTorchJob
    elastic: bool = False  # PyTorchJob
    pod_failure_rules: list[Manifest] = field(default_factory=list)  # Job, TrainJob
    failure_policy: Manifest | None = None  # TrainJob: its JobSet's


def quantity(text: object) -> float:
    """A Kubernetes quantity as a number: 500m is 0.5, 64Mi is 67108864."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    if not match or match[2] not in _UNITS:
        raise ManifestError(f"quantity {text!r}: not understood")
    return float(match[1]) * _UNITS[match[2]]


def whole(text: object) -> int:
    """A quantity rounded up, as Quantity.Value() does."""
    return math.ceil(quantity(text))


def with_port_protocols(containers: list[Manifest]) -> None:
    """The API server's default of ports[].protocol."""
    for container in containers:
        for port in container.get("ports") or []:
            port.setdefault("protocol", "TCP")


def namespace_of(manifest: Manifest) -> str:
    return str(manifest["metadata"].get("namespace", "default"))
