"""The rendered manifests run for real, each pod with its own network, name, PID 1, /dev/shm and restarts; and followed by kubectl."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import DIGITS, ROOT, wait_until
from tests.jobs import SHORT, TRAINER, command, equal, losses, metrics, roll_call, saved
from tests.lab.kube import schema
from tests.lab.kube.api import KubeApi
from tests.lab.kube.pods import Emulator, Faults, missing
from tests.test_runs import slow
from trainer.launch.job import Job, plan
from trainer.launch.plan import Submission
from trainer.settings import load_config

pytestmark = pytest.mark.k8s
KINDS = ["pytorchjob", "trainjob", "indexed-job"]
FIRST = {"pytorchjob": "job-master-0", "trainjob": "job-node-0-0", "indexed-job": "job-0"}
SECOND = {"pytorchjob": "job-worker-0", "trainjob": "job-node-0-1", "indexed-job": "job-1"}
real = pytest.mark.skipif(bool(missing()), reason=missing() or "-")
TWO = ["resources.nodes=2", "resources.ranks_per_node=2"]


def emulator(kind: str, claim: Path, *settings: str, faults: Faults | None = None) -> Emulator:
    """The job of a config, rendered as the launcher applies it."""
    config = load_config(*settings, "backend=kubernetes", f"kubernetes.kind={kind}", "run_dir=/nowhere/job")
    documents = list(yaml.safe_load_all(plan(Submission([config])).text()))
    claim.mkdir(exist_ok=True)
    claim.chmod(0o777)
    environ = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(DIGITS.parents[1])}
    path = f"{Path(TRAINER[0]).parent}:/usr/bin:/bin"
    return Emulator(documents, path=path, environ=environ, claims={"ddp-runs": claim}, speed=10, faults=faults or Faults())


def all_logs(run: Emulator, kind: str) -> str:
    return "\n".join(f"--- {pod}\n{run.log(pod)}" for pod in (FIRST[kind], SECOND[kind]))


@real
@pytest.mark.parametrize("kind", KINDS)
def test_two_pods_learn_what_one_machine_does_whoever_comes_first(kind: str, tmp_path: Path, reference: Path) -> None:
    """The first pod starts 5 s late, and its name resolves 15 s after that."""
    claim = tmp_path / "claim"
    late = Faults(start_after={FIRST[kind]: 5}, resolves_after={FIRST[kind]: 15})
    with emulator(kind, claim, *SHORT, *TWO, faults=late) as run:
        verdict = run.wait(120)
        assert verdict.condition in ("Succeeded", "Complete"), f"{verdict}\n{all_logs(run, kind)}"
    assert losses(claim / "job") == losses(reference) and equal(saved(claim / "job"), saved(reference))
    assert (told := roll_call(claim / "job"))["nodes"] == 2 and not told["fault"] and not told["warnings"], told


def writes(pid: int, log: str) -> bool:
    """Whether a process prints into a rank's log, as only that rank does."""
    try:
        return log in os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return False


@real
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_killed_starts_all_pods_again_from_the_last_checkpoint(
    kind: str, tmp_path: Path, uninterrupted: Path
) -> None:
    claim = tmp_path / "claim"
    settings = [
        word for word in slow(claim / "job", 0.02, resources__nodes=2, resources__ranks_per_node=1) if "run_dir" not in word
    ]
    with emulator(kind, claim, *settings) as run:
        assert wait_until(lambda: len(metrics(claim / "job")) >= 8, 60), all_logs(run, kind)
        (pid,) = [pid for pid in (int(path.name) for path in Path("/proc").glob("[0-9]*")) if writes(pid, "rank-0001.")]
        os.kill(pid, signal.SIGKILL)
        verdict = run.wait(150)
        assert verdict.condition in ("Succeeded", "Complete"), f"{verdict}\n{all_logs(run, kind)}"
        assert "resuming at step" in run.log(FIRST[kind]), all_logs(run, kind)
    assert [step for step, _ in losses(claim / "job")] == list(range(1, 51))
    assert losses(claim / "job") == losses(uninterrupted) and equal(saved(claim / "job"), saved(uninterrupted))


@real
@pytest.mark.parametrize("fault", ["a rank hangs", "a pod is cut off"])
def test_what_no_process_ends_of_ends_both_pods(fault: str, tmp_path: Path) -> None:
    claim, kind = tmp_path / "claim", random.choice(KINDS)
    hangs = "model.args={rank: 1, number: 30, what: 'time.sleep(1000)'}" if fault == "a rank hangs" else "model.args={}"
    short = [*SHORT, "resources.nodes=2", "resources.ranks_per_node=1", "training.max_steps=100000", "training.epochs=9000"]
    settings = ["model.target=tests.targets:faulty_model", hangs, "watch.stall_seconds=6", "kubernetes.max_restarts=0"]
    with emulator(kind, claim, *short, *settings) as run:
        assert wait_until(lambda: len(metrics(claim / "job")) >= 8, 60), all_logs(run, kind)
        if fault == "a pod is cut off":
            run.link(SECOND[kind], "down")
        code = 163 if fault == "a rank hangs" else 164
        assert run.wait_for_exit(FIRST[kind], 60) == code, all_logs(run, kind)
        assert run.wait_for_exit(SECOND[kind], 60) == code, all_logs(run, kind)
        words = " rank=1: sleeps in targets.py:" if fault == "a rank hangs" else f"lost node 1 ({SECOND[kind]}) with rank 1: "
        assert words in run.log(FIRST[kind]), all_logs(run, kind)


