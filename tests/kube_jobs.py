"""Small jobs for the Kubernetes lab: shell scripts as PyTorchJob, TrainJob and Indexed Job, each valid as it stands."""

from __future__ import annotations

from typing import Any

from tests.lab.kube.workload import Manifest

IMAGE = "registry.example/kit:1"
EMPTY: Manifest = {"emptyDir": {}}
SHARED: Manifest = {"persistentVolumeClaim": {"claimName": "state"}}
ONCE = "if [ -e /state/1 ]; then exit {then}; else touch /state/1; exit {first}; fi"


def pytorchjob(master: str, worker: str = "", policy: str = "OnFailure", **run_policy: object) -> Manifest:
    """A job of shell scripts; $ is written $$ where Kubernetes would see a variable of its own."""
    replicas = {"Master": master, "Worker": worker} if worker else {"Master": master}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": "job"},
        "spec": {
            "runPolicy": run_policy,
            "pytorchReplicaSpecs": {
                kind: {"replicas": 1, "restartPolicy": policy, "template": {"spec": pod("pytorch", script)}}
                for kind, script in replicas.items()
            },
        },
    }


def pod(container: str, script: str, state: Manifest = EMPTY, **spec: Any) -> Manifest:
    """A pod's spec, with a folder /state."""
    mount = {"name": "state", "mountPath": "/state"}
    containers = [{"name": container, "image": IMAGE, "command": ["sh", "-c", script], "volumeMounts": [mount]}]
    return {"terminationGracePeriodSeconds": 1, "containers": containers, "volumes": [{"name": "state", **state}], **spec}


def indexed_job(script: str, policy: str = "Never", state: Manifest = EMPTY, **spec: Any) -> list[Manifest]:
    """Two pods and their headless Service."""
    template = {
        "metadata": {"labels": {"app": "job"}},
        "spec": pod("node", script, state, restartPolicy=policy, subdomain="peers"),
    }
    indexed = {"completionMode": "Indexed", "completions": 2, "parallelism": 2}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "job"},
        "spec": {**indexed, "template": template, **spec},
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "peers"},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"app": "job"}},
    }
    return [job, service]


def trainjob(
    script: str,
    failure_policy: Manifest | None = None,
    trainer: Manifest | None = None,
    state: Manifest = EMPTY,
    **job_spec: Any,
) -> list[Manifest]:
    """Two nodes, and a runtime of its own."""
    step: Manifest = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": {"spec": pod("node", script, state, restartPolicy="Never")}, **job_spec},
        },
    }
    jobset: Manifest = {"replicatedJobs": [step], **({"failurePolicy": failure_policy} if failure_policy else {})}
    api = "trainer.kubeflow.org/v1alpha1"
    runtime = {
        "apiVersion": api,
        "kind": "TrainingRuntime",
        "metadata": {"name": "kit"},
        "spec": {"mlPolicy": {"numNodes": 2, "torch": {}}, "template": {"spec": jobset}},
    }
    spec: Manifest = {"runtimeRef": {"name": "kit", "kind": "TrainingRuntime"}}
    if trainer is not None:
        spec["trainer"] = trainer
    return [{"apiVersion": api, "kind": "TrainJob", "metadata": {"name": "job"}, "spec": spec}, runtime]
