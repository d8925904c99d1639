"""The manifests in k8s/ and what the launcher makes of them, before any API server sees them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import DIGITS, ROOT
from tests.jobs import SHORT, TRAINER, command
from trainer.errors import ConfigError
from trainer.image import pinned
from trainer.launch import manifests
from trainer.launch.job import plan
from trainer.launch.lint import lint
from trainer.launch.plan import Submission
from trainer.settings import load_config

KINDS = ["pytorchjob", "trainjob", "indexed-job"]


def rendered(*settings: str, name: str = "job", folder: str = "/nowhere") -> list[dict[str, Any]]:
    config = load_config(DIGITS, "backend=kubernetes", f"run_dir={folder}/{name}", *settings)
    return list(yaml.safe_load_all(plan(Submission([config])).text()))


def of_kind(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def pods(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [template["spec"] for template in manifests._templates(documents)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_files_are_right_by_default(kind: str) -> None:
    documents = manifests.read(ROOT / "k8s" / f"{kind}.yaml")
    specs = pods(documents)
    assert specs and all(spec == {**specs[0], "hostname": spec.get("hostname")} or spec == specs[0] for spec in specs)
    for spec in specs:
        (container,) = spec["containers"]
        assert container["image"] == pinned().built and container["args"] == ["trainer", "node", "/etc/ddp/config.yaml"]
        assert "command" not in container, "the image's entrypoint stays"
        assert container["securityContext"]["readOnlyRootFilesystem"] and container["securityContext"]["capabilities"] == {
            "drop": ["ALL"]
        }
        assert spec["securityContext"]["runAsNonRoot"] and spec["automountServiceAccountToken"] is False
        assert spec["terminationGracePeriodSeconds"] > load_config(DIGITS).watch.stop_seconds
        (shm,) = [volume for volume in spec["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory" and shm["emptyDir"]["sizeLimit"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    text = of_kind(documents, "ConfigMap")["data"]["config.yaml"]
    config = load_config_text(text)
    assert config.resources.nodes == 2 and config.folder == "/workspace/runs/ddp"


def load_config_text(text: str) -> Any:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.yaml").write_text(text)
        return load_config(Path(folder) / "config.yaml")


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_patched_into_them(kind: str) -> None:
    settings = ["resources.nodes=4", "resources.gpus_per_node=8", "training.batch_size=64", "training.device=auto"]
    kubernetes = {"kind": kind, "volume": "team", "shm_gb": 16, "max_restarts": 2, "queue": "team-a", "priority_class": "low"}
    kubernetes |= {
        "rdma_resource": "rdma/hca",
        "node_selector": {"gpu": "h100"},
        "secrets": ["wandb"],
        "image_pull_secrets": ["reg"],
    }
    container = {"image": "registry.example.com/kit:1", "env": {"WANDB_MODE": "offline"}}
    documents = rendered(*settings, f"kubernetes={kubernetes}", f"container={container}", "resources.memory_gb_per_node=512")
    for spec in pods(documents):
        (node,) = spec["containers"]
        assert node["image"] == "registry.example.com/kit:1" and node["envFrom"] == [{"secretRef": {"name": "wandb"}}]
        assert {"name": "WANDB_MODE", "value": "offline"} in node["env"]
        assert node["resources"]["limits"] == {"memory": "512G", "nvidia.com/gpu": 8, "rdma/hca": 1}
        assert node["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert spec["nodeSelector"] == {"gpu": "h100"} and spec["imagePullSecrets"] == [{"name": "reg"}]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert (
            volumes["runs"]["persistentVolumeClaim"]["claimName"] == "team" and volumes["shm"]["emptyDir"]["sizeLimit"] == "16G"
        )
        assert volumes["config"]["configMap"]["name"] == "job"
        (wish,) = spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert wish["preference"]["matchExpressions"][0]["values"] == ["579"]
    job = of_kind(documents, manifests.JOBS[kind])
    assert job["metadata"]["name"] == "job" and job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] == "low"
    config = load_config_text(of_kind(documents, "ConfigMap")["data"]["config.yaml"])
    assert config.resources.nodes == 4 and config.folder == "/workspace/runs/job"


def test_the_three_kinds_say_nodes_and_restarts_in_their_own_way() -> None:
    settings = ["resources.nodes=3", "resources.ranks_per_node=2", "training.batch_size=36", "kubernetes.max_restarts=5"]
    job = of_kind(rendered(*settings), "PyTorchJob")["spec"]
    assert (job["nprocPerNode"], job["runPolicy"]["backoffLimit"]) == ("2", 16)
    assert [replica["replicas"] for replica in job["pytorchReplicaSpecs"].values()] == [1, 2]
    documents = rendered(*settings, "kubernetes.kind=trainjob")
    assert of_kind(documents, "TrainJob")["spec"]["trainer"] == {"numNodes": 3, "numProcPerNode": 2}
    runtime = of_kind(documents, "TrainingRuntime")["spec"]
    assert runtime["mlPolicy"]["numNodes"] == 3 and runtime["template"]["spec"]["failurePolicy"]["maxRestarts"] == 5
    documents = rendered(*settings, "kubernetes.kind=indexed-job")
    job = of_kind(documents, "Job")["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (3, 3, 15)
    env = {variable["name"]: variable.get("value") for variable in job["template"]["spec"]["containers"][0]["env"]}
    assert (env["PET_NNODES"], env["PET_NPROC_PER_NODE"], env["PET_MASTER_ADDR"]) == ("3", "2", "job-0.job")
    assert job["template"]["spec"]["subdomain"] == of_kind(documents, "Service")["metadata"]["name"] == "job"


def test_one_node_needs_no_worker() -> None:
    job = of_kind(rendered("kubernetes.gang=true"), "PyTorchJob")["spec"]
    assert list(job["pytorchReplicaSpecs"]) == ["Master"] and job["runPolicy"]["schedulingPolicy"] == {"minAvailable": 1}


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("j" * 55, ["resources.nodes=12", "training.batch_size=48"], "worker-11, 65 characters of 63; choose a shorter name"),
        ("j" * 50, ["kubernetes.kind=trainjob"], "-node-0-0-abcde, 65 characters of 63"),
        ("a.b", [], "name=a.b: Kubernetes wants small letters"),
        ("1st", [], "name=1st: Kubernetes wants small letters"),
        ("job", ["container.mounts=['/a:/b']"], "container.mounts=['/a:/b']: pods do not see the host's folders"),
        (
            "job",
            ["kubernetes.gang=true", "kubernetes.kind=trainjob"],
            "kubernetes.gang=true: is for kubernetes.kind=pytorchjob, not trainjob",
        ),
        ("job", ["kubernetes.manifest=/nowhere.yaml"], "kubernetes.manifest=/nowhere.yaml: "),
        ("job", [f"entrypoint_args=['{'x' * (1 << 20)}']", "entrypoint=a.py"], "bytes are more than a ConfigMap may hold"),
    ],
)
def test_what_kubernetes_would_take_and_never_start_is_refused(name: str, settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        rendered(*settings, name=name)
    assert words in str(error.value) and len(str(error.value).splitlines()) == 1


def test_a_manifest_of_ones_own_is_patched(folder: Path) -> None:
    text = (ROOT / "k8s" / "pytorchjob.yaml").read_text().replace('cpu: "2"', 'cpu: "7"')
    (folder / "own.yaml").write_text(text)
    for spec in pods(rendered(f"kubernetes.manifest={folder / 'own.yaml'}".replace("'", "''").replace("=", "='", 1) + "'")):
        assert spec["containers"][0]["resources"]["requests"]["cpu"] == "7"
    (folder / "own.yaml").write_text("kind: Job\n")
    with pytest.raises(ConfigError, match="has 0 of PyTorchJob instead of one"):
        rendered("kubernetes.manifest='" + str(folder / "own.yaml").replace("'", "''") + "'")


@pytest.mark.k8s
@pytest.mark.skipif(not shutil.which("kubectl"), reason="not installed: kubectl")
@pytest.mark.parametrize("overlay", ["k8s", "configs/kustomize"])
def test_kustomize_leaves_no_name_that_nobody_has(overlay: str, folder: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", str(ROOT / overlay)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents = list(yaml.safe_load_all(done.stdout))
    config = of_kind(documents, "ConfigMap")
    assert config["metadata"]["name"] == ("ddp" if overlay == "k8s" else "ddp-large")
    for spec in pods(documents):
        (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "config"]
        assert volume["configMap"]["name"] == config["metadata"]["name"]
        assert spec["containers"][0]["args"] == ["trainer", "node", "/etc/ddp/config.yaml"], "no patch has replaced the container"
    nodes = sum(replica["replicas"] for replica in of_kind(documents, "PyTorchJob")["spec"]["pytorchReplicaSpecs"].values())
    assert load_config_text(config["data"]["config.yaml"]).resources.nodes == nodes
    (folder / "all.yaml").write_text(done.stdout)
    assert lint([folder / "all.yaml"]) == []


def test_render_prints_what_kubectl_reads_and_nothing_else(folder: Path) -> None:
    code, output = command(*TRAINER, "render", *SHORT, "backend=kubernetes", cwd=folder)
    kinds = [document["kind"] for document in yaml.safe_load_all(output)]
    assert code == 0 and kinds == ["ConfigMap", "PyTorchJob"] and "# command: kubectl --namespace default apply" in output
    assert not list(folder.iterdir())


def test_without_kubectl_it_says_so(folder: Path) -> None:
    code, output = command(*TRAINER, "submit", *SHORT, "backend=kubernetes", cwd=folder, PATH="/nowhere")
    assert (
        code == 2
        and output == "error: backend=kubernetes: no kubectl on PATH; install it, or render the manifest and apply it elsewhere\n"
    )
