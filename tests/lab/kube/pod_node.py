"""What the pods of an emulated cluster share: folders, DNS, a stand-in for the image, a test's faults, and what has happened."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.kube.cluster_dns import Dns
from tests.lab.kube.pod_root import Image
from tests.lab.kube.pod_spec import Objects


@dataclass(frozen=True)
class Faults:
    """What a test wants to go otherwise than at once; all by a pod's name."""

    start_after: dict[str, float] = field(default_factory=dict)  # seconds until it is scheduled, the first time
    resolves_after: dict[str, float] = field(default_factory=dict)  # seconds from its publication until its names resolve
    never_started: tuple[str, ...] = ()  # stays Pending: no node fits


@dataclass
class Node:
    """What all pods share."""

    base: Path
    dns: Dns
    namespace: str
    known: Objects
    image: Image
    faults: Faults
    speed: float  # back-offs and the init container's look-ups run this much faster
    verbose: bool
    born: float = field(default_factory=time.monotonic)
    events: list[str] = field(default_factory=list)
    logs: dict[str, bytearray] = field(default_factory=dict)
    exit_codes: dict[str, list[int]] = field(default_factory=dict)  # of all runs of a pod's containers, init containers apart

    def note(self, pod: str, text: str) -> None:
        self.events.append(f"[{time.monotonic() - self.born:6.2f}] {pod}: {text}")
        if self.verbose:
            print(self.events[-1], file=sys.stderr, flush=True)

    def log(self, pod: str, written: bytes) -> None:
        self.logs.setdefault(pod, bytearray()).extend(written)
        if self.verbose:
            for line in written.decode(errors="replace").splitlines():
                print(f"{pod} | {line}", file=sys.stderr, flush=True)
