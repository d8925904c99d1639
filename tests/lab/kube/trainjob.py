"""TrainJob with its (Cluster)TrainingRuntime as trainer 2.3 and JobSet 0.12 expand them: an Indexed Job and its Service."""

from __future__ import annotations

import copy
import hashlib

from tests.lab.kube.workload import INDEX, Manifest, ManifestError, namespace_of, quantity, whole

CONTAINER, PORT = "node", 29500
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
JOBSET = "jobset.sigs.k8s.io"


def runtime_of(train_job: Manifest, manifests: list[Manifest]) -> Manifest:
    """The runtime that a TrainJob refers to."""
    wanted = {"kind": "ClusterTrainingRuntime", **train_job["spec"]["runtimeRef"]}
    for manifest in manifests:
        if (manifest["kind"], manifest["metadata"]["name"]) == (wanted["kind"], wanted["name"]):
            return manifest
    raise ManifestError(f"spec.runtimeRef: there is no {wanted['kind']} {wanted['name']} (refused at admission)")


def failure_policy(runtime: Manifest) -> Manifest | None:
    """The JobSet's failurePolicy; without one any failed Job fails the JobSet."""
    found: Manifest | None = runtime["spec"]["template"]["spec"].get("failurePolicy")
    return found


def indexed_job(train_job: Manifest, runtime: Manifest) -> Manifest:
    """The Job that JobSet makes of the runtime's trainer step, with what the TrainJob overrides and the torch plugin injects."""
    if train_job["spec"].get("runtimePatches"):
        raise ManifestError("spec.runtimePatches: not emulated")
    step = _trainer_step(runtime)
    name = train_job["metadata"]["name"]
    spec = copy.deepcopy(step["template"]["spec"])
    trainer = train_job["spec"].get("trainer")
    policy = runtime["spec"].get("mlPolicy") or {}
    nodes = (trainer or {}).get("numNodes") or policy.get("numNodes") or 1
    if trainer is not None:  # without it nothing is injected at all
        container = _node(spec["template"]["spec"])
        _override(container, trainer)
        if "torch" in policy:
            _inject(container, trainer, name, nodes)
    job_name = f"{name}-{step['name']}-0"
    template = spec["template"]
    template["spec"].setdefault("restartPolicy", "OnFailure")  # JobSet's webhook
    template["spec"]["subdomain"] = name
    metadata = template.setdefault("metadata", {})
    for key in ("labels", "annotations"):
        metadata[key] = {**(metadata.get(key) or {}), **_jobset_labels(train_job, step["name"], job_name)}
    spec |= {"completions": nodes, "parallelism": nodes, "completionMode": "Indexed"}
    return {"kind": "Job", "metadata": {"name": job_name, "namespace": namespace_of(train_job)}, "spec": spec}


def service(train_job: Manifest) -> Manifest:
    """JobSet's headless Service; its names resolve before the pods are ready."""
    name = train_job["metadata"]["name"]
    selector = {f"{JOBSET}/jobset-name": name}
    return {
        "kind": "Service",
        "metadata": {"name": name, "namespace": namespace_of(train_job)},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector},
    }


def _trainer_step(runtime: Manifest) -> Manifest:
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    if len(jobs) != 1:
        raise ManifestError("replicatedJobs: only a runtime with the trainer step alone is emulated")
    for job in jobs:
        labels = (job["template"].get("metadata") or {}).get("labels") or {}
        if labels.get(STEP) == "trainer":
            found: Manifest = job
            return found
    raise ManifestError(f"replicatedJobs: none has the label {STEP}: trainer")


def _node(pod_spec: Manifest) -> Manifest:
    for container in pod_spec["containers"]:
        if container["name"] == CONTAINER:
            found: Manifest = container
            return found
    raise ManifestError(f"the trainer step has no container named {CONTAINER}")


def _override(container: Manifest, trainer: Manifest) -> None:
    for key in ("image", "command", "args"):
        if key in trainer:
            container[key] = trainer[key]
    if "resourcesPerNode" in trainer:
        container["resources"] = trainer["resourcesPerNode"]
    for variable in trainer.get("env") or []:
        _set(container, "env", "name", variable)


def _inject(container: Manifest, trainer: Manifest, name: str, nodes: int) -> None:
    for key, value in (("PET_NNODES", nodes), ("PET_NPROC_PER_NODE", _processes(container, trainer))):
        _set(container, "env", "name", {"name": key, "value": str(value)})
    rank = {"fieldRef": {"apiVersion": "v1", "fieldPath": f"metadata.annotations['{INDEX}']"}}
    _set(container, "env", "name", {"name": "PET_NODE_RANK", "valueFrom": rank})
    _set(container, "env", "name", {"name": "PET_MASTER_ADDR", "value": f"{name}-node-0-0.{name}"})
    _set(container, "env", "name", {"name": "PET_MASTER_PORT", "value": str(PORT)})
    _set(container, "ports", "containerPort", {"containerPort": PORT, "protocol": "TCP"})


def _set(container: Manifest, key: str, identity: str, item: Manifest) -> None:
    """Replace the entry of the same identity where it stands, or append."""
    items = container.setdefault(key, [])
    for place, old in enumerate(items):
        if old.get(identity) == item[identity]:
            items[place] = item
            return
    items.append(item)


def _processes(container: Manifest, trainer: Manifest) -> str:
    if "numProcPerNode" in trainer:
        return str(trainer["numProcPerNode"])
    resources = container.get("resources") or {}
    limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
    if any("gpu" in key.lower() and quantity(value) for key, value in {**requests, **limits}.items()):
        return "auto"
    return str(max(1, whole(requests.get("cpu") or limits.get("cpu") or 0)))  # never os.cpu_count(), as in v1


def _jobset_labels(train_job: Manifest, step: str, job_name: str) -> dict[str, str]:
    """Labels and annotations alike; for the one replicated Job of one replica that this lab has."""
    key = hashlib.sha1(f"{namespace_of(train_job)}/{job_name}".encode()).hexdigest()
    return {
        f"{JOBSET}/jobset-name": train_job["metadata"]["name"],
        f"{JOBSET}/replicatedjob-name": step,
        f"{JOBSET}/replicatedjob-replicas": "1",
        f"{JOBSET}/job-index": "0",
        f"{JOBSET}/job-key": key,
        f"{JOBSET}/job-global-index": "0",
        f"{JOBSET}/global-replicas": "1",
        f"{JOBSET}/group-name": "default",
        f"{JOBSET}/group-replicas": "1",
        f"{JOBSET}/job-group-index": "0",
        f"{JOBSET}/restart-attempt": "0",
    }
