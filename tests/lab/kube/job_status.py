"""When a job restarts its pods and when it is over: the rules of the Job, JobSet and PyTorchJob controllers.

Names of conditions and reasons are the controllers' own. A `step` looks at the pods, acts, and tells the verdict, if any.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, NamedTuple

from tests.lab.kube.kubelet import Kubelet
from tests.lab.kube.running_pod import RunningPod
from tests.lab.kube.trainjob import JOBSET
from tests.lab.kube.workload import Pod, Workload

_FIRST_BACKOFF_SECONDS, _LONGEST_BACKOFF_SECONDS = 10, 600  # of the Job controller, before it replaces a failed pod
_NO_EXIT_CODE = 0xBEEF  # training-operator's word for a pod whose main container has none; it counts as retryable


class Outcome(NamedTuple):
    """A job's final condition."""

    condition: str
    reason: str
    message: str = ""


class JobRules:
    """An Indexed Job: its backoffLimit counts over all pods."""

    def __init__(self, workload: Workload, kubelet: Kubelet) -> None:
        self.workload, self.kubelet = workload, kubelet
        self.pods = list(workload.pods)
        self._restart()

    def _restart(self) -> None:
        """Begin as a new Job; pods of an earlier one are none of its business."""
        self._mine_from = len(self.kubelet.pods)
        self._counted: list[RunningPod] = []
        self._failures, self._in_row, self._last_failure = 0, 0, 0.0
        self._began = time.monotonic()
        self._ending: Outcome | None = None
        for pod in self.pods:
            self.kubelet.create(pod)

    def step(self) -> Outcome | None:
        mine = self.kubelet.pods[self._mine_from :]
        if self._ending is None:
            self._ending = self._count(mine) or self._over(mine)
            if self._ending is not None:
                self.kubelet.node.note(self.workload.name, " ".join(self._ending))
                self.kubelet.terminate_all()
        if self._ending is not None:
            return None if any(pod.active for pod in mine) else self._ending
        self._replace(mine)
        return None

    def _count(self, mine: list[RunningPod]) -> Outcome | None:
        """New failures; one of them may end the Job by podFailurePolicy."""
        for pod in mine:
            if pod in self._counted or not self._failed(pod):
                continue
            self._counted.append(pod)
            rule = next((rule for rule in self.workload.pod_failure_rules if _matches(rule, pod)), {"action": "Count"})
            self.kubelet.node.note(pod.pod.name, f"failed: {rule['action']}")
            if rule["action"] == "FailJob":
                return Outcome("Failed", "PodFailurePolicy", f"pod {pod.pod.name} with exit codes {pod.exit_codes}")
            if rule["action"] == "Count":
                self._failures, self._in_row, self._last_failure = self._failures + 1, self._in_row + 1, time.monotonic()
        return None

    def _failed(self, pod: RunningPod) -> bool:
        """With a podFailurePolicy a deleted pod counts once it has ended, otherwise at once (podReplacementPolicy's defaults)."""
        if self.workload.pod_failure_rules:
            return pod.phase == "Failed"
        return pod.phase == "Failed" or (pod.terminating and pod.phase != "Succeeded")

    def _over(self, mine: list[RunningPod]) -> Outcome | None:
        limit = self.workload.backoff_limit or 0
        in_place = sum(pod.restarts for pod in mine if pod.active and pod.pod.restart_policy == "OnFailure")
        if self._failures > limit or (in_place > 0 if limit == 0 else in_place >= limit):
            return Outcome("Failed", "BackoffLimitExceeded", f"{self._failures} failed pods, {in_place} restarts, limit {limit}")
        if _past_deadline(self.workload, self._began):
            return Outcome("Failed", "DeadlineExceeded")
        done = {pod.pod.index for pod in mine if pod.phase == "Succeeded" and pod not in self._counted}
        return Outcome("Complete", "CompletionsReached") if len(done) == len(self.pods) else None

    def _replace(self, mine: list[RunningPod]) -> None:
        """A new pod for each index that has none, after a back-off that doubles with each failed pod."""
        backoff = min(_LONGEST_BACKOFF_SECONDS, _FIRST_BACKOFF_SECONDS * 2 ** (self._in_row - 1)) if self._in_row else 0
        if time.monotonic() < self._last_failure + backoff / self.kubelet.node.speed:
            return
        there = {pod.pod.index for pod in mine if pod not in self._counted}
        for pod in self.pods:
            if pod.index not in there:
                self.kubelet.create(pod)


