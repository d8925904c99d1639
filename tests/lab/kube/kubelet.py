"""All pods of an emulated cluster, those that are gone included."""

from __future__ import annotations

import math
import time

from tests.lab.kube.pod_node import Node
from tests.lab.kube.running_pod import RunningPod
from tests.lab.kube.workload import ManifestError, Pod

_FIRST_ADDRESS, _LAST_ADDRESS = 2, 254


class Kubelet:
    """Makes pods, drives them, and finds them by name."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.pods: list[RunningPod] = []

    def create(self, pod: Pod) -> None:
        """Make a pod object; a test's start_after holds for the first of its name."""
        number = _FIRST_ADDRESS + len(self.pods)
        if number > _LAST_ADDRESS:
            raise ManifestError(f"no address is left for {pod.name}: {len(self.pods)} pods were made")
        faults = self.node.faults
        first = not any(other.pod.name == pod.name for other in self.pods)
        starts_at = time.monotonic() + (faults.start_after.get(pod.name, 0) if first else 0)
        if pod.name in faults.never_started:
            starts_at = math.inf
        self.pods.append(RunningPod(pod, number, self.node, starts_at))

    def step(self) -> None:
        now = time.monotonic()
        for pod in self.pods:
            pod.step(now)

    def find(self, name: str) -> RunningPod:
        """The newest pod of a name."""
        for pod in reversed(self.pods):
            if pod.pod.name == name:
                return pod
        raise ManifestError(f"there is no pod {name}; there are {', '.join(sorted({pod.pod.name for pod in self.pods}))}")

    def active(self) -> list[RunningPod]:
        return [pod for pod in self.pods if pod.active]

    def terminate_all(self) -> None:
        """As a controller deletes what still runs of its job."""
        for pod in self.active():
            pod.terminate()
