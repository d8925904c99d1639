"""`trainer lint`: good manifests of every kind pass in silence, and each seeded mistake is told at its field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from trainer.launch.lint import lint

VOLUME = ROOT / "k8s" / "volume.yaml"
CASES = ROOT / "tests" / "cases" / "lint"
NAMES = ["pytorchjob", "trainjob", "indexed-job"]
GONE = object()
INDEX = "metadata.labels['batch.kubernetes.io/job-completion-index']"


def documents(name: str) -> list[Any]:
    """A good base; copied through JSON, so that what YAML aliases share is not shared."""
    loaded = yaml.safe_load_all((CASES / f"{name}.yaml").read_text())
    return json.loads(json.dumps(list(loaded)))  # type: ignore[no-any-return]


def steps(path: str) -> list[str | int]:
    """`a.b[0][x.y/z].c` as keys and indexes."""
    found = re.findall(r"\[([^]]+)\]|([^.\[\]]+)", path)
    return [int(inside) if inside.isdecimal() else inside or plain for inside, plain in found]


def change(document: Any, path: str, value: Any) -> None:
    *above, last = steps(path)
    for step in above:
        document = document.setdefault(step, {}) if isinstance(document, dict) else document[step]
    if value is GONE:
        del document[last]
    elif isinstance(document, list) and last == len(document):
        document.append(value)
    else:
        document[last] = value


def run(folder: Path, *documents: Any) -> list[str]:
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    return lint([file])


def mutated(folder: Path, base: str, kind: str, changes: dict[str, Any]) -> list[str]:
    found = documents(base)
    target = next(d for d in found if d["kind"] == kind)
    for path, value in changes.items():
        change(target, path, value)
    return run(folder, *found)


M = "spec.pytorchReplicaSpecs.Master"
W = "spec.pytorchReplicaSpecs.Worker"
MS, WS = f"{M}.template.spec", f"{W}.template.spec"
MC, WC = f"{MS}.containers[0]", f"{WS}.containers[0]"
S = "spec.template.spec"
C = f"{S}.containers[0]"
R = "spec.template.spec.replicatedJobs[0].template"
RS = f"{R}.spec.template.spec"
RC = f"{RS}.containers[0]"
TORCHRUN = ["torchrun", "train.py"]
LONG = "n" * 53

PYTORCHJOB = [  # changes, the field that must be named ("" = the first one changed), a word of the line
    ({f"{MC}.volumeMounts[0].mountPath": "/scratch"}, f"{MC}.volumeMounts", "64 MiB"),
    ({f"{MS}.volumes[0].emptyDir": {}}, f"{MS}.volumes[0].emptyDir.medium", "disk"),
    ({f"{MS}.volumes[0].emptyDir.sizeLimit": "64Mi"}, "", "64 MiB"),
    ({"spec.nprocPerNode": "4", f"{MC}.args": TORCHRUN, f"{WC}.args": TORCHRUN}, "", "GPUs of container"),
    ({"spec.nprocPerNode": "16"}, "", "GPUs of container"),
    ({"spec.nprocPerNode": "3"}, "", "GPUs of container"),
    ({"spec.nprocPerNode": 8}, "", "string"),
    ({"spec.nprocPerNode": "all"}, "", "number of processes"),
    ({"spec.nprocPerNode": GONE, f"{MC}.args": TORCHRUN, f"{MC}.resources": {}}, "spec.nprocPerNode", "each CPU"),
    ({f"{MC}.args": ["python", "train.py"]}, f"{MC}.command", "WORLD_SIZE"),
    ({f"{M}.restartPolicy": "ExitCode", f"{MC}.args": TORCHRUN}, f"{M}.restartPolicy", "final"),
    ({f"{M}.restartPolicy": "ExitCode", f"{W}.restartPolicy": "ExitCode"}, "spec.runPolicy.backoffLimit", "ignored"),
    ({f"{W}.restartPolicy": "onFailure"}, "", "none of"),
    ({f"{M}.restartPolicy": "Always"}, "", "never succeeds"),
    ({f"{MS}.restartPolicy": "Never"}, "", "overwritten"),
    ({"spec.runPolicy.backoffLimit": 2}, "", "less than one restart"),
    ({"spec.runPolicy.backoffLimit": GONE}, "", "for ever"),
    ({f"{MC}.command": ["sh", "-c", "cd /src; trainer node c.yaml"], f"{MC}.args": GONE}, f"{MC}.command[2]", "SIGTERM"),
    ({f"{MC}.command": ["/bin/bash", "-ec"], f"{MC}.args": ["exec true && trainer node c.yaml"]}, f"{MC}.args[0]", "exec"),
    ({f"{MC}.command": ["bash", "-lc", "set -e\nexport A=1\ntorchrun \\\n  train.py\n# end\n"], f"{MC}.args": GONE}, f"{MC}.command[2]", "SIGTERM"),
    ({f"{MS}.terminationGracePeriodSeconds": GONE}, "", "30 seconds"),
    ({f"{WS}.terminationGracePeriodSeconds": 45}, "", "45 seconds"),
    ({f"{M}.template.metadata.labels[sidecar.istio.io/inject]": "true"}, "", "proxy"),
    ({f"{M}.template.metadata.annotations[sidecar.istio.io/inject]": "true"}, "", "proxy"),
    ({f"{M}.template.metadata.annotations[linkerd.io/inject]": "enabled"}, "", "disabled"),
    ({f"{MC}.name": "trainer"}, f"{MS}.containers", "named pytorch"),
    ({f"{MC}.env[1]": {"name": "MASTER_ADDR", "value": "me"}}, f"{MC}.env[1].name", "controller sets it"),
    ({f"{MC}.env[1]": {"name": "PET_NPROC_PER_NODE", "value": "4"}}, f"{MC}.env[1].name", "controller sets it"),
    ({f"{WC}.env[1]": {"name": "RANK", "value": "1"}}, f"{WC}.env[1].name", "controller sets it"),
    ({f"{WC}.env[1]": {"name": "TAG", "value": "r$(RANK)"}}, f"{WC}.env[1].value", "stays as it is"),
    ({"metadata.name": LONG + "ab"}, "metadata.name", "shorten the name by 1"),
    ({"metadata.name": LONG, f"{W}.replicas": 101, "spec.runPolicy.backoffLimit": 999}, "metadata.name", "worker-100"),
    ({"metadata.name": "my.job"}, "", "DNS label"),
    ({"metadata.name": "7b"}, "", "DNS label"),
    ({"metadata.name": "Job"}, "", "DNS label"),
    ({f"{M}.replicas": GONE}, "", "written out"),
    ({f"{M}.replicas": 2}, "", "one Master"),
    ({f"{W}.replicas": 0}, "", "no pods"),
    ({"spec.pytorchReplicaSpecs.Chief": {"template": {}}}, "", "replica type"),
    ({"spec.runPolicy.cleanPodPolicy": "None"}, "", "left running"),
    ({"spec.runPolicy.cleanPodPolicy": GONE}, "", "left running"),
    ({"spec.elasticPolicy": {"nProcPerNode": 8}}, "spec.elasticPolicy.nProcPerNode", "twice"),
    ({"spec.elasticPolicy": {"maxReplicas": 4}}, "spec.elasticPolicy", "fixed number"),
    ({"spec.elasticPolicy": {"maxReplicas": 4}, f"{MC}.args": TORCHRUN}, "spec.elasticPolicy", "Master too"),
    ({"spec.elasticPolicy": {"maxReplicas": 4}, W: GONE}, "spec.elasticPolicy", "needs Worker"),
    ({M: GONE, f"{W}.replicas": 2}, M, "no pod gets MASTER_ADDR"),
    ({"metadata.labels": {}}, "spec.runPolicy.suspend", "no queue"),
    ({"spec.runPolicy.activeDeadlineSeconds": 300}, "", "restarts included"),
    ({f"{MS}.activeDeadlineSeconds": 3600}, "", "own clock"),
    ({f"{MS}.hostNetwork": True}, f"{MS}.dnsPolicy", "ClusterFirstWithHostNet"),
    ({f"{MS}.hostIPC": True}, "", "/dev/shm"),
    ({f"{MC}.securityContext.privileged": True}, "", "every GPU"),
    ({f"{MS}.automountServiceAccountToken": True}, "", "credentials"),
    ({f"{MC}.resources.requests[nvidia.com/gpu]": 4}, "", "limit, which is 8"),
    ({f"{MC}.resources.limits[nvidia.com/gpu]": GONE}, f"{MC}.resources.requests[nvidia.com/gpu]", "without a limit"),
    ({f"{WC}.resources.limits[nvidia.com/gpu]": 4, f"{WC}.resources.requests": {}}, "spec.pytorchReplicaSpecs", "different numbers"),
    ({f"{MC}.image": "ghcr.io/example/ddp-job-kit"}, "", "tag"),
    ({f"{MC}.image": "localhost:5000/ddp-job-kit"}, "", "tag"),
    ({f"{WC}.image": "ddp-job-kit:latest"}, "", "tag"),
    ({f"{MC}.volumeMounts[1].name": "run"}, "", "no such volume"),
    ({f"{MS}.volumes[2].configMap.name": "ddp-config-7h2k"}, "", "no such ConfigMap"),
    ({f"{MS}.volumes[2].configMap.items[0].key": "config.yml"}, "", "no such key"),
    ({f"{MC}.env[1]": {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "other", "key": "a"}}}}, f"{MC}.env[1].valueFrom.configMapKeyRef.name", "no such ConfigMap"),
    ({f"{MC}.envFrom": [{"configMapRef": {"name": "other"}}]}, f"{MC}.envFrom[0].configMapRef.name", "no such ConfigMap"),
    ({f"{MS}.volumes[1]": {"name": "runs", "emptyDir": {}}}, f"{MC}.volumeMounts[1].mountPath", "lost"),
    ({f"{MC}.volumeMounts[1].mountPath": "/data"}, f"{MC}.volumeMounts", "no volume on /workspace/runs/ddp"),
    ({f"{MC}.args": ["torchrun", "--nnodes", "4", "train.py"]}, f"{MC}.args[2]", "makes 2 pods"),
    ({f"{MC}.args": ["torchrun", "--nproc_per_node=4", "train.py"]}, f"{MC}.args[1]", "contradicts"),
    ({f"{MC}.args": ["torchrun", "--master-addr=localhost", "train.py"]}, f"{MC}.args[1]", "talk to itself"),
    ({f"{MC}.args": ["torchrun", "--master-addr", "old-master-0", "train.py"]}, f"{MC}.args[2]", "write ddp-master-0"),
    ({f"{MC}.args": ["torchrun", "--rdzv-endpoint=127.0.0.1:29400", "train.py"]}, f"{MC}.args[1]", "talk to itself"),
    ({f"{WC}.args": ["torchrun", "--node_rank=0", "train.py"]}, f"{WC}.args[1]", "--node-rank"),
    ({f"{WC}.args": ["torchrun", "--standalone", "train.py"]}, f"{WC}.args[1]", "alone"),
    ({f"{MC}.args": ["torchrun", "--master-port=29500", "train.py"]}, f"{MC}.args[1]", "23456"),
    ({f"{MC}.command": ["bash", "-c", "exec torchrun --nnodes=3 train.py"], f"{MC}.args": GONE}, f"{MC}.command[2]", "makes 2 pods"),
    ({f"{MC}.ports": [{"name": "board", "containerPort": 23456}]}, f"{MC}.ports[0].containerPort", "MASTER_PORT"),
    ({"apiVersion": "kubeflow.org/v1beta1"}, "", "kubeflow.org/v1"),
]  # fmt: skip
TRAINJOB = [
    ("TrainJob", {"spec.trainer": GONE}, "", "trains alone"),
    ("TrainJob", {"spec.runtimeRef.name": "torch-distributed"}, "", "no TrainingRuntime of this name"),
    ("TrainJob", {"spec.runtimeRef.kind": GONE}, "spec.runtimeRef.name", "the default kind"),
    ("TrainJob", {"spec.trainer.numProcPerNode": "8"}, "", "whole number"),
    ("TrainJob", {"spec.trainer.numProcPerNode": 16}, "", "GPUs of container"),
    ("TrainJob", {"spec.trainer.env[0]": {"name": "PET_NNODES", "value": "2"}}, "spec.trainer.env[0].name", "reserved"),
    ("TrainJob", {"spec.trainer.env[0]": {"name": "RANK", "value": "0"}}, "spec.trainer.env[0].value", "same on all 2"),
    ("TrainJob", {"spec.trainer.image": "ddp:latest"}, "", "tag"),
    ("TrainJob", {"spec.trainer.command": ["sh", "-c", "trainer node c.yaml"]}, "spec.trainer.command[2]", "SIGTERM"),
    ("TrainJob", {"spec.trainer.command": ["python", "a.py"], "spec.trainer.args": ["--lr=1"]}, "spec.trainer.command", "PET_"),
    ("TrainJob", {"spec.trainer.args": ["torchrun", "--nnodes=4", "a.py"]}, "spec.trainer.args[1]", "makes 2 pods"),
    ("TrainJob", {"spec.trainer.args": ["torchrun", "--master_addr=ddp-node-0-1.ddp", "a.py"]}, "spec.trainer.args[1]", "ddp-node-0-0.ddp"),
    ("TrainJob", {"spec.trainer.resourcesPerNode": {"limits": {"nvidia.com/gpu": 4}}}, "spec.trainer.numProcPerNode", "GPUs of container node, 4"),
    ("TrainJob", {"metadata.name": "n" * 49}, "metadata.name", "node-0-1-abcde"),
    ("TrainJob", {"spec.suspend": True}, "", "no queue"),
    ("TrainingRuntime", {f"{R}.metadata.labels": {}}, f"{R}.metadata.labels[trainer.kubeflow.org/trainjob-ancestor-step]", "label"),
    ("TrainingRuntime", {f"{RC}.name": "trainer"}, f"{RS}.containers", "named node"),
    ("TrainingRuntime", {"spec.mlPolicy.torch": GONE}, "", "PET_"),
    ("TrainingRuntime", {"spec.template.spec.replicatedJobs": []}, "", "no job that trains"),
    ("TrainingRuntime", {f"{R}.spec.backoffLimit": 1, "spec.template.spec.failurePolicy": {}}, "", "less than one restart"),
    ("TrainingRuntime", {f"{RC}.volumeMounts[0].mountPath": "/x"}, f"{RC}.volumeMounts", "64 MiB"),
    ("TrainingRuntime", {f"{RC}.env": [{"name": "PET_MASTER_PORT", "value": "1"}]}, f"{RC}.env[0].name", "its value wins"),
    ("TrainingRuntime", {f"{RS}.restartPolicy": "never"}, "", "none of"),
    ("TrainingRuntime", {f"{RS}.containers[1]": {"name": "board", "image": "x:1", "ports": [{"containerPort": 29500}]}}, f"{RS}.containers[1].ports[0].containerPort", "MASTER_PORT"),
]  # fmt: skip
INDEXED = [
    ("Job", {"spec.completionMode": GONE}, "", "no index"),
    ("Job", {"spec.parallelism": 1}, "", "at once"),
    ("Job", {"spec.completions": GONE}, "spec.parallelism", "completions missing"),
    ("Job", {f"{S}.subdomain": GONE}, "", "no DNS names"),
    ("Job", {f"{S}.subdomain": "dpp"}, "", "no Service"),
    ("Job", {"metadata.namespace": "ml"}, f"{S}.subdomain", "namespace default"),
    ("Service", {"spec.clusterIP": GONE}, "", "headless"),
    ("Service", {"spec.publishNotReadyAddresses": GONE}, "", "ready"),
    ("Service", {"spec.selector": {"app": "ddp"}}, "spec.selector.app", "no pod"),
    ("Service", {"spec.selector": {"batch.kubernetes.io/job-name": "dpp"}}, "spec.selector[batch.kubernetes.io/job-name]", "no pod"),
    ("Service", {"spec.selector": GONE}, "", "selects no pods"),
    ("Job", {"spec.backoffLimit": 1}, "", "less than one restart"),
    ("Job", {"spec.backoffLimit": GONE, "spec.completions": 8, "spec.parallelism": 8}, "", "6 by default"),
    ("Job", {f"{S}.restartPolicy": GONE}, "", "Never or OnFailure"),
    ("Job", {f"{S}.restartPolicy": "ExitCode"}, "", "none of"),
    ("Job", {"spec.activeDeadlineSeconds": 60}, "", "restarts included"),
    ("Job", {"spec.suspend": True}, "", "no queue"),
    ("Job", {"metadata.name": "n" * 62}, "metadata.name", "shorten"),
    ("Job", {f"{C}.env[0].value": "4"}, "", "2 pods"),
    ("Job", {f"{C}.env[1].value": "4", f"{C}.args": TORCHRUN}, f"{C}.env[1].value", "GPUs of container"),
    ("Job", {f"{C}.env[2]": {"name": "PET_NODE_RANK", "value": "0"}}, f"{C}.env[2].value", "same on all 2"),
    ("Job", {f"{C}.env[2]": {"name": "PET_NODE_RANK", "value": "$(JOB_COMPLETION_INDEX)"}}, f"{C}.env[2].value", "stays as it is"),
    ("Job", {f"{C}.env[2].name": "NODE"}, f"{C}.env", "PET_NODE_RANK"),
    ("Job", {f"{C}.env[3].value": "localhost"}, "", "talk to itself"),
    ("Job", {f"{C}.env[3].value": "ddp-0"}, "", "not node 0's name"),
    ("Job", {f"{C}.env[3].value": "ddp"}, "", "ddp-0.ddp"),
    ("Job", {f"{C}.env[3].value": "old-0.ddp"}, "", "ddp-0.ddp"),
    ("Job", {f"{C}.env[3].value": "ddp-1.ddp"}, "", "ddp-0.ddp"),
    ("Job", {f"{C}.env[4].value": "tcp://10.0.0.1:80"}, "", "no port"),
    ("Job", {f"{C}.env[5]": {"name": "JOB_COMPLETION_INDEX", "value": "0"}}, f"{C}.env[5].value", "same on every pod"),
    ("Job", {f"{C}.env[5]": {"name": "WORLD_SIZE", "value": "1"}}, f"{C}.env[5].value", "does not fit"),
    ("Job", {f"{C}.args": ["torchrun", "--node-rank=0", "a.py"]}, f"{C}.args[1]", "--node-rank"),
    ("Job", {f"{C}.args": ["python", "-m", "torch.distributed.run", "--nnodes=3", "a.py"]}, f"{C}.args[3]", "makes 2 pods"),
    ("Job", {f"{C}.args": TORCHRUN, f"{C}.env[1].name": "A"}, f"{C}.args", "one rank for 8"),
    ("Job", {f"{C}.volumeMounts[1].mountPath": "/workspace", f"{S}.volumes[1]": {"name": "runs", "emptyDir": {}}}, f"{C}.volumeMounts[1].mountPath", "lost"),
    ("Job", {f"{C}.args": ["x"], f"{C}.volumeMounts[1].mountPath": "/ckpt", f"{S}.volumes[1]": {"name": "runs", "emptyDir": {}}}, f"{C}.volumeMounts[1].mountPath", "lost"),
    ("Job", {f"{S}.containers[1]": {"name": "proxy", "image": "x:1", "ports": [{"containerPort": 29500}]}}, f"{S}.containers[1].ports[0].containerPort", "MASTER_PORT"),
    ("PersistentVolumeClaim", {"spec.accessModes": ["ReadWriteOnce"]}, "spec.accessModes[0]", "one machine"),
    ("Service", {"metadata.name": "master", "spec.clusterIP": "10.0.0.9"}, f"Job/ddp: {S}.subdomain", "no Service"),
]  # fmt: skip
SEEDED = [
    *(("pytorchjob", "PyTorchJob", *row) for row in PYTORCHJOB),
    *(("trainjob", *row) for row in TRAINJOB),
    *(("indexed-job", *row) for row in INDEXED),
]


@pytest.mark.parametrize("name", NAMES)
def test_good_manifests_pass_in_silence(name: str) -> None:
    assert lint([CASES / f"{name}.yaml"]) == []


@pytest.mark.parametrize(
    "file", sorted({*(ROOT / "k8s").glob("*.yaml")} - {VOLUME, ROOT / "k8s" / "kustomization.yaml"}), ids=lambda file: file.name
)
def test_the_kits_own_manifests_pass_in_silence(file: Path) -> None:
    assert lint([file]) == []
    assert lint([VOLUME, file]) == []


@pytest.mark.parametrize(("base", "kind", "changes", "path", "word"), SEEDED)
def test_a_mistake_is_told_at_its_field(
    base: str, kind: str, changes: dict[str, Any], path: str, word: str, tmp_path: Path
) -> None:
    path = path or next(iter(changes))
    lines = mutated(tmp_path, base, kind, changes)
    assert [line for line in lines if f": {path}: " in line and word in line], lines
    assert all(re.fullmatch(r"\S+job\.yaml: \w+/\S+: \S+: .+; fix: .+", line) for line in lines), lines
    assert len(lines) <= 6, lines  # one mistake is not told in many words


@pytest.mark.parametrize(
    ("base", "kind", "changes"),
    [
        ("pytorchjob", "PyTorchJob", {f"{W}.replicas": 3}),
        ("pytorchjob", "PyTorchJob", {"spec.runPolicy.backoffLimit": 0}),
        ("pytorchjob", "PyTorchJob", {"spec.runPolicy.backoffLimit": GONE, f"{M}.restartPolicy": "Never", f"{W}.restartPolicy": "Never"}),
        ("pytorchjob", "PyTorchJob", {"spec.runPolicy.backoffLimit": GONE, f"{M}.restartPolicy": "ExitCode", f"{W}.restartPolicy": "ExitCode"}),
        ("pytorchjob", "PyTorchJob", {"spec.nprocPerNode": "4"}),  # two devices a rank
        ("pytorchjob", "PyTorchJob", {"spec.nprocPerNode": GONE, f"{MC}.args": TORCHRUN, f"{WC}.args": TORCHRUN}),
        ("pytorchjob", "PyTorchJob", {f"{MC}.command": ["bash", "-c"], f"{MC}.args": ["ulimit -l unlimited && exec trainer node c.yaml"]}),
        ("pytorchjob", "PyTorchJob", {f"{MC}.command": ["sh", "-c", "FOO=1 exec trainer node \\\n  c.yaml\n"], f"{MC}.args": GONE}),
        ("pytorchjob", "PyTorchJob", {f"{MC}.command": ["sh", "-c", 'exec "$@"', "sh"]}),
        ("pytorchjob", "PyTorchJob", {f"{MC}.imagePullPolicy": "Always", f"{MC}.image": "ghcr.io/a/b@sha256:00"}),
        ("pytorchjob", "PyTorchJob", {f"{MS}.hostNetwork": True, f"{MS}.dnsPolicy": "ClusterFirstWithHostNet"}),
        ("pytorchjob", "PyTorchJob", {f"{MC}.args": ["torchrun", "--nnodes=$(PET_NNODES)", "--nproc-per-node=8", "--node-rank=$(RANK)", "--master-addr=$(MASTER_ADDR)", "a.py", "--nnodes=9"]}),
        ("pytorchjob", "PyTorchJob", {f"{MC}.args": ["torchrun", "--master-addr=ddp-master-0.default.svc", "--master-port", "23456", "-m", "a"]}),
        ("pytorchjob", "PyTorchJob", {f"{MC}.ports": [{"name": "pytorchjob-port", "containerPort": 29500}], f"{WC}.ports": []}),
        ("pytorchjob", "PyTorchJob", {f"{MS}.volumes[1]": {"name": "runs", "nfs": {"server": "a", "path": "/b"}}}),
        ("pytorchjob", "PyTorchJob", {f"{MC}.env[1]": {"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}, f"{MC}.env[2]": {"name": "X", "value": "$$(RANK)"}}),
        ("pytorchjob", "PyTorchJob", {"spec.runPolicy.activeDeadlineSeconds": 86400}),
        ("pytorchjob", "PyTorchJob", {f"{MS}.volumes[2].configMap": {"name": "elsewhere", "optional": True}}),
        ("trainjob", "TrainJob", {"spec.trainer.numProcPerNode": GONE}),
        ("trainjob", "TrainJob", {"spec.trainer": {"numNodes": 2}}),
        ("trainjob", "TrainingRuntime", {f"{RC}.image": GONE}),
        ("trainjob", "TrainJob", {"spec.trainer.args": ["torchrun", "a.py"]}),
        ("trainjob", "TrainingRuntime", {"spec.mlPolicy": {"numNodes": 1, "mpi": {}}, f"{R}.metadata.labels": {}}),
        ("indexed-job", "Job", {f"{C}.env[3].value": "ddp-0.ddp.default.svc.cluster.local"}),
        ("indexed-job", "Job", {f"{C}.env[3].value": "10.1.2.3"}),
        ("indexed-job", "Job", {f"{C}.env": [{"name": "A", "value": "1"}], f"{C}.args": ["torchrun", "--nnodes=2", "--nproc-per-node=8", "--node-rank=$(JOB_COMPLETION_INDEX)", "--master-addr=ddp-0.ddp", "a.py"]}),
        ("indexed-job", "Job", {f"{C}.envFrom": [{"configMapRef": {"name": "env"}}], f"{C}.env": []}),
        ("indexed-job", "Job", {"spec.suspend": True, "metadata.labels": {"kueue.x-k8s.io/queue-name": "a"}}),
        ("indexed-job", "Job", {"spec.backoffLimit": 0}),
        ("indexed-job", "Service", {"spec.selector": {"batch.kubernetes.io/job-name": "ddp"}}),
    ],
)  # fmt: skip
def test_what_is_right_is_not_told(base: str, kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    assert mutated(tmp_path, base, kind, changes) == []


def test_a_namespace_that_injects_a_proxy(tmp_path: Path) -> None:
    found = documents("indexed-job")
    found.append(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default", "labels": {"istio-injection": "enabled"}}}
    )
    (line,) = run(tmp_path, *found)
    assert "spec.template.metadata.labels[sidecar.istio.io/inject]" in line
    change(found[2], "spec.template.metadata.labels[sidecar.istio.io/inject]", "false")
    assert run(tmp_path, *found) == []


def test_a_service_named_master_sets_master_port(tmp_path: Path) -> None:
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "master"}, "spec": {"clusterIP": "10.0.0.9"}}
    (line,) = run(tmp_path, *documents("indexed-job"), service)
    assert "Service/master: metadata.name: gives every pod MASTER_PORT=tcp://" in line


def test_a_trainjob_alone_is_not_blamed_for_its_runtime(tmp_path: Path) -> None:
    job = documents("trainjob")[1]
    assert run(tmp_path, job) == []
    del job["spec"]["trainer"]["numProcPerNode"]
    assert run(tmp_path, job) == []


def test_a_runtime_that_the_trainjob_patches_is_not_called_incomplete(tmp_path: Path) -> None:
    runtime, job = documents("trainjob")
    del runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["volumes"]
    assert len(run(tmp_path, runtime, job)) == 3
    job["spec"]["runtimePatches"] = [{"manager": "me"}]
    assert run(tmp_path, runtime, job) == []


def test_files_are_looked_at_together_and_jobs_of_others_are_left_alone(tmp_path: Path) -> None:
    service, claim, job = documents("indexed-job")
    one, two = tmp_path / "service.yaml", tmp_path / "a b.yaml"
    one.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": [service, claim]}))
    other = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "clean"},
        "spec": {"template": {"spec": {"containers": []}}},
    }
    two.write_text(yaml.safe_dump_all([job, other]))
    assert lint([one, two]) == []
    assert lint([two]) == [
        f"{two}: Job/ddp: spec.template.spec.subdomain: no Service of this name in these files (ddp); "
        "fix: add a headless Service with clusterIP: None"
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1", "line 1, column 6: not valid YAML"),
        ("kind: Job\nkind: Job", "line 2, column 1: not valid YAML: the key 'kind' stands twice"),
        ("a: 2026-99-99", "not valid YAML"),
        ("a: !!python/object:os.system x", "not valid YAML"),
        ("[" * 5000, "not valid YAML"),
        ("", "(empty)"),
        ("just text", "(no kind)"),
        ("{kind: MPIJob, metadata: {name: a}}", "no PyTorchJob, TrainJob or Job in it (MPIJob)"),
        ("{kind: Service, apiVersion: v1}", "no job that trains"),
        (b"\xff\xfe", "no UTF-8"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_manifest_gets_one_line(text: str | bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    if text is not None:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
    (line,) = lint([file])
    assert line.startswith(f"{file}: ")
    assert words in line
    assert "; fix: " in line


def test_merge_keys_are_followed(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    text = (CASES / "pytorchjob.yaml").read_text().replace("template: *template", "template:\n        <<: *template")
    file.write_text(text)
    assert lint([file]) == []


def paths(value: Any, above: str = "") -> Iterator[str]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else []
    for key, inside in entries:
        path = f"{above}[{key}]"
        yield path
        yield from paths(inside, path)


@pytest.mark.parametrize("odd", [None, 7, "x", [], {}, [None], {"x": None}, True], ids=repr)
@pytest.mark.parametrize("base", NAMES)
def test_values_of_any_shape_are_survived(base: str, odd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field in turn holds something odd: lines may come, exceptions may not."""
    good = documents(base)
    text = json.dumps(good)
    found: list[Any] = []
    monkeypatch.setattr("trainer.launch.lint._load", lambda file: found)
    for path in paths(good):
        found[:] = json.loads(text)
        change(found, path, odd)
        assert all(line.startswith("job.yaml: ") and "\n" not in line for line in lint([Path("job.yaml")]))
