"""The Kubernetes lab: it makes the pods that real controllers made, restarts them as those do, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.conftest import wait_until
from tests.kube_jobs import ONCE, SHARED, indexed_job, pytorchjob, trainjob
from tests.lab.kube import pods
from tests.lab.kube.controllers import expand
from tests.lab.kube.pods import Emulator, Faults, load
from tests.lab.kube.pytorchjob import services
from tests.lab.kube.workload import Manifest, ManifestError, Pod, quantity

pytestmark = pytest.mark.k8s

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT.parent / "shared" / "lab" / "kubernetes" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"{GOLDEN} is not there")
needs_pods = pytest.mark.skipif(bool(pods.missing()), reason=pods.missing() or "-")


def variables(made: Pod) -> dict[str, str | None]:
    return {variable["name"]: variable.get("value") for variable in made.spec["containers"][0].get("env") or []}


def as_golden(made: Pod, golden: Manifest) -> Manifest:
    """A pod in the shape of the golden file."""
    told: Manifest = {"labels": made.labels, "annotations": made.annotations, "restartPolicy": made.spec["restartPolicy"]}
    told |= {"hostname": made.spec.get("hostname"), "subdomain": made.spec.get("subdomain")}
    for key in ("containers", "initContainers"):
        fields = list(golden[key][0]) if golden.get(key) else []
        told[key] = [
            {f: container.get(f, {} if f == "resources" else None) for f in fields} for container in made.spec.get(key) or []
        ]
    return {key: told[key] for key in golden}


@needs_golden
@pytest.mark.parametrize(
    ("file", "kind"), [("pytorchjob-pods-v1.9.4.json", "PyTorchJob"), ("trainjob-pods-v2.3.json", "TrainJob")]
)
def test_pods_are_those_that_the_real_controllers_made(file: str, kind: str) -> None:
    manifests = load(sorted((GOLDEN / "manifests").glob("*.yaml")))
    runtimes = [manifest for manifest in manifests if manifest["kind"] == "ClusterTrainingRuntime"]
    made = {pod.name: pod for manifest in manifests if manifest["kind"] == kind for pod in expand([manifest, *runtimes]).pods}
    golden = json.loads((GOLDEN / file).read_text())["pods"]
    assert {name: as_golden(made[name], golden[name]) for name in golden} == golden
    assert made.keys() == golden.keys()  # the suspended job has none


@needs_golden
def test_services_are_those_that_the_real_operator_made() -> None:
    jobs = [manifest for manifest in load(sorted((GOLDEN / "manifests").glob("*.yaml"))) if manifest["kind"] == "PyTorchJob"]
    golden = json.loads((GOLDEN / "pytorchjob-pods-v1.9.4.json").read_text())["services"]
    made = {service["metadata"]["name"]: service for job in jobs for service in services(job)}
    assert made.keys() == golden.keys()
    for name, service in made.items():
        spec = service["spec"] | {"labels": service["metadata"]["labels"]}
        assert {key: spec.get(key) for key in golden[name]} == golden[name]


def test_an_elastic_job_has_a_rendezvous_and_no_master() -> None:
    job = pytorchjob("true", "true")
    del job["spec"]["pytorchReplicaSpecs"]["Master"]
    job["spec"]["elasticPolicy"] = {"minReplicas": 1, "maxRestarts": 3, "rdzvConf": [{"key": "a", "value": "1"}]}
    (worker,) = expand([job]).pods
    assert variables(worker) == {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": "auto",
        "PET_RDZV_ENDPOINT": "job-worker-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "1:1",
        "PET_MAX_RESTARTS": "3",
        "PET_RDZV_CONF": "a=1",
    }
    assert not worker.waits_for


def test_a_trainjob_without_a_trainer_block_gets_nothing() -> None:
    first, second = expand(trainjob("true")).pods
    assert variables(first).keys() == {"JOB_COMPLETION_INDEX"} and second.index == 1
    first, _ = expand(trainjob("true", trainer={"env": [{"name": "PET_NNODES", "value": "9"}]})).pods
    assert variables(first)["PET_NNODES"] == "2" and variables(first)["PET_NPROC_PER_NODE"] == "1"
    gpus = {"resourcesPerNode": {"limits": {"nvidia.com/gpu": 8}}}
    assert variables(expand(trainjob("true", trainer=gpus)).pods[0])["PET_NPROC_PER_NODE"] == "auto"


def test_a_service_for_other_pods_gives_no_name() -> None:
    job, service = indexed_job("true")
    assert expand([job, service]).pods[1].dns_names == ("job-1.peers", "peers")
    service["spec"]["selector"] = {"app": "other"}
    assert expand([job, service]).pods[1].dns_names == ()


def test_what_is_not_emulated_is_refused() -> None:
    job, _ = trainjob("true")
    with pytest.raises(ManifestError, match="there is no TrainingRuntime kit"):
        expand([job])
    with pytest.raises(ManifestError, match="backoffLimitPerIndex"):
        expand(indexed_job("true", backoffLimitPerIndex=1))


def test_quantities() -> None:
    assert [quantity(text) for text in ("500m", "64Mi", 2, "1.5G")] == [0.5, 2**26, 2, 1.5e9]
    with pytest.raises(ManifestError, match="quantity"):
        quantity("1 GB")


@needs_pods
def test_a_pod_is_a_machine_of_its_own(folder: Path) -> None:
    (folder / "runs").mkdir()
    look = (
        "hostname; id -u; cat /kit/config.yaml; df --output=size -B1 /dev/shm; cat /proc/1/comm; cat /sys/class/net/eth0/carrier"
    )
    shm = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "128Mi"}}
    volumes = [
        shm,
        {"name": "config", "configMap": {"name": "config"}},
        {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}},
        {"name": "scratch", "emptyDir": {}},
    ]
    mounts = [
        {"name": "config", "mountPath": "/kit", "readOnly": True},
        {"name": "runs", "mountPath": "/runs"},
        {"name": "scratch", "mountPath": "/scratch"},
    ]
    job = pytorchjob(
        f"{look}; touch /usr/made-in-a-pod; until [ -e /runs/theirs ]; do sleep 0.1; done",
        f"{look}; touch /kit/x /usr/x; touch /scratch/mine && echo scratch; id -G; touch /runs/theirs",
    )
    specs = [job["spec"]["pytorchReplicaSpecs"][kind]["template"]["spec"] for kind in ("Master", "Worker")]
    for spec, more in zip(specs, ([], [{"name": "shm", "mountPath": "/dev/shm"}]), strict=True):
        spec["volumes"] = volumes
        spec["containers"][0]["volumeMounts"] = mounts + more
    specs[1]["securityContext"] = {"runAsUser": 1234, "runAsGroup": 1234, "fsGroup": 2000}
    specs[1]["containers"][0]["securityContext"] = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False}
    config = {"kind": "ConfigMap", "metadata": {"name": "config"}, "data": {"config.yaml": "name: kit\n"}}
    with Emulator([job, config], claims={"runs": folder / "runs"}) as cluster:
        assert cluster.wait(60).condition == "Succeeded", cluster.report()
        master, worker = ([line.strip() for line in cluster.log(f"job-{kind}-0").splitlines()] for kind in ("master", "worker"))
    assert master == ["job-master-0", "0", "name: kit", "1B-blocks", str(64 * 2**20), "sh", "1"]
    assert worker[:5] == ["job-worker-0", "1234", "name: kit", "1B-blocks", str(128 * 2**20)]
    assert "scratch" in worker and "1234 2000" in worker and sum("Read-only file system" in line for line in worker) == 2
    assert (folder / "runs" / "theirs").exists()
    assert not any(Path(made).exists() for made in ("/kit", "/runs", "/scratch", "/usr/made-in-a-pod", "/usr/x"))


@needs_pods
def test_a_claim_or_a_config_map_that_is_not_there_is_named() -> None:
    job = pytorchjob("true")
    spec = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]
    spec["volumes"] = [{"name": "state", "persistentVolumeClaim": {"claimName": "runs"}}]
    with pytest.raises(ManifestError, match="no claim runs"), Emulator([job]):
        pass
    spec["volumes"] = [{"name": "state", "configMap": {"name": "config-x7"}}]
    with pytest.raises(ManifestError, match="no configMap config-x7"), Emulator([job]):
        pass


@needs_pods
def test_on_failure_restarts_the_container_in_place() -> None:
    """The emptyDir and the address stay, the root does not."""
    script = f"cat /sys/class/net/eth0/address; [ -e /usr/1 ] && exit 9; touch /usr/1; {ONCE.format(first=3, then=0)}"
    with Emulator([pytorchjob(script, backoffLimit=3)], speed=100) as cluster:
        verdict = cluster.wait(60)
        assert verdict.condition == "Succeeded", cluster.report()
        first, second = cluster.log("job-master-0").splitlines()
    assert (verdict.exit_codes, verdict.restarts, verdict.created) == (
        {"job-master-0": [3, 0]},
        {"job-master-0": 1},
        {"job-master-0": 1},
    )
    assert first == second


@needs_pods
@pytest.mark.parametrize(
    ("policy", "code", "run_policy", "reason", "created", "master"),
    [
        ("OnFailure", 3, {"backoffLimit": 2}, "it has reached the specified backoff limit", 1, "Gone"),
        ("Never", 3, {}, "job-worker-0 ended with 3", 1, "Running"),
        ("Never", 3, {"cleanPodPolicy": "Running"}, "job-worker-0 ended with 3", 1, "Gone"),
        ("ExitCode", 1, {"backoffLimit": 5}, "job-worker-0 ended with 1", 1, "Running"),
    ],
)
def test_a_pytorchjob_fails(policy: str, code: int, run_policy: Manifest, reason: str, created: int, master: str) -> None:
    with Emulator([pytorchjob("exec sleep 60", f"exit {code}", policy, **run_policy)], speed=100) as cluster:
        verdict = cluster.wait(60)
    assert (verdict.condition, verdict.reason, verdict.message) == ("Failed", "PyTorchJobFailed", reason)
    assert verdict.created["job-worker-0"] == created and set(verdict.exit_codes["job-worker-0"]) == {code}
    assert verdict.phases["job-master-0"] == master


@needs_pods
def test_exit_code_makes_the_pod_anew_after_137() -> None:
    """Another pod of the same name: at another address, with nothing left in its emptyDir."""
    worker = "cat /sys/class/net/eth0/address; sleep 60"
    with Emulator([pytorchjob("sleep 60", worker, "ExitCode")], speed=100) as cluster:
        cluster.wait_for_log("job-worker-0", "\n")
        first = cluster.resolve("job-worker-0")
        cluster.kill("job-worker-0", signal.SIGKILL)
        assert wait_until(lambda: len(cluster.log("job-worker-0").splitlines()) == 2), cluster.report()
        verdict, second = cluster.status(), cluster.resolve("job-worker-0")
    assert verdict.exit_codes["job-worker-0"] == [137] and verdict.created["job-worker-0"] == 2 and not verdict.condition
    assert first and second and first != second


@needs_pods
def test_a_worker_waits_for_the_masters_name() -> None:
    faults = Faults(start_after={"job-master-0": 0.5}, resolves_after={"job-master-0": 1})
    look = "getent hosts $MASTER_ADDR job-master-0.default.svc.cluster.local"
    with Emulator([pytorchjob("sleep 2", look)], faults=faults, speed=20) as cluster:
        assert cluster.status().phases == {"job-master-0": "Pending", "job-worker-0": "Pending"}
        assert wait_until(lambda: cluster.status().phases["job-master-0"] == "Running"), cluster.report()
        assert cluster.resolve("job-master-0") == [] and cluster.status().phases["job-worker-0"] == "Pending"
        assert cluster.wait(60).condition == "Succeeded"
        assert cluster.log("job-worker-0").split() == 2 * ["10.244.0.2", "job-master-0.default.svc.cluster.local"], (
            cluster.report()
        )


@needs_pods
def test_a_pod_that_never_starts() -> None:
    with Emulator(indexed_job("getent hosts job-0.peers; sleep 60"), faults=Faults(never_started=("job-1",))) as cluster:
        cluster.wait_for_log("job-0", "10.244.0.2")
        assert cluster.resolve("job-1.peers") == [] and cluster.resolve("peers") == ["10.244.0.2"]
        assert cluster.wait(0.3).phases == {"job-0": "Running", "job-1": "Pending"}


@needs_pods
def test_one_process_of_a_pod_is_killed_and_a_cable_pulled() -> None:
    script = (
        'n=60; sleep $n & wait $!; echo "child: $?"; while grep -q 1 /sys/class/net/eth0/carrier; do sleep 0.05; done; echo cut'
    )
    with Emulator([pytorchjob(script)]) as cluster:
        assert wait_until(lambda: processes("sleep", "60"))
        cluster.kill("job-master-0", signal.SIGKILL, match="sleep 60")
        cluster.wait_for_log("job-master-0", "child: 137")
        cluster.link("job-master-0", "down")
        assert cluster.wait(60).condition == "Succeeded" and "cut" in cluster.log("job-master-0"), cluster.report()


@needs_pods
def test_termination_with_grace() -> None:
    """PID 1 without a handler does not see SIGTERM at all, and is killed after the grace."""
    polite = "trap 'echo saved; exit 75' TERM; echo up; while :; do sleep 0.1; done"
    with Emulator([pytorchjob(polite, "echo up; exec sleep 60")], speed=100) as cluster:
        for name, code, wrote in (("job-master-0", 75, "saved"), ("job-worker-0", 137, "up")):
            cluster.wait_for_log(name, "up")
            began = time.monotonic()
            cluster.delete_pod(name)
            assert cluster.wait_for_exit(name) == code and wrote in cluster.log(name), cluster.report()
            assert code == 75 or time.monotonic() - began >= 1
        assert wait_until(lambda: set(cluster.status().created.values()) == {2}), cluster.report()


@needs_pods
@pytest.mark.parametrize(
    ("script", "spec", "reason", "created"),
    [
        ("exit 7", {"backoffLimit": 2}, "BackoffLimitExceeded", 2),  # over all pods: 2 and 2 failures
        ("exit 7", {"backoffLimit": 0}, "BackoffLimitExceeded", 1),
        ("exec sleep 60", {"activeDeadlineSeconds": 1}, "DeadlineExceeded", 1),
        (
            '[ "$JOB_COMPLETION_INDEX" = 0 ] && exec sleep 60; exit 42',
            {"podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [40, 42]}}]}},
            "PodFailurePolicy",
            1,
        ),
        (
            "exit 42",
            {
                "backoffLimit": 1,
                "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [42]}}]},
            },
            "BackoffLimitExceeded",
            1,
        ),
    ],
)
def test_an_indexed_job_fails(script: str, spec: Manifest, reason: str, created: int) -> None:
    with Emulator(indexed_job(script, **spec), speed=100) as cluster:
        verdict = cluster.wait(60)
        assert (verdict.condition, verdict.reason) == ("Failed", reason), cluster.report()
    assert verdict.created == {"job-0": created, "job-1": created}
    assert not {"Running", "Pending"} & set(verdict.phases.values())


@needs_pods
def test_an_eviction_that_is_ignored_costs_nothing(tmp_path: Path) -> None:
    rules = [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}]
    script = "trap 'exit 1' TERM; echo up; until [ -e /state/go ]; do sleep 0.1; done"
    job = indexed_job(script, state=SHARED, backoffLimit=0, podFailurePolicy={"rules": rules})
    with Emulator(job, claims={"state": tmp_path}, speed=100) as cluster:
        cluster.wait_for_log("job-1", "up")
        cluster.evict("job-1")
        assert wait_until(lambda: cluster.log("job-1").count("up") == 2), cluster.report()
        (tmp_path / "go").touch()
        verdict = cluster.wait(60)
        assert verdict.condition == "Complete", cluster.report()
    assert verdict.created == {"job-0": 1, "job-1": 2} and verdict.exit_codes["job-1"] == [1, 0]


@needs_pods
def test_a_jobset_restarts_all_pods_together(tmp_path: Path) -> None:
    script = f'[ "$JOB_COMPLETION_INDEX" = 1 ] || exec sleep 1; {ONCE.format(first=3, then=0)}'
    manifests = trainjob(script, {"maxRestarts": 1}, {}, SHARED, backoffLimit=0)
    with Emulator(manifests, claims={"state": tmp_path}, speed=100) as cluster:
        verdict = cluster.wait(60)
        assert (verdict.condition, verdict.reason) == ("Complete", "AllJobsCompleted"), cluster.report()
    assert verdict.created == {"job-node-0-0": 2, "job-node-0-1": 2} and verdict.exit_codes["job-node-0-1"] == [3, 0]


@needs_pods
@pytest.mark.parametrize(
    ("failure_policy", "code", "reason", "created"),
    [
        (None, 3, "FailedJobs", 1),
        ({"maxRestarts": 1}, 3, "ReachedMaxRestarts", 2),
        (
            {"maxRestarts": 5, "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]},
            42,
            "FailJobSetFailurePolicyAction",
            1,
        ),
    ],
)
def test_a_jobset_fails(failure_policy: Manifest | None, code: int, reason: str, created: int) -> None:
    final = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}]}
    with Emulator(trainjob(f"exit {code}", failure_policy, {}, backoffLimit=0, podFailurePolicy=final), speed=100) as cluster:
        verdict = cluster.wait(60)
        assert (verdict.condition, verdict.reason) == ("Failed", reason), cluster.report()
    assert set(verdict.created.values()) == {created}


@needs_pods
def test_a_suspended_job_has_no_pods() -> None:
    with Emulator([pytorchjob("true", suspend=True)]) as cluster:
        assert (cluster.wait(5).condition, cluster.status().phases) == ("Suspended", {})


@needs_pods
def test_nothing_is_left_of_a_test_that_was_killed(tmp_path: Path) -> None:
    seconds = f"{10**6 + os.getpid()}"  # a word to know the pods' processes by
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(pytorchjob(f"exec sleep {seconds}", f"exec sleep {seconds}")))
    before = processes("tests.lab.kube.pod_server")
    argv = [sys.executable, "-m", "tests.lab.kube.pods", str(tmp_path / "job.yaml")]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as test:
        assert wait_until(lambda: len(processes("sleep", seconds)) == 2)
        cluster = processes("tests.lab.kube.pod_server") - before
        test.kill()
    assert cluster and wait_until(lambda: not processes("sleep", seconds) | (cluster & processes("tests.lab.kube.pod_server")))
    # Mounts, links and the sandboxes' processes are in namespaces that nothing holds any more.


def processes(*words: str) -> set[str]:
    """The pids of all processes, in all PID namespaces, that have these words on their command line."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            told = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue  # it has ended
        if set(words) <= set(told):
            found.add(entry.parent.name)
    return found
