"""A pod that runs: its containers are restarted in place, its names published when it is ready, and it is ended with grace."""

from __future__ import annotations

import hashlib
import shutil
import signal
import time

from tests.lab.kube import pod_spec
from tests.lab.kube.pod_container import Container
from tests.lab.kube.pod_node import Node
from tests.lab.kube.pod_root import Room, make_volume, mount_tmpfs, write_etc
from tests.lab.kube.pod_spec import Identity
from tests.lab.kube.pytorchjob import INIT_CONTAINER
from tests.lab.kube.sandbox import Sandbox
from tests.lab.kube.workload import Pod
from tests.lab.machines import run

FINISHED = ("Succeeded", "Failed")
_LOOK_UPS, _LOOK_UP_SECONDS, _LONGEST_BACKOFF_SECONDS = 100, 2, 300


class RunningPod:
    """One pod object: its phase, its sandbox and its containers."""

    def __init__(self, pod: Pod, number: int, node: Node, starts_at: float) -> None:
        self.pod, self.node, self._number, self._starts_at = pod, node, number, starts_at
        digest = hashlib.sha1(f"{pod.name} {number}".encode()).hexdigest()
        self.name = pod.name if pod.replica_type else f"{pod.name}-{digest[:5]}"
        self.uid = digest[:32]
        self.phase = "Pending"
        self.conditions: set[str] = set()
        self.terminating = self.gone = False
        self.containers: list[Container] = []
        self._inits: list[Container] = []
        self._look_ups, self._next_look_up = 0, 0.0
        self._sandbox: Sandbox | None = None
        self._folder = node.base / f"{pod.name}-{number}"
        self._killed_at = 0.0

    @property
    def restarts(self) -> int:
        """The sum of the containers' restartCounts."""
        return sum(max(0, len(c.codes) + c.running - 1) for c in [*self._inits, *self.containers])

    @property
    def exit_codes(self) -> dict[str, int]:
        """The last exit code of each container that has ended."""
        return {c.name: c.codes[-1] for c in [*self._inits, *self.containers] if c.codes}

    @property
    def active(self) -> bool:
        return not self.gone and self.phase not in FINISHED

    def step(self, now: float) -> None:
        """Whatever is due."""
        if self.gone or (self.phase in FINISHED and not self.terminating):
            return
        if self.terminating:
            self._end(now)
        elif self._sandbox is None:
            if now >= self._starts_at:
                self._schedule()
        elif self._initialized(now):
            self._run(now)

    def terminate(self, grace_seconds: float | None = None, condition: str = "") -> None:
        """kubectl delete pod, or an eviction (condition DisruptionTarget): SIGTERM to PID 1, and SIGKILL after the grace."""
        if self.terminating or self.gone:
            return
        self.terminating = True
        self.conditions |= {condition} if condition else set()
        default = self.pod.spec.get("terminationGracePeriodSeconds")
        grace = grace_seconds if grace_seconds is not None else 30 if default is None else float(default)
        self.node.note(self.pod.name, f"terminating, {grace:g} s of grace {condition}".rstrip())
        self._killed_at = time.monotonic() + grace
        if not self.pod.published_before_ready:
            self._publish(False)
        for container in [*self._inits, *self.containers]:
            if container.running and grace > 0:
                container.signal(signal.SIGTERM)

    def link(self, state: str) -> None:
        if self._sandbox is not None:
            self._sandbox.link(state)

    def _schedule(self) -> None:
        self._sandbox = Sandbox(self._number, self.pod.hostname)
        identity = Identity(self.pod, self.name, self.node.namespace, self._sandbox.address, f"node-{self._number}", self.uid)
        write_etc(self._folder / "etc", identity)
        mount_tmpfs(self._folder / "shm", pod_spec.SHM_SIZE)
        group = (self.pod.spec.get("securityContext") or {}).get("fsGroup")
        wanted = pod_spec.volumes(self.pod, self.node.known)
        volumes = {name: make_volume(volume, self._folder / "volumes" / name, group) for name, volume in wanted.items()}
        room = Room(
            folder=self._folder,
            sandbox=self._sandbox.pid,
            identity=identity,
            known=self.node.known,
            volumes=volumes,
            image=self.node.image,
            note=lambda text: self.node.note(self.pod.name, text),
        )
        specs = self.pod.spec
        self._inits = [Container(c, room, self._write) for c in specs.get("initContainers") or [] if c["name"] != INIT_CONTAINER]
        self.containers = [Container(c, room, self._write) for c in specs["containers"]]
        self.node.note(self.pod.name, f"scheduled with {self._sandbox.address}")
        if self.pod.published_before_ready:
            self._publish(True)

    def _write(self, written: bytes) -> None:
        self.node.log(self.pod.name, written)

    def _publish(self, ready: bool) -> None:
        if self._sandbox is None:
            return
        known_from = time.monotonic() + self.node.faults.resolves_after.get(self.pod.name, 0)
        for name in self.pod.dns_names:
            if ready:
                self.node.dns.publish(name, self._sandbox.address, known_from)
            else:
                self.node.dns.withdraw(name, self._sandbox.address)

    def _initialized(self, now: float) -> bool:
        """Init containers one by one, and the operator's last: it looks the master's name up."""
        for container in self._inits:
            if container.codes[-1:] != [0]:
                self._drive(container, now)
                return False
        if not self.pod.waits_for or self._look_ups < 0:
            return True
        if now >= self._next_look_up:
            self._look_ups, self._next_look_up = self._look_ups + 1, now + _LOOK_UP_SECONDS / self.node.speed
            if self.node.dns.resolve(self.pod.waits_for):
                self._look_ups = -1
            elif self._look_ups >= _LOOK_UPS:
                self.node.note(self.pod.name, f"{INIT_CONTAINER}: {self.pod.waits_for} did not resolve in {_LOOK_UPS} look-ups")
                self._look_ups = 0  # OnFailure: from the start
                if self.pod.spec["restartPolicy"] == "Never":
                    self._finish("Failed")
        return False

    def _run(self, now: float) -> None:
        for container in self.containers:
            self._drive(container, now)
        if self.phase in FINISHED:
            return
        ready = all(container.running for container in self.containers)
        if any(container.running for container in self.containers):
            self.phase = "Running"
        if ready or not self.pod.published_before_ready:
            self._publish(ready)
        ended = [c.codes[-1] for c in self.containers if c.codes and not c.running and c.starts_at < 0]
        if len(ended) == len(self.containers):
            self._finish("Failed" if any(ended) else "Succeeded")

    def _drive(self, container: Container, now: float) -> None:
        """Start a container that is due; after its end restartPolicy says whether again (starts_at < 0: never)."""
        if not container.running:
            if 0 <= container.starts_at <= now:
                container.start()
                self.node.note(self.pod.name, f"container {container.name} started")
            return
        code = container.reap()
        if code is None:
            return
        init, policy = container in self._inits, self.pod.spec["restartPolicy"]
        self.node.note(self.pod.name, f"container {container.name} ended with {code}")
        if not init:
            self.node.exit_codes.setdefault(self.pod.name, []).append(code)
        if (code and policy == "OnFailure") or (policy == "Always" and (code or not init)):
            container.starts_at = now + container.backoff_seconds / self.node.speed
            container.backoff_seconds = min(_LONGEST_BACKOFF_SECONDS, container.backoff_seconds * 2)
            return
        container.starts_at = -1
        if init and code:
            self._finish("Failed")

    def _end(self, now: float) -> None:
        """Termination: gone when nothing runs any more."""
        for container in [*self._inits, *self.containers]:
            if not container.running:
                continue
            if now >= self._killed_at:
                container.kill()
            code = container.reap()
            if code is not None:
                self.node.note(self.pod.name, f"container {container.name} ended with {code}")
                self.node.exit_codes.setdefault(self.pod.name, []).append(code)
        if any(container.running for container in [*self._inits, *self.containers]):
            return
        if self.phase not in FINISHED:
            done = self.containers and all(container.codes[-1:] == [0] for container in self.containers)
            self._finish("Succeeded" if done else "Failed")
        self.gone = True

    def _finish(self, phase: str) -> None:
        self.phase = phase
        self.node.note(self.pod.name, phase)
        self._publish(False)
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None
        run("sh", "-c", 'umount -q "$0"/shm "$0"/volumes/* 2>/dev/null', self._folder, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)
