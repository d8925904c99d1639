"""Manifests held against schemas and rules, and the real kubectl on the lab's API server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.kube_jobs import IMAGE, indexed_job, pytorchjob, trainjob
from tests.lab.kube import schema
from tests.lab.kube.api import KubeApi

pytestmark = pytest.mark.k8s

needs_schema = pytest.mark.skipif(bool(schema.missing()), reason=schema.missing() or "-")
needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")


@needs_schema
@pytest.mark.parametrize("crds", [True, False], ids=["crds", "models"])
def test_an_unknown_field_is_an_error_with_its_path(crds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if crds and not schema.CRDS.is_dir():
        pytest.skip(f"{schema.CRDS} is not there")
    if not crds:
        monkeypatch.setattr(schema, "CRDS", Path("/nowhere"))
        if schema.missing():
            pytest.skip(schema.missing())
    job = pytorchjob("true", "true", backoffLimit=3)
    assert schema.check(job) == []
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["replicaCount"] = 2
    worker["template"]["spec"]["containers"][0]["enviroment"] = []
    job["spec"]["nprocPerNode"] = 2
    told = schema.check(job)
    assert "spec.pytorchReplicaSpecs.Worker.replicaCount: unknown field" in told
    assert "spec.pytorchReplicaSpecs.Worker.template.spec.containers.0.enviroment: unknown field" in told
    assert any(line.startswith("spec.nprocPerNode: ") for line in told) and len(told) == 3


@needs_schema
def test_rules_that_no_schema_has() -> None:
    job = pytorchjob("true", "true", policy="onFailure")
    del job["spec"]["pytorchReplicaSpecs"]["Master"]["replicas"]
    job["metadata"]["name"] = "j" * 60
    told = "\n".join(schema.check(job))
    assert "Master.replicas: must be written out" in told and "'onFailure' (admitted" in told and "more than 63" in told
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [1]}}]
    indexed, service = indexed_job("true", policy="OnFailure", podFailurePolicy={"rules": rules})
    assert schema.check(indexed) == ["spec.podFailurePolicy: needs restartPolicy Never"] and schema.check(service) == []
    if schema.CRDS.is_dir():
        reserved = {"numNodes": 2, "env": [{"name": "PET_NNODES", "value": "1"}]}
        train, runtime = trainjob("true", trainer=reserved)
        assert schema.check(train) == ["spec.trainer.env: PET_NNODES is reserved"] and schema.check(runtime) == []


@pytest.fixture
def api() -> Iterator[KubeApi]:
    with KubeApi() as server:
        yield server


def kubectl(api: KubeApi, *argv: str, stdin: object = None) -> subprocess.CompletedProcess[str]:
    given = None if stdin is None else yaml.safe_dump(stdin)
    return subprocess.run(
        ["kubectl", *argv], env={**os.environ, **api.environ}, input=given, capture_output=True, text=True, timeout=60
    )


@needs_kubectl
@needs_schema
def test_kubectl_applies_gets_and_deletes(api: KubeApi) -> None:
    job = pytorchjob("true", "true", backoffLimit=3)
    assert "job created" in kubectl(api, "apply", "-f", "-", stdin=job).stdout
    assert "unchanged" in kubectl(api, "apply", "-f", "-", stdin=job).stdout
    job["spec"]["runPolicy"]["backoffLimit"] = 4
    assert "configured" in kubectl(api, "apply", "-f", "-", stdin=job).stdout
    stored = api.find("PyTorchJob", "job")
    assert stored and stored["spec"]["runPolicy"] == {"backoffLimit": 4}
    told = json.loads(kubectl(api, "get", "pytorchjobs", "-o", "json").stdout)
    assert [item["spec"]["runPolicy"]["backoffLimit"] for item in told["items"]] == [4]
    assert kubectl(api, "delete", "pytorchjob", "job").returncode == 0
    assert "NotFound" in kubectl(api, "get", "pytorchjob", "job").stderr
    assert [request.code for request in api.requests if request.verb in ("POST", "PATCH", "DELETE")] == [201, 200, 200]


@needs_kubectl
@needs_schema
def test_kubectl_is_refused_what_is_invalid(api: KubeApi) -> None:
    good, bad = pytorchjob("true"), pytorchjob("true", backofLimit=3)
    done = kubectl(api, "apply", "-f", "-", stdin=bad)
    assert done.returncode == 1 and "spec.runPolicy.backofLimit: unknown field" in done.stderr
    assert kubectl(api, "apply", "--dry-run=server", "-f", "-", stdin=good).returncode == 0
    assert not api.objects and [request.code for request in api.requests if request.verb == "POST"] == [422, 201]


@needs_kubectl
def test_kubectl_finds_what_a_test_has_put_there(api: KubeApi) -> None:
    labels = {"training.kubeflow.org/job-name": "job"}
    spec = {"containers": [{"name": "pytorch", "image": IMAGE}]}
    for name, of in (("job-master-0", labels), ("other", {})):
        api.add(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": name, "labels": of},
                "spec": spec,
                "status": {"phase": "Failed"},
            }
        )
        api.add_log(name, f"log of {name}\n")
    about = {"kind": "Pod", "name": "job-master-0"}
    api.add({"apiVersion": "v1", "kind": "Event", "metadata": {"name": "e"}, "involvedObject": about, "reason": "FailedMount"})
    selector = "training.kubeflow.org/job-name=job"
    told = json.loads(kubectl(api, "get", "pods", "-l", selector, "-o", "json").stdout)
    assert [(item["metadata"]["name"], item["status"]["phase"]) for item in told["items"]] == [("job-master-0", "Failed")]
    assert kubectl(api, "logs", "-l", selector, "--tail=-1").stdout == "log of job-master-0\n"
    field = "involvedObject.name=job-master-0"
    assert kubectl(api, "get", "events", f"--field-selector={field}", "-o", "jsonpath={.items[*].reason}").stdout == "FailedMount"
