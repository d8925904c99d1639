"""The Kubernetes backend: a manifest of k8s/ with the run's own values, applied and followed by kubectl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError
from trainer.launch import manifests
from trainer.launch.plan import KIT, Command, Plan, Submission, keep, locked, new_run_dir, resolved, write_plan
from trainer.launch.pods import why_failed, why_pending
from trainer.launch.run import Run, Status, UnreachableError

MANIFEST = "manifest.yaml"
_RESOURCES = {"pytorchjob": "pytorchjobs.kubeflow.org", "trainjob": "trainjobs.trainer.kubeflow.org", "indexed-job": "jobs.batch"}
_MISSING = ("NotFound", "not found")


def plan(submission: Submission, run_dir: str) -> Plan:
    """What `submit` applies: pure, nothing is touched.

    Raises:
        ConfigError: a name, volume or option that Kubernetes would take without a word and then not start, or not take.
    """
    submission.refuse_queue()
    config = submission.config
    name = Path(run_dir).name.lower()
    manifests.check_name(name, config.kubernetes.kind, config.resources.nodes)
    given = config.kubernetes.manifest
    documents = manifests.read(Path(given) if given else KIT / "k8s" / f"{config.kubernetes.kind}.yaml")
    in_pods = resolved(config, f"{manifests.RUNS}/{name}")
    text = manifests.dump(manifests.patched(documents, config, name, in_pods))
    files = {"config.yaml": resolved(config, run_dir), MANIFEST: text}
    apply = [*_kubectl(config.kubernetes.namespace), "apply", "--filename", _one_file(f"{run_dir}/{MANIFEST}")]
    return Plan("kubernetes", run_dir, files, [Command(apply)], shown=MANIFEST)


def submit(submission: Submission) -> Run:
    """Apply the manifest.

    Raises:
        ConfigError: no kubectl here, no such volume, or the API server refused; with its own words.
    """
    submission.refuse_queue()
    config = submission.config
    settings = config.kubernetes
    if shutil.which("kubectl") is None:
        raise ConfigError("backend=kubernetes: no kubectl on PATH; install it, or render the manifest and apply it elsewhere")
    if _get(settings.namespace, "persistentvolumeclaim", settings.volume) is None:
        remedy = "make it once, as with kubectl apply -f k8s/volume.yaml, or name another"
        raise ConfigError(f"kubernetes.volume={settings.volume}: is not in namespace {settings.namespace}; {remedy}")
    plan(submission, new_run_dir(config))  # what it refuses leaves no folder behind
    run_dir = new_run_dir(config, make=True)
    with locked(submission, run_dir):
        made = plan(submission, run_dir)
        facts = {"name": Path(run_dir).name.lower(), "namespace": settings.namespace, "kind": settings.kind}
        run = write_plan(made)
        if _get(settings.namespace, _RESOURCES[settings.kind], facts["name"]) is not None:  # an ended one: it cannot be changed
            _run(*_kubectl(settings.namespace), "delete", _RESOURCES[settings.kind], facts["name"], "--wait")
        _run(*made.commands[0].argv)
        keep(run, made, {**facts, "nodes": config.resources.nodes, "ranks_per_node": config.resources.ranks})
    return run


def status(run: Run) -> Status:
    """How the run stands, by its object's conditions, its pods and their events."""
    job = run.job
    found = _get(job["namespace"], _RESOURCES[job["kind"]], job["name"])
    if found is None:
        return Status("stopped", f"{job['kind']} {job['name']} is deleted; go on with: trainer submit {run.folder}/config.yaml")
    conditions = {
        condition["type"]: condition
        for condition in found.get("status", {}).get("conditions", [])
        if condition["status"] == "True"
    }
    if "Succeeded" in conditions or "Complete" in conditions:
        return Status("done", f"{job['kind']} {job['name']} ended well")
    pods = _list(job["namespace"], "pods", f"app.kubernetes.io/instance={job['name']}")
    if "Failed" in conditions:
        lines = [line for pod in pods for line in _log_lines(job["namespace"], pod["metadata"]["name"], "--tail=200")]
        return Status("failed", why_failed(lines, pods, conditions["Failed"]))
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    if len(running) >= job["nodes"]:
        return Status("running", f"{job['kind']} {job['name']}: {len(running)} pods run")
    events = _list(job["namespace"], "events", "")
    why = why_pending(job["name"], found, pods, events)
    return Status("pending", f"{job['kind']} {job['name']}: {len(running)} of {job['nodes']} pods run; {why}")