@real
def test_a_pod_that_is_asked_to_go_saves_within_its_grace_period(tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    with emulator("indexed-job", claim, *SHORT, *TWO, "training.max_steps=100000", "training.epochs=4000") as run:
        assert wait_until(lambda: len(metrics(claim / "job")) >= 5, 60), all_logs(run, "indexed-job")
        run.evict("job-1")
        assert run.wait_for_exit("job-1", 60) == 160 and run.wait_for_exit("job-0", 60) == 160, all_logs(run, "indexed-job")
        step = int((claim / "job" / "checkpoints" / "latest").resolve().name.removeprefix("step-"))
        assert wait_until(lambda: f"resuming at step {step}" in run.log("job-0"), 60), "and goes on when it is made anew"


@real
@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_that_never_comes_ends_the_wait_of_the_other(kind: str, tmp_path: Path) -> None:
    settings = [*SHORT, *TWO, "watch.join_seconds=6", "kubernetes.max_restarts=0"]
    with emulator(kind, tmp_path / "claim", *settings, faults=Faults(never_started=(SECOND[kind],))) as run:
        assert run.wait_for_exit(FIRST[kind], 40) == 161
        assert "missing: node rank 1" in run.log(FIRST[kind])


@real
def test_a_final_fault_is_not_tried_again(tmp_path: Path) -> None:
    with emulator("indexed-job", tmp_path / "claim", *SHORT, *TWO, "container.cuda_version='1.0'") as run:
        verdict = run.wait(60)
        assert verdict.condition == "Failed" and verdict.exit_codes["job-0"] == [4], f"{verdict}\n{all_logs(run, 'indexed-job')}"
        assert "FAULT B3" in run.log("job-0")


needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="not installed: kubectl")
needs_schema = pytest.mark.skipif(bool(schema.missing()), reason=schema.missing() or "-")


