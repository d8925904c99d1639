"""Manifests to pods, as the real controllers make them: PyTorchJob, TrainJob with its runtime, and a plain Indexed Job.

Pure functions, held to what training-operator 1.9.4, trainer 2.3 with JobSet 0.12, and kube-controller-manager 1.36 made of
the same manifests (tests/test_kube_lab.py).
"""

from __future__ import annotations

import copy

from tests.lab.kube import pytorchjob, trainjob
from tests.lab.kube.workload import INDEX, Manifest, ManifestError, Pod, Workload, namespace_of, with_port_protocols
from tests.lab.kube.workload import quantity as quantity

KINDS = ("PyTorchJob", "TrainJob", "Job")


def expand(manifests: list[Manifest]) -> Workload:
    """The one job among some manifests, expanded; the others are its runtime, its Services and its ConfigMaps.

    Raises:
        ManifestError: where a controller would refuse it, or this lab does not emulate it.
    """
    jobs = [manifest for manifest in manifests if manifest["kind"] in KINDS]
    if len(jobs) != 1:
        raise ManifestError(f"{len(jobs)} jobs among the manifests; wanted one of {', '.join(KINDS)}")
    job = jobs[0]
    if job["kind"] == "PyTorchJob":
        return pytorchjob.expand(job)
    if job["kind"] == "TrainJob":
        runtime = trainjob.runtime_of(job, manifests)
        return _of_job(job, trainjob.indexed_job(job, runtime), [trainjob.service(job)], trainjob.failure_policy(runtime))
    services = [m for m in manifests if m["kind"] == "Service" and namespace_of(m) == namespace_of(job)]
    return _of_job(job, job, services, None)


def indexed_pods(job: Manifest, services: list[Manifest]) -> list[Pod]:
    """The pods of an Indexed Job."""
    spec = job["spec"]
    if spec.get("completionMode") != "Indexed":
        raise ManifestError("completionMode: only an Indexed Job is emulated")
    if spec.get("parallelism", 1) < spec["completions"]:
        raise ManifestError("parallelism: fewer than completions; the first pods would wait for peers that never start")
    return [_indexed_pod(job, index, services) for index in range(spec["completions"])]


def _of_job(owner: Manifest, job: Manifest, services: list[Manifest], failure_policy: Manifest | None) -> Workload:
    spec = job["spec"]
    for key in ("backoffLimitPerIndex", "successPolicy", "podReplacementPolicy"):
        if key in spec:
            raise ManifestError(f"Job.spec.{key}: not emulated")
    suspended = bool(owner["spec"].get("suspend"))
    return Workload(
        kind=owner["kind"],
        name=owner["metadata"]["name"],
        pods=() if suspended else tuple(indexed_pods(job, services)),
        namespace=namespace_of(owner),
        suspended=suspended,
        backoff_limit=spec.get("backoffLimit", 6),
        active_deadline_seconds=spec.get("activeDeadlineSeconds"),
        pod_failure_rules=(spec.get("podFailurePolicy") or {}).get("rules") or [],
        failure_policy=failure_policy,
    )


def _indexed_pod(job: Manifest, index: int, services: list[Manifest]) -> Pod:
    template = copy.deepcopy(job["spec"]["template"])
    metadata, spec = template.get("metadata") or {}, template["spec"]
    job_name = job["metadata"]["name"]
    name = f"{job_name}-{index}"
    labels = {**(metadata.get("labels") or {}), "batch.kubernetes.io/job-name": job_name, "job-name": job_name, INDEX: str(index)}
    _give_index([*(spec.get("initContainers") or []), *spec["containers"]])
    with_port_protocols(spec["containers"])
    spec["hostname"] = name
    service = _service_of(spec.get("subdomain"), labels, services)
    return Pod(
        name=name,
        index=index,
        replica_type="",
        restart_policy=spec["restartPolicy"],
        labels=labels,
        annotations={**(metadata.get("annotations") or {}), INDEX: str(index)},
        spec=spec,
        hostname=name,
        dns_names=(f"{name}.{spec['subdomain']}", spec["subdomain"]) if service else (),
        published_before_ready=bool(service and service["spec"].get("publishNotReadyAddresses")),
    )


def _give_index(containers: list[Manifest]) -> None:
    """JOB_COMPLETION_INDEX, init containers included, unless set."""
    source = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.labels['{INDEX}']"}}
    for container in containers:
        variables = container.get("env") or []
        if not any(variable["name"] == "JOB_COMPLETION_INDEX" for variable in variables):
            container["env"] = [*variables, {"name": "JOB_COMPLETION_INDEX", "valueFrom": source}]


def _service_of(subdomain: str | None, labels: dict[str, str], services: list[Manifest]) -> Manifest | None:
    """The headless Service that gives a pod its name; none if its selector is for other pods."""
    for service in services:
        spec = service["spec"]
        headless = service["metadata"]["name"] == subdomain and spec.get("clusterIP") == "None"
        if headless and spec.get("selector") and spec["selector"].items() <= labels.items():
            return service
    return None