def cancel(run: Run, now: bool = False) -> str:
    """Delete the job: its pods get their grace period to save. `now` gives them none. Returns a line for the user."""
    job = run.job
    if _get(job["namespace"], _RESOURCES[job["kind"]], job["name"]) is None:
        return "not running"
    if now:
        selector = f"--selector=app.kubernetes.io/instance={job['name']}"
        _run(*_kubectl(job["namespace"]), "delete", "pods", selector, "--grace-period=0", "--force")
    _run(*_kubectl(job["namespace"]), "delete", _RESOURCES[job["kind"]], job["name"], "--wait=false")
    return f"killed {job['name']}" if now else f"asked the {job['nodes']} pods of {job['name']} to save and stop"


def logs(run: Run, follow: bool, rank: int | None) -> Iterator[str]:
    """What the pods print: the node of a rank, or (None) all of them with their names before each line.

    Raises:
        ConfigError: there is no such pod yet; the line says why.
    """
    job = run.job
    pods = sorted(_list(job["namespace"], "pods", f"app.kubernetes.io/instance={job['name']}"), key=_node_rank)
    chosen = pods if rank is None else [pod for pod in pods if _node_rank(pod) == rank // job["ranks_per_node"]]
    if not chosen:
        raise ConfigError(f"RUN={run.folder}: no pod of rank {rank} yet ({status(run).detail})")
    names = [pod["metadata"]["name"] for pod in chosen]
    if rank is not None:
        yield from _log_lines(job["namespace"], names[-1], *(["--follow"] if follow else []))
        return
    for name in names:
        yield from (f"{name}: {line}" for line in _log_lines(job["namespace"], name))


def _node_rank(pod: dict[str, Any]) -> int:
    labels = pod["metadata"].get("labels", {})
    if "training.kubeflow.org/replica-type" in labels:
        offset = 1 if labels["training.kubeflow.org/replica-type"] == "worker" else 0
        return int(labels["training.kubeflow.org/replica-index"]) + offset
    return int(labels.get("batch.kubernetes.io/job-completion-index", 0))


def _log_lines(namespace: str, pod: str, *options: str) -> Iterator[str]:
    argv = [*_kubectl(namespace), "logs", pod, *options]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        for line in process.stdout or []:
            yield line.rstrip("\n")


def _one_file(path: str) -> str:
    """A path for kubectl, which reads a list in CSV."""
    doubled = path.replace('"', '""')
    return f'"{doubled}"' if set(path) & set('",') else path


def _get(namespace: str, resource: str, name: str) -> dict[str, Any] | None:
    """One object, or None if there is none."""
    done = _call(*_kubectl(namespace), "get", resource, name, "--output", "json")
    if done.returncode:
        if any(word in done.stderr for word in _MISSING):
            return None
        raise UnreachableError(f"kubectl get {resource}: {_words(done)}; try again when the API server answers")
    return dict(json.loads(done.stdout))


def _list(namespace: str, resource: str, selector: str) -> list[dict[str, Any]]:
    done = _call(*_kubectl(namespace), "get", resource, *([f"--selector={selector}"] if selector else []), "--output", "json")
    return list(json.loads(done.stdout)["items"]) if done.returncode == 0 else []


def _run(*argv: str) -> None:
    done = _call(*argv)
    if done.returncode:
        raise ConfigError(f"kubectl {argv[3]}: {_words(done)}; correct what it names")


def _call(*argv: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(argv, capture_output=True, text=True)
    except FileNotFoundError:
        raise ConfigError("kubectl: not on PATH; run this where the cluster's kubectl is") from None


def _words(done: subprocess.CompletedProcess[str]) -> str:
    return " ".join(done.stderr.split()) or "failed without a word"


def _kubectl(namespace: str) -> list[str]:
    return ["kubectl", "--namespace", namespace]