@pytest.fixture
def api(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    with KubeApi(strict=True) as made:
        for name, value in made.environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(folder)
        made.add(claim("ddp-runs"))
        yield made


def claim(name: str) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


def trainer(*argv: str) -> tuple[int, str]:
    return command(
        *TRAINER, *argv, cwd=Path.cwd(), **{name: os.environ[name] for name in ("KUBECONFIG", "HOME") if name in os.environ}
    )


def pod_of(name: str, instance: str, status: dict[str, Any]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": instance, "batch.kubernetes.io/job-completion-index": "0"}
    spec = {"containers": [{"name": "node", "image": "x:1"}]}
    meta = {"name": name, "namespace": "default", "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec, "status": status}


@needs_kubectl
@needs_schema
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_applied_passes_the_strict_server_and_can_be_followed(kind: str, api: KubeApi) -> None:
    settings = [str(DIGITS), "backend=kubernetes", f"kubernetes.kind={kind}", "resources.nodes=2", "run_dir=runs/job"]
    more = [
        "resources.gpus_per_node=2",
        "kubernetes.queue=team",
        "kubernetes.rdma_resource=rdma/hca",
        "kubernetes.secrets=[wandb]",
    ]
    code, output = trainer("submit", *settings, *more)
    assert code == 0 and "submitted digits to kubernetes: runs/job" in output, output
    kind_name = {"pytorchjob": "PyTorchJob", "trainjob": "TrainJob", "indexed-job": "Job"}[kind]
    assert api.find(kind_name, "job")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert "pending: " in (told := trainer("status", "runs/job")[1]) and "waits for admission to queue team" in told, told
    assert "asked the 2 pods of job to save and stop" in trainer("cancel", "runs/job")[1]
    assert ": stopped: " in trainer("status", "runs/job")[1]
    code, output = trainer("submit", "runs/job/config.yaml")
    assert code == 0, output


@needs_kubectl
@needs_schema
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (
            {
                "phase": "Pending",
                "conditions": [
                    {
                        "type": "PodScheduled",
                        "status": "False",
                        "reason": "Unschedulable",
                        "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
                    }
                ],
            },
            "job-0: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        ),
        (
            {
                "phase": "Pending",
                "containerStatuses": [
                    {
                        "name": "node",
                        "state": {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1"'}},
                    }
                ],
            },
            'job-0: ImagePullBackOff: Back-off pulling image "x:1"',
        ),
    ],
)
def test_a_job_that_cannot_start_is_explained(status: dict[str, Any], words: str, api: KubeApi) -> None:
    code, output = trainer("submit", str(DIGITS), "backend=kubernetes", "kubernetes.kind=indexed-job", "run_dir=runs/job")
    assert code == 0, output
    assert "no pod was made yet" in trainer("status", "runs/job")[1]
    api.add(pod_of("job-0", "job", status))
    assert f"pending: indexed-job job: 0 of 1 pods run; {words}" in (told := trainer("status", "runs/job")[1]), told


@needs_kubectl
@needs_schema
def test_pods_that_cannot_be_made_are_explained_by_events(api: KubeApi) -> None:
    trainer("submit", str(DIGITS), "backend=kubernetes", "kubernetes.kind=indexed-job", "run_dir=runs/job")
    event = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "e1", "namespace": "default"},
        "type": "Warning",
        "reason": "FailedCreate",
    }
    api.add(
        {
            **event,
            "message": "exceeded quota: gpus",
            "involvedObject": {"kind": "Job", "name": "job"},
            "lastTimestamp": "2026-12-01T00:00:00Z",
        }
    )
    assert "FailedCreate: exceeded quota: gpus" in trainer("status", "runs/job")[1]


@needs_kubectl
@needs_schema
def test_logs_and_the_fault_of_a_failed_job(api: KubeApi) -> None:
    trainer("submit", str(DIGITS), "backend=kubernetes", "kubernetes.kind=indexed-job", "run_dir=runs/job")
    api.add(pod_of("job-0", "job", {"phase": "Failed"}))
    api.add_log("job-0", "step 1\nFAULT C1 host=job-0 rank=0: ValueError: bad sample (a.py:1); fix: see\n")
    code, output = trainer("logs", "runs/job")
    assert code == 0 and output.startswith("step 1\nFAULT C1"), output
    job = api.find("Job", "job")
    job["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy", "message": "x"}]}
    api.add(job)
    told = trainer("status", "runs/job")[1]
    assert "runs/job: failed: FAULT C1 host=job-0 rank=0: ValueError: bad sample" in told, told
    assert Job.of("runs/job").status().state == "failed"


@needs_kubectl
@needs_schema
def test_a_volume_that_is_not_there_is_refused_before_anything_is_applied(api: KubeApi) -> None:
    code, output = trainer("submit", str(DIGITS), "backend=kubernetes", "kubernetes.volume=nowhere", "run_dir=runs/job")
    assert code == 2 and output.startswith("error: kubernetes.volume=nowhere: is not in namespace default; make it once"), output
    assert not Path("runs").exists() and not any(request.verb != "GET" for request in api.requests)


@needs_kubectl
@needs_schema
@pytest.mark.parametrize("kind", KINDS)
def test_the_files_and_what_render_prints_can_be_applied_by_hand(kind: str, api: KubeApi) -> None:
    environ = {name: os.environ[name] for name in ("KUBECONFIG", "HOME")}
    for file in ("volume.yaml", f"{kind}.yaml"):
        code, output = command("kubectl", "apply", "-f", str(ROOT / "k8s" / file), **environ)
        assert code == 0, output
    make = [
        "make",
        "render",
        "BACKEND=kubernetes",
        f"SET=kubernetes.kind={kind}",
        "NODES=2",
        f"VENV={Path(TRAINER[0]).parents[1]}",
    ]
    code, rendered = command(*make, cwd=ROOT, **environ)
    assert code == 0, rendered
    Path("manifest.yaml").write_text(rendered)
    code, output = command("kubectl", "apply", "-f", "manifest.yaml", cwd=Path.cwd(), **environ)
    assert code == 0 and output.count("created") == len(list(yaml.safe_load_all(rendered))), output
    typo = rendered.replace("terminationGracePeriodSeconds", "terminationGracePeriod")
    Path("manifest.yaml").write_text(typo)
    code, output = command("kubectl", "apply", "-f", "manifest.yaml", cwd=Path.cwd(), **environ)
    assert code and "terminationGracePeriod" in output, "a typo is refused"


@needs_schema
@pytest.mark.parametrize("kind", KINDS)
def test_files_and_rendered_manifests_pass_the_strict_schemas(kind: str) -> None:
    config = load_config(DIGITS, "backend=kubernetes", f"kubernetes.kind={kind}", "resources.nodes=2", "run_dir=/nowhere/job")
    rendered = list(yaml.safe_load_all(plan(Submission([config])).text()))
    shipped = list(yaml.safe_load_all((DIGITS.parents[1] / "k8s" / f"{kind}.yaml").read_text()))
    for document in [*rendered, *shipped]:
        assert schema.check(document) == [], document["kind"]
