"""What breaks a job by what its controller makes of it: names, restarts, PyTorchJob, TrainJob with its runtime.

Findings 1-7 and sections C.1-C.3 are those of the project's notes on the real controllers (training-operator 1.9, trainer 2.3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from trainer.launch.lint.fields import Field
from trainer.launch.lint.jobs import RUNTIMES, STEP, Job, Pods, trainer_job

_LABEL = 63  # characters of a DNS label
_START_SECONDS = 600  # an image pull and torch's own wait for a late node take this long
_QUEUES = ("kueue.x-k8s.io/queue-name",)
_POLICIES = {"PyTorchJob": ("OnFailure", "Never", "ExitCode", "Always")}
_OTHER_ML = {"mpi", "jax", "xgboost", "flux"}  # a runtime's mlPolicy that is not torch's
_DEFAULT_BACKOFF = 6  # of a Job


def _name(job: Job) -> Iterator[str]:
    """Names become host names. Finding 3: longer ones are admitted, but the Service is not made."""
    first = "[a-z]" if job.kind != "Job" else "[a-z0-9]"
    where = job.top.at("metadata.name")
    if not job.name or job.kind == "TrainingRuntime":
        return
    if not re.fullmatch(rf"{first}([-a-z0-9]*[a-z0-9])?", job.name):
        what = "lower-case letters, digits and '-', " + ("a letter first" if job.kind != "Job" else "no '-' at the ends")
        yield where.line("is no DNS label, so the pods get no host names", f"use {what}")
    last = max(job.nodes - 1, 0)
    if job.kind == "PyTorchJob":
        counts = {p.replica_type.lower(): p.count for p in job.pods}
        counts["worker"] = max(counts.get("worker", 0), job.top.at("spec.elasticPolicy.maxReplicas").number or 0)
        longest = max((f"{job.name}-{kind}-{count - 1}" for kind, count in counts.items() if count), key=len, default="")
    elif job.kind == "TrainJob":
        replicated = trainer_job(job.runtime) if job.runtime is not None else None
        inner = (replicated["name"].text if replicated is not None else "") or "node"
        longest = f"{job.name}-{inner}-0-{last}-abcde"
    else:
        longest = f"{job.name}-{last}"
    if (over := len(longest) - _LABEL) > 0:
        yield where.line(
            f"too long: its pod {longest} has {len(longest)} characters, 63 are allowed", f"shorten the name by {over}"
        )


def _suspend(job: Job) -> Iterator[str]:
    """C.1: Kueue starts what is suspended, and only what has a queue."""
    field = job.top.at("spec.runPolicy.suspend" if job.kind == "PyTorchJob" else "spec.suspend")
    if field.value is True and not any(job.top.at("metadata.labels")[queue].text for queue in _QUEUES):
        yield field.line("suspended and in no queue: nothing will ever start it", f"remove it, or set the label {_QUEUES[0]}")


def _deadline(job: Job) -> Iterator[str]:
    """C.1: it counts from the start, over image pulls, waiting and all restarts. A12: torch waits 600 s for a node."""
    field = job.top.at("spec.runPolicy.activeDeadlineSeconds" if job.kind == "PyTorchJob" else "spec.activeDeadlineSeconds")
    if field.number is not None and field.number < _START_SECONDS:
        wrong = "the job is killed this many seconds after its start, image pulls and restarts included"
        yield field.line(wrong, f"give it the time of the whole training, at least {_START_SECONDS}")


def _restart_policy(job: Job) -> Iterator[str]:
    """Finding 4 (a typo), finding 1 and J6 (ExitCode), C.1 (Always never ends, the template's own value is overwritten)."""
    known = _POLICIES.get(job.kind, ("Never", "OnFailure"))
    for pods in job.pods:
        value, main = pods.restart, pods.main
        if value.value is None and job.kind == "Job":
            yield value.line("a Job must say Never or OnFailure", "write restartPolicy: Never")
        elif value.value is not None and value.text not in known:
            yield value.line(f"is none of {', '.join(known)}: pods are not made or never end", f"write {known[0]}")
        if value.text == "Always" and job.kind == "PyTorchJob":
            yield value.line("a pod that is done is started again, so the job never succeeds", "write OnFailure")
        if value.text == "ExitCode" and job.kind == "PyTorchJob":
            limit = job.top.at("spec.runPolicy.backoffLimit")
            if main is None or main.launcher != "trainer":
                wrong = "one rank's death makes its peers exit with 1, which ExitCode takes as final: the job fails, not restarts"
                yield value.line(wrong, "write OnFailure and set runPolicy.backoffLimit")
            elif limit.value is not None:
                yield limit.line("is ignored under restartPolicy ExitCode", "remove it, or write OnFailure")
        own = pods.spec["restartPolicy"]
        if job.kind == "PyTorchJob" and own.value is not None and own.text != (value.text or "OnFailure"):
            yield own.line(
                f"is overwritten by the replica's restartPolicy {value.text or 'OnFailure'}", "write it there, not here"
            )


def _backoff(job: Job) -> Iterator[str]:
    """Finding 2: one rank's crash makes every pod fail, and each counts. Under OnFailure the sum must stay below the limit."""
    restarted = [p for p in job.pods if job.kind != "PyTorchJob" or p.restart.text in ("", "OnFailure")]
    spec = _counting_spec(job, restarted[0]) if restarted else None
    if spec is None:
        return
    limit, never = spec["backoffLimit"], restarted[0].restart.text == "Never"
    needed = job.nodes + (not never)
    if job.kind == "PyTorchJob" and limit.value is None:
        yield limit.line("without it a job that cannot run is restarted for ever", f"set {job.nodes} pods x restarts + 1")
        return
    ignored = [r for r in spec.at("podFailurePolicy.rules").each() if r["action"].text == "Ignore" and r["onExitCodes"].value]
    if ignored or spec["backoffLimitPerIndex"].value is not None:
        return  # another count
    number = _DEFAULT_BACKOFF if limit.value is None else limit.number
    if number and number < needed:  # 0: no restart is wanted
        default = f", {number} by default" if limit.value is None else ""
        wrong = f"less than one restart: a crash of one rank counts once for each of the {job.nodes} pods{default}"
        yield limit.line(wrong, f"set {job.nodes} pods x restarts, at least {needed}")


def _counting_spec(job: Job, pods: Pods) -> Field | None:
    """Where backoffLimit stands, or None: not in these files, or the JobSet restarts all pods together."""
    if job.kind in ("PyTorchJob", "Job"):
        return job.top.at("spec.runPolicy") if job.kind == "PyTorchJob" else job.top["spec"]
    replicated = trainer_job(job.runtime) if job.runtime is not None else None
    if job.runtime is None or replicated is None or not pods.whole:
        return None
    together = job.runtime.at("spec.template.spec.failurePolicy.maxRestarts").number
    return None if together else replicated.at("template.spec")


def _replicas(job: Job) -> Iterator[str]:
    """Finding 5 and C.1: what the webhook refuses, and what a job without a Master lacks."""
    if job.kind != "PyTorchJob":
        return
    specs = job.top.at("spec.pytorchReplicaSpecs")
    if not job.pods:
        yield specs.line("no pods", "add Master and Worker")
    for spec, pods in zip(specs.each(), job.pods, strict=True):
        if spec.key not in ("Master", "Worker"):
            yield spec.line("unknown replica type", "write Master or Worker, with that capital")
        if pods.replica_type == "Master" and spec["replicas"].value != 1:
            yield spec["replicas"].line("there is one Master, and the webhook wants it written out", "write replicas: 1")
        elif pods.count < 1:
            yield spec["replicas"].line("no pods", "write 1 or more")
    types = {pods.replica_type for pods in job.pods}
    if job.pods and "Master" not in types and job.nodes > 1 and job.top.at("spec.elasticPolicy").value is None:
        yield specs["Master"].line("without it no pod gets MASTER_ADDR, RANK or WORLD_SIZE", "make one of the nodes the Master")
    gpus = {p.replica_type: p.main.gpus for p in job.pods if p.main is not None}
    if len(set(gpus.values())) > 1:
        told = ", ".join(f"{kind} {count}" for kind, count in gpus.items())
        yield specs.line(f"pods with different numbers of GPUs: {told}", "give every pod the same GPU limits")


def _pytorchjob_policy(job: Job) -> Iterator[str]:
    """C.1: nprocPerNode is a string; cleanPodPolicy None leaves workers; elastic has no Master, no ranks (J7, J10)."""
    if job.kind != "PyTorchJob":
        return
    nproc, clean, elastic = job.nproc, job.top.at("spec.runPolicy.cleanPodPolicy"), job.top.at("spec.elasticPolicy")
    if nproc.value is not None and not isinstance(nproc.value, str):
        yield nproc.line("must be a string", f'write "{nproc.text}", in quotes')
    elif nproc.text and nproc.number is None and nproc.text not in ("auto", "gpu", "cpu"):
        yield nproc.line("is no number of processes", "write a number in quotes, or auto")
    if clean.text not in ("Running", "All") and any(p.replica_type == "Worker" for p in job.pods):
        yield clean.line("workers that hang are left running, with their GPUs, when the job has ended", "write Running")
    if elastic.value is None:
        return
    if elastic["nProcPerNode"].value is not None and nproc.value is not None:
        yield elastic["nProcPerNode"].line("stands twice: spec.nprocPerNode says it too", "keep spec.nprocPerNode")
    types = {p.replica_type for p in job.pods}
    if "Worker" not in types:
        yield elastic.line("needs Worker replicas", "remove it, or add Worker")
    elif "Master" in types:
        yield elastic.line(
            "with a Master too: pods get both PET_MASTER_* and PET_RDZV_*, and nnodes without the Master", "keep one"
        )
    if any(p.main is not None and p.main.launcher == "trainer" for p in job.pods):
        yield elastic.line("trainer node takes a fixed number of nodes, and elastic pods get no rank", "remove it; use a Master")


def _container_names(job: Job) -> Iterator[str]:
    """C.1, C.2: the controller gives its variables and port to the container of this name."""
    name = {"PyTorchJob": "pytorch", "Job": ""}.get(job.kind, "node")
    for pods in job.pods:
        containers = pods.spec["containers"]
        if name and pods.template.value is not None and name not in [c.own["name"].text for c in pods.containers]:
            found = ", ".join(c.own["name"].text or "?" for c in pods.containers) or "none"
            yield containers.line(f"no container is named {name} (found {found})", f"name the training container {name}")


def _trainjob(job: Job) -> Iterator[str]:
    """Findings 6 and 7, C.2."""
    if job.kind != "TrainJob":
        return
    trainer, ref, runtime = job.top.at("spec.trainer"), job.top.at("spec.runtimeRef"), job.runtime
    if trainer.value is None:
        wrong = "without it the pods get no PET_* at all, and each node trains alone"
        yield trainer.line(wrong, "write at least trainer: {numNodes: N}")
    if isinstance(job.nproc.value, str):
        yield job.nproc.line(
            "a string is refused since trainer 2.2", "write a whole number, or leave it out for one rank per GPU"
        )
    others = job.documents(*RUNTIMES)
    if runtime is None and others:
        found = ", ".join(f"{o['kind'].text}/{o.at('metadata.name').text}" for o in others)
        kind = ref["kind"].text or "ClusterTrainingRuntime (the default kind)"
        yield ref["name"].line(f"no {kind} of this name in these files, only {found}", "correct runtimeRef's name and kind")
    elif runtime is not None and runtime["kind"].text == "TrainingRuntime":
        names = [d.at("metadata.namespace").text for d in (job.top, runtime)]
        if all(names) and names[0] != names[1]:
            yield ref["name"].line(
                f"that TrainingRuntime is in namespace {names[1]}, not {names[0]}", "put both in one namespace"
            )


def _runtime(job: Job) -> Iterator[str]:
    """C.2: torch's part of a runtime, and the label by which the trainer's pods are found."""
    runtime = job.runtime
    if runtime is None:
        return
    policy = runtime.at("spec.mlPolicy")
    if isinstance(policy.value, dict) and _OTHER_ML & policy.value.keys():
        return
    if policy["torch"].value is None:
        yield policy["torch"].line("without it the pods get no PET_*", "write torch: {}")
    replicated = trainer_job(runtime)
    if replicated is None:
        yield runtime.at("spec.template.spec.replicatedJobs").line(
            "no job that trains", "add one named node, with the label " + STEP
        )
        return
    label = replicated.at("template.metadata.labels")[STEP]
    if label.text != "trainer":
        yield label.line("without this label on the job's template the trainer finds no pods to set up", "write trainer")


RULES: list[Callable[[Job], Iterator[str]]] = [
    _name,
    _suspend,
    _deadline,
    _restart_policy,
    _backoff,
    _replicas,
    _pytorchjob_policy,
    _container_names,
    _trainjob,
    _runtime,
]