class TrainJobRules(JobRules):
    """A TrainJob's JobSet: when its Job fails, failurePolicy restarts all pods together, or not."""

    def __init__(self, workload: Workload, kubelet: Kubelet) -> None:
        self.restarts = self._towards_limit = 0
        super().__init__(workload, kubelet)

    def step(self) -> Outcome | None:
        outcome = super().step()
        if outcome is None:
            return None
        if outcome.condition == "Complete":
            return Outcome("Complete", "AllJobsCompleted")
        policy = self.workload.failure_policy
        if policy is None:
            return Outcome("Failed", "FailedJobs", f"{outcome.reason}: {outcome.message}")
        action = self._action(policy, outcome.reason)
        if action == "FailJobSet":
            return Outcome("Failed", "FailJobSetFailurePolicyAction", f"{outcome.reason}: {outcome.message}")
        if action == "RestartJobSet":
            if self._towards_limit >= policy.get("maxRestarts", 0):
                return Outcome("Failed", "ReachedMaxRestarts", f"{outcome.reason}: {outcome.message}")
            self._towards_limit += 1
        self.restarts += 1
        self.kubelet.node.note(self.workload.name, f"JobSet restart {self.restarts} ({action})")
        self.pods = [_of_attempt(pod, self.restarts) for pod in self.pods]
        self._restart()
        return None

    @staticmethod
    def _action(policy: dict[str, Any], reason: str) -> str:
        for rule in policy.get("rules") or []:
            if reason in (rule.get("onJobFailureReasons") or [reason]):
                return str(rule["action"])
        return "RestartJobSet"


class PyTorchJobRules:
    """A PyTorchJob: the kubelet restarts containers in place, the operator makes pods anew that are missing or have failed."""

    def __init__(self, workload: Workload, kubelet: Kubelet) -> None:
        self.workload, self.kubelet = workload, kubelet
        self._began = time.monotonic()
        for pod in workload.pods:
            kubelet.create(pod)

    def step(self) -> Outcome | None:
        there = [pod for pod in self.kubelet.pods if not pod.gone]
        over = self._limit(there)
        if over is not None:
            self.kubelet.terminate_all()  # whatever cleanPodPolicy says: the condition is set afterwards
            return over
        over = self._succeeded() or self._reconcile(there)
        if over is not None and self.workload.clean_pod_policy != "None":
            self.kubelet.terminate_all()  # All also deletes finished pods, with their logs
        return over

    def _limit(self, there: list[RunningPod]) -> Outcome | None:
        limit = self.workload.backoff_limit
        if limit is not None:
            restarts = sum(p.restarts for p in there if p.phase == "Running" and p.pod.restart_policy != "Never")
            failed = any(pod.phase == "Failed" for pod in there)  # the operator's queue has no memory: 0 retries so far
            if (restarts > 0 or failed) if limit == 0 else restarts >= limit:
                return Outcome("Failed", "PyTorchJobFailed", "it has reached the specified backoff limit")
        if _past_deadline(self.workload, self._began):
            return Outcome("Failed", "PyTorchJobFailed", "it was active longer than specified deadline")
        return None

    def _succeeded(self) -> Outcome | None:
        """The Master's success is the job's; without one all Workers', or any in an elastic job."""
        masters = [pod for pod in self.workload.pods if pod.replica_type == "Master"]
        done = [self.kubelet.find(pod.name).phase == "Succeeded" for pod in masters or self.workload.pods]
        enough = any(done) if self.workload.elastic and not masters else all(done)
        return Outcome("Succeeded", "PyTorchJobSucceeded") if enough else None

    def _reconcile(self, there: list[RunningPod]) -> Outcome | None:
        names = {pod.pod.name for pod in there}
        for missing in [pod for pod in self.workload.pods if pod.name not in names]:
            self.kubelet.create(missing)
        for pod in there:
            if pod.phase != "Failed" or pod.terminating:
                continue
            code = pod.exit_codes.get("pytorch", _NO_EXIT_CODE)
            policy = pod.pod.restart_policy
            if policy == "Never" or (policy == "ExitCode" and code < 128):
                return Outcome("Failed", "PyTorchJobFailed", f"{pod.pod.name} ended with {code}")
            self.kubelet.node.note(pod.pod.name, f"the operator deletes it to make it anew (exit code {code})")
            pod.terminate()
        return None


def rules_for(workload: Workload, kubelet: Kubelet) -> JobRules | PyTorchJobRules:
    """The controller of a job; it makes the first pods."""
    kinds: dict[str, type[JobRules | PyTorchJobRules]] = {
        "PyTorchJob": PyTorchJobRules,
        "TrainJob": TrainJobRules,
        "Job": JobRules,
    }
    return kinds[workload.kind](workload, kubelet)


def _past_deadline(workload: Workload, began: float) -> bool:
    seconds = workload.active_deadline_seconds
    return seconds is not None and time.monotonic() > began + seconds


def _matches(rule: dict[str, Any], pod: RunningPod) -> bool:
    """Whether a rule of podFailurePolicy is for this failure; exit code 0 never matches."""
    for condition in rule.get("onPodConditions") or []:
        if condition["type"] in pod.conditions and condition.get("status", "True") == "True":
            return True
    wanted = rule.get("onExitCodes")
    if not wanted:
        return False
    names = [wanted["containerName"]] if "containerName" in wanted else list(pod.exit_codes)
    codes = [pod.exit_codes[name] for name in names if pod.exit_codes.get(name)]
    return any((code in wanted["values"]) == (wanted["operator"] == "In") for code in codes)


def _of_attempt(pod: Pod, restarts: int) -> Pod:
    attempt = {f"{JOBSET}/restart-attempt": str(restarts)}
    return dataclasses.replace(pod, labels=pod.labels | attempt, annotations=pod.annotations | attempt)
