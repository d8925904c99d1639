"""A job's pods on this machine: real processes, each pod with its own network, host name, PID 1, /dev/shm and root.

    python -m tests.lab.kube.pods FILE... [--print] [--claim NAME=FOLDER] [--speed 10]      as root; --print: only the pods, as YAML

The manifests are expanded as their controllers do (controllers.py), and the pods restarted as those and the kubelet do
(job_status.py, running_pod.py). Instead of an image, containers see a copy-on-write view of this machine's files. Not emulated:
probes, hooks (a pod is ready when its containers run), resource limits, images, service accounts, scheduling.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from tests.lab.kube.controllers import expand
from tests.lab.kube.pod_node import Faults as Faults
from tests.lab.kube.pod_server import BASE
from tests.lab.kube.workload import Manifest, ManifestError
from tests.lab.machines import LabError, wait_for

ROOT = Path(__file__).resolve().parents[3]
TOOLS = ("unshare", "nsenter", "setpriv", "ip", "mount", "chroot")
DISRUPTION = "DisruptionTarget"
_REPLY_SECONDS = 60
_NAMESPACES = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]


def missing() -> str:
    """Why no pods can be had here; empty if they can."""
    if os.geteuid() != 0:
        return "the pod lab needs root"
    absent = [tool for tool in TOOLS if not shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin")]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return "" if "overlay" in Path("/proc/filesystems").read_text() else "this kernel has no overlay file system"


@dataclass(frozen=True)
class Verdict:
    """What has become of a job; of each pod by its name, over all pods of that name."""

    condition: str  # Succeeded, Complete, Failed, Suspended; empty: not over yet
    reason: str
    message: str
    phases: dict[str, str]  # Terminating, Gone: deleted
    exit_codes: dict[str, list[int]]  # of all runs of its containers, in order
    restarts: dict[str, int]  # of containers, in place
    created: dict[str, int]  # pod objects


class Emulator:
    """One job on an emulated cluster; everything is gone after the with block, also if this process is killed in it."""

    def __init__(
        self,
        manifests: list[Manifest],
        *,
        path: str = os.environ["PATH"],
        environ: dict[str, str] | None = None,
        folder: str = "/",
        claims: dict[str, Path] | None = None,
        faults: Faults | None = None,
        speed: float = 10,
        verbose: bool = False,
    ) -> None:
        """
        Args:
            manifests: the job, and its runtime, Services, ConfigMaps and Secrets.
            path, environ, folder: PATH, the other variables and the working directory that an image would bring.
            claims: a host folder for each persistentVolumeClaim; all pods share it.
            faults: what is to go wrong, or late.
            speed: back-offs and the init container's look-ups run this much faster than real ones; graces do not.
            verbose: print events and logs to standard error as they come.
        """
        held = {name: Path(claim).resolve() for name, claim in (claims or {}).items()}
        if hidden := [str(claim) for claim in held.values() if BASE in claim.parents]:
            raise LabError(f"claims: {hidden[0]} is below {BASE}, where the emulator has its own files")
        self._setup = {
            "manifests": manifests,
            "environ": {"PATH": path, **(environ or {})},
            "folder": folder,
            "claims": {name: str(claim) for name, claim in held.items()},
            "faults": dataclasses.asdict(faults or Faults()),
            "speed": speed,
            "verbose": verbose,
        }
        self._verbose, self._lock = verbose, threading.Lock()

    def __enter__(self) -> Emulator:
        self._errors = tempfile.TemporaryFile()
        argv = ["unshare", *_NAMESPACES, "--", sys.executable, "-m", "tests.lab.kube.pod_server"]
        self._process = subprocess.Popen(
            argv,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if self._verbose else self._errors,
            text=True,
            start_new_session=True,  # Ctrl-C is for the test alone
        )
        try:
            self._ask(self._setup)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def wait(self, seconds: float) -> Verdict:
        """Wait for the job's end and for that of the pods that it deletes; after that many seconds the condition may be empty."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            verdict = self.status()
            if verdict.condition and "Terminating" not in verdict.phases.values():
                return verdict
            time.sleep(0.05)
        return self.status()

    def status(self) -> Verdict:
        told = self._ask({"do": "status"})
        condition, reason, message = told.pop("outcome") or ("", "", "")
        return Verdict(condition, reason, message, **told)

    def log(self, pod: str) -> str:
        """What the containers of all pods of that name wrote."""
        return str(self._ask({"do": "log", "pod": pod}))

    def wait_for_log(self, pod: str, text: str, seconds: float = 30) -> None:
        """Wait until a pod has written a text."""
        self._await(lambda: text in self.log(pod), seconds, f"{text!r} in the log of pod {pod}")

    def wait_for_exit(self, pod: str, seconds: float = 30) -> int:
        """Wait until a container of a pod has ended; its exit code. A PyTorchJob may be over while its workers still run."""
        self._await(lambda: self.status().exit_codes[pod], seconds, f"exit code of pod {pod}")
        return self.status().exit_codes[pod][-1]

    def kill(self, pod: str, number: int = signal.SIGKILL, match: str = "") -> None:
        """Signal PID 1 of a pod's containers, as the node can (out of memory), or the processes whose command line has a text."""
        self._ask({"do": "kill", "pod": pod, "signal": int(number), "match": match})

    def delete_pod(self, pod: str, grace_seconds: float | None = None) -> None:
        """kubectl delete pod; None: the grace that the pod asks for."""
        self._ask({"do": "delete", "pod": pod, "grace_seconds": grace_seconds, "condition": ""})

    def evict(self, pod: str) -> None:
        """A drained node or a preemption: a deletion that says so in the pod's conditions."""
        self._ask({"do": "delete", "pod": pod, "grace_seconds": None, "condition": DISRUPTION})

    def link(self, pod: str, state: str) -> None:
        """Pull (down) or plug (up) a pod's cable."""
        self._ask({"do": "link", "pod": pod, "state": state})

    def resolve(self, name: str) -> list[str]:
        """The addresses of a DNS name, as a pod would get them now."""
        return [str(address) for address in self._ask({"do": "resolve", "name": name})]

    def events(self) -> list[str]:
        """What happened, with the seconds since the start."""
        return [str(event) for event in self._ask({"do": "events"})]

    def report(self) -> str:
        """Events and logs, for the message of a failing test."""
        logs = [f"--- {pod}\n{self.log(pod)}" for pod in self.status().phases]
        return "\n".join([*self.events(), *logs])

    def _await(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        try:
            wait_for(condition, seconds, what)
        except LabError as error:
            raise LabError(f"{error}\n{self.report()}") from None

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._lock:
            try:
                self._process.stdin.write(json.dumps(request, default=str) + "\n")
                self._process.stdin.flush()
                ready = select.select([self._process.stdout], [], [], _REPLY_SECONDS)[0]
                line = self._process.stdout.readline() if ready else ""
            except BrokenPipeError:
                line = ""
        if not line:
            self._errors.seek(0)
            raise LabError(f"the emulated cluster does not answer\n{self._errors.read().decode(errors='replace')[-4000:]}")
        reply = json.loads(line)
        if "error" in reply:
            raise (ManifestError if reply["manifest"] else LabError)(reply["error"])
        return reply["answer"]


def load(files: list[Path]) -> list[Manifest]:
    return [manifest for file in files for manifest in yaml.safe_load_all(file.read_text()) if manifest]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--print", action="store_true", help="only print the pods")
    parser.add_argument(
        "--claim", action="append", default=[], metavar="NAME=FOLDER", help="the folder behind a persistentVolumeClaim"
    )
    parser.add_argument("--speed", type=float, default=10, help="back-offs run this much faster")
    parser.add_argument("--seconds", type=float, default=600, help="how long to wait for the job's end")
    arguments = parser.parse_args()
    manifests = load(arguments.files)
    if arguments.print:
        pods = [dataclasses.asdict(pod) for pod in expand(manifests).pods]
        print(yaml.safe_dump(json.loads(json.dumps(pods)), sort_keys=False), end="")
        return 0
    claims = {name: Path(folder) for name, _, folder in (claim.partition("=") for claim in arguments.claim)}
    with Emulator(manifests, claims=claims, speed=arguments.speed, verbose=True) as cluster:
        verdict = cluster.wait(arguments.seconds)
    print(yaml.safe_dump(dataclasses.asdict(verdict), sort_keys=False), end="")
    return 0 if verdict.condition in ("Succeeded", "Complete") else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (LabError, ManifestError) as error:
        sys.exit(f"error: {error}")
