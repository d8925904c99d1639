"""Why pods do not run, or how they ended: from what the API server tells of them, in one line."""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]


def why_pending(name: str, job: Object, pods: list[Object], events: list[Object]) -> str:
    """The first reason found: the queue, a pod that finds no place or cannot start its container, pods that cannot be made.

    Args:
        name: the job's.
        job: the job's object.
        pods: its pods.
        events: those of the namespace.
    """
    spec = job.get("spec", {})
    if spec.get("suspend") or spec.get("runPolicy", {}).get("suspend"):
        queue = job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
        last = _last_event(events, name)
        return (f"waits for admission to queue {queue}" if queue else "is suspended") + (f": {last}" if last else "")
    for pod in pods:
        if why := _of_pod(pod):
            return f"{pod['metadata']['name']}: {why}"
    for pod in pods:
        if pod.get("status", {}).get("phase") == "Pending" and (last := _last_event(events, pod["metadata"]["name"])):
            return f"{pod['metadata']['name']}: {last}"
    return _last_event(events, name) or ("its pods start" if pods else "no pod was made yet")


def why_failed(lines: list[str], pods: list[Object], condition: Object) -> str:
    """The nodes' own fault line, else how the pods ended, else the controller's word.

    Args:
        lines: the pods' last log lines.
        condition: the job's condition Failed.
    """
    faults = [line for line in lines if line.startswith(("FAULT ", "error: "))]
    if faults:
        return faults[-1]
    ends = [f"{pod['metadata']['name']} {end}" for pod in pods if (end := _end(pod))]
    reason = f"{condition.get('reason', 'Failed')}: {condition.get('message', '')}".strip(": ")
    return "; ".join([reason, *ends])


def _of_pod(pod: Object) -> str | None:
    """No place for it, or a container that waits for its image, its config or its volume."""
    status = pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', 'Unschedulable')}: {condition.get('message', '')}"
    for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".strip(": ")
    return None


def _end(pod: Object) -> str | None:
    for container in pod.get("status", {}).get("containerStatuses", []):
        ended = container.get("state", {}).get("terminated") or container.get("lastState", {}).get("terminated")
        if ended and ended.get("exitCode"):
            return f"ended with {ended['exitCode']} ({ended.get('reason', 'Error')})"
    return None


def _last_event(events: list[Object], name: str) -> str | None:
    """The newest warning about an object."""
    about = [event for event in events if event.get("involvedObject", {}).get("name") == name and event.get("type") == "Warning"]
    about.sort(key=lambda event: event.get("lastTimestamp") or event.get("eventTime") or "")
    return f"{about[-1].get('reason')}: {about[-1].get('message')}" if about else None
