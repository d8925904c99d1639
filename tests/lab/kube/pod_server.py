"""The emulated cluster's own process: PID 1 of a PID namespace, with its own network and mounts, so that all ends with it.

Started by pods.Emulator. It reads requests from standard input and answers each with a line, all JSON; the first is the job.
At the end of its input it ends, and with it every pod: also when the process that started it was killed.
"""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.kube import pod_spec
from tests.lab.kube.cluster_dns import Dns
from tests.lab.kube.controllers import expand
from tests.lab.kube.job_status import Outcome, rules_for
from tests.lab.kube.kubelet import Kubelet
from tests.lab.kube.pod_node import Faults, Node
from tests.lab.kube.pod_root import Image
from tests.lab.kube.sandbox import GATEWAY, make_bridge
from tests.lab.kube.workload import ManifestError, Pod
from tests.lab.machines import LabError, run

BASE = Path("/dev/shm")  # there on every machine; a tmpfs of this process' own hides what else is in it
_TICK_SECONDS = 0.02

Request = dict[str, Any]


class Server:
    """One job on one emulated cluster."""

    def __init__(self, setup: Request) -> None:
        workload = expand(setup["manifests"])
        known = pod_spec.objects(setup["manifests"], {name: Path(folder) for name, folder in setup["claims"].items()})
        for pod in workload.pods:
            _check(pod, known)
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", BASE)
        make_bridge()
        dns = Dns(GATEWAY, workload.namespace)
        dns.start()
        self.node = Node(
            base=BASE,
            dns=dns,
            namespace=workload.namespace,
            known=known,
            image=Image(setup["environ"], setup["folder"]),
            faults=Faults(**setup["faults"]),
            speed=setup["speed"],
            verbose=setup["verbose"],
        )
        self.kubelet = Kubelet(self.node)
        self.outcome = Outcome("Suspended", f"{workload.kind}Suspended") if workload.suspended else None
        self.rules = None if workload.suspended else rules_for(workload, self.kubelet)

    def step(self) -> None:
        self.kubelet.step()
        if self.outcome is None and self.rules is not None:
            self.outcome = self.rules.step()
            if self.outcome is not None:
                self.node.note("job", " ".join(self.outcome))

    def answer(self, request: Request) -> Any:
        """Do what a request asks for."""
        actions: dict[str, Callable[[Request], Any]] = {
            "status": self._status,
            "events": lambda _: self.node.events,
            "log": lambda r: self.node.logs.get(self.kubelet.find(r["pod"]).pod.name, bytearray()).decode(errors="replace"),
            "kill": lambda r: self._kill(r["pod"], r["signal"], r["match"]),
            "delete": lambda r: self.kubelet.find(r["pod"]).terminate(r["grace_seconds"], r["condition"]),
            "link": lambda r: self.kubelet.find(r["pod"]).link(r["state"]),
            "resolve": lambda r: self.node.dns.resolve(r["name"]),
        }
        return actions[request["do"]](request)

    def _kill(self, name: str, number: int, match: str) -> int:
        found = sum(container.signal(number, match) for container in self.kubelet.find(name).containers)
        if not found:
            raise LabError(f"nothing to signal in pod {name}: no container runs{f' {match!r}' if match else ''}")
        self.node.note(name, f"signal {number} to {found} processes")
        return found

    def _status(self, _: Request) -> Request:
        pods = self.kubelet.pods
        names = sorted({pod.pod.name for pod in pods})
        return {
            "outcome": self.outcome,
            "phases": {pod.pod.name: "Gone" if pod.gone else "Terminating" if pod.terminating else pod.phase for pod in pods},
            "exit_codes": {name: self.node.exit_codes.get(name, []) for name in names},
            "restarts": {name: sum(pod.restarts for pod in pods if pod.pod.name == name) for name in names},
            "created": {name: sum(pod.pod.name == name for pod in pods) for name in names},
        }


def _check(pod: Pod, known: pod_spec.Objects) -> None:
    """Find what a pod would hang on before anything runs."""
    there = pod_spec.volumes(pod, known)
    identity = pod_spec.Identity(pod, pod.name, "", "", "", "")
    for container in [*(pod.spec.get("initContainers") or []), *pod.spec["containers"]]:
        pod_spec.argv(container, pod_spec.environment(container, identity, known))
        for mount in container.get("volumeMounts") or []:
            if mount["name"] not in there:
                raise ManifestError(f"pod {pod.name}: volumeMounts: there is no volume {mount['name']}")


def _send(reply: Any) -> None:
    print(json.dumps(reply), flush=True)


def serve() -> None:
    """Until the end of the input."""
    server: Server | None = None
    pending = b""
    while True:
        if select.select([0], [], [], _TICK_SECONDS)[0]:
            received = os.read(0, 65536)
            if not received:
                return
            *lines, pending = (pending + received).split(b"\n")
            for line in lines:
                try:
                    if server is None:
                        server = Server(json.loads(line))
                        _send({"answer": None})
                    else:
                        _send({"answer": server.answer(json.loads(line))})
                except (LabError, ManifestError) as error:
                    _send({"error": str(error), "manifest": isinstance(error, ManifestError)})
        if server is not None:
            server.step()


if __name__ == "__main__":
    serve()
    sys.stdout.flush()
    os._exit(0)  # PID 1 of its namespace: whatever still runs in it ends now
