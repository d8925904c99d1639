"""What kubectl asks an API server about itself before it does anything: versions, kinds, and that it validates fields."""

from __future__ import annotations

from typing import Any, NamedTuple

Document = dict[str, Any]


class Resource(NamedTuple):
    """One kind of object and the word for it in paths."""

    name: str
    kind: str
    namespaced: bool = True
    short_names: tuple[str, ...] = ()


RESOURCES = {
    "v1": [
        Resource("pods", "Pod", short_names=("po",)),
        Resource("services", "Service", short_names=("svc",)),
        Resource("configmaps", "ConfigMap", short_names=("cm",)),
        Resource("secrets", "Secret"),
        Resource("events", "Event", short_names=("ev",)),
        Resource("namespaces", "Namespace", namespaced=False, short_names=("ns",)),
        Resource("nodes", "Node", namespaced=False),
        Resource("persistentvolumeclaims", "PersistentVolumeClaim", short_names=("pvc",)),
        Resource("serviceaccounts", "ServiceAccount"),
    ],
    "batch/v1": [Resource("jobs", "Job")],
    "kubeflow.org/v1": [Resource("pytorchjobs", "PyTorchJob")],
    "trainer.kubeflow.org/v1alpha1": [
        Resource("trainjobs", "TrainJob"),
        Resource("trainingruntimes", "TrainingRuntime"),
        Resource("clustertrainingruntimes", "ClusterTrainingRuntime", namespaced=False),
    ],
    "jobset.x-k8s.io/v1alpha2": [Resource("jobsets", "JobSet")],
    "kueue.x-k8s.io/v1beta1": [Resource("localqueues", "LocalQueue")],
}
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_VERSION = {"major": "1", "minor": "32", "gitVersion": "v1.32.4", "platform": "linux/amd64"}


def prefix(version: str) -> str:
    """/api/v1 or /apis/GROUP/VERSION."""
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def document(path: str) -> Document | None:
    """The answer to a question about the server itself; None if the path is of another kind."""
    if path == "/version":
        return _VERSION
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        return _groups()
    if path == "/openapi/v3":
        paths = {prefix(version)[1:]: {"serverRelativeURL": f"/openapi/v3{prefix(version)}?hash=1"} for version in RESOURCES}
        return {"paths": paths}
    for version in RESOURCES:
        if path == prefix(version):
            return _resources(version)
        if path == f"/openapi/v3{prefix(version)}":
            return _openapi(version)
    return None


def _groups() -> Document:
    groups = []
    for version in RESOURCES:
        group, _, number = version.rpartition("/")
        if group:
            one = {"groupVersion": version, "version": number}
            groups.append({"name": group, "versions": [one], "preferredVersion": one})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


def _resources(version: str) -> Document:
    resources = [
        {
            "name": resource.name,
            "singularName": resource.kind.lower(),
            "namespaced": resource.namespaced,
            "kind": resource.kind,
            "verbs": _VERBS,
            "shortNames": list(resource.short_names),
        }
        for resource in RESOURCES[version]
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _openapi(version: str) -> Document:
    """Just enough for kubectl to see that the server takes fieldValidation: then it checks nothing itself and sends Strict."""
    group, _, number = version.rpartition("/")
    names = ("dryRun", "fieldManager", "fieldValidation")
    parameters = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in names]
    paths: Document = {}
    for resource in RESOURCES[version]:
        operation = {
            "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": resource.kind},
            "parameters": parameters,
            "responses": {"200": {"description": "OK"}},
        }
        base = f"{prefix(version)}{'/namespaces/{namespace}' if resource.namespaced else ''}/{resource.name}"
        paths[base] = {"post": operation | {"x-kubernetes-action": "post"}}
        paths[f"{base}/{{name}}"] = {verb: operation | {"x-kubernetes-action": verb} for verb in ("patch", "put")}
    info = {"title": "lab", "version": str(_VERSION["gitVersion"])}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": {}}}
