"""What breaks DDP in a pod of any kind of job: its commands, variables, GPUs and rights.

Letters and numbers (E11, J12) are the fault catalogue's, C.1-C.3 sections of the project's notes on the real controllers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from trainer.launch.lint.fields import gpu_entries
from trainer.launch.lint.jobs import Job, Pods

_GRACE_SECONDS = 60  # SIGTERM to SIGKILL: the step that runs, a checkpoint of a few GB, the goodbye
_GRACE_DEFAULT = 30
_SIDECARS = {  # label or annotation: (asks for a sidecar, refuses it, what a namespace says that asks)
    "sidecar.istio.io/inject": ("true", "false", "istio-injection"),
    "linkerd.io/inject": ("enabled", "disabled", "linkerd.io/inject"),
}
_INDEX = "JOB_COMPLETION_INDEX"
_RANKS = {"RANK", "NODE_RANK", "PET_NODE_RANK", "GROUP_RANK"}


def _grace(job: Job, pods: Pods) -> Iterator[str]:
    """J12: the time between SIGTERM and SIGKILL must hold a save."""
    field = pods.spec["terminationGracePeriodSeconds"]
    number = _GRACE_DEFAULT if field.value is None else field.number
    if pods.whole and number is not None and number < _GRACE_SECONDS:
        default = " by default" if field.value is None else ""
        yield field.line(f"{number} seconds{default} are too few to save a checkpoint in", f"write {_GRACE_SECONDS} or more")


def _shell(job: Job, pods: Pods) -> Iterator[str]:
    """J12: a shell as PID 1 does not pass SIGTERM on; `exec` in its last command puts the program in its place."""
    script = pods.main.script if pods.main is not None else None
    if script is None or re.search(r"^\s*trap\s", script.text, re.MULTILINE):
        return
    text = re.sub(r"\\\n", " ", script.text)
    commands = [c.strip() for c in re.split(r"\n|;|&&|\|\|", text) if c.strip() and not c.strip().startswith("#")]
    if commands and not re.match(r"(\w+=\S*\s+)*exec\s", commands[-1]):
        yield script.line("SIGTERM stops at the shell and the ranks are killed unsaved", "start the last command with exec")


def _sidecar(job: Job, pods: Pods) -> Iterator[str]:
    """J9, A4: a mesh's proxy breaks the ranks' connections, and runs on when they are done."""
    metadata = pods.template["metadata"]
    space = job.top.at("metadata.namespace").text or "default"
    for key, (on, off, of_space) in _SIDECARS.items():
        labels = [metadata[part][key] for part in ("labels", "annotations")]
        said = [field for field in labels if field.value is not None]
        for field in said:
            if field.text.lower() == on:
                yield field.line("the proxy breaks the ranks' connections and keeps the pod from ending", f'write "{off}"')
        if said or not pods.whole:
            continue
        for document in job.documents("Namespace"):
            asks = [document["metadata"][part][of_space] for part in ("labels", "annotations")]
            if document.at("metadata.name").text == space and any(a.text == "enabled" for a in asks):
                yield labels[0].line(f"namespace {space} puts a proxy into every pod", f'write "{off}"')


def _env_by_hand(job: Job, pods: Pods) -> Iterator[str]:
    """C.1, C.2, A11: what the controller sets, and ranks that are the same on every pod."""
    for container in pods.containers:
        for entry in container.env:
            name = entry["name"].text
            if name in job.injected and (job.kind == "PyTorchJob" or container.trains):
                refused = container.trainer is not None and entry.where == container.trainer.where
                wrong = "refused: the name is reserved" if refused else "the controller sets it too, and its value wins"
                yield entry["name"].line(wrong, "remove it")
            elif name == _INDEX and entry["value"].value is not None and job.kind != "PyTorchJob":
                yield entry["value"].line("the same on every pod: the controller no longer sets it", "remove it")
            elif name in _RANKS and entry["value"].number is not None and pods.count > 1:
                fix = "take it by fieldRef from metadata.labels['batch.kubernetes.io/job-completion-index']"
                yield entry["value"].line(f"the same on all {pods.count} pods", fix if job.kind == "Job" else "remove it")


def _unexpanded(job: Job, pods: Pods) -> Iterator[str]:
    """C.1: the controller appends its variables, and a value sees only those before it; command and args see all."""
    names = job.injected if job.kind == "PyTorchJob" else {_INDEX}
    for container in pods.containers:
        before: set[str] = set()
        for entry in container.env if not container.own["envFrom"].value else []:
            for used in re.findall(r"(?<!\$)\$\(([A-Za-z_]\w*)\)", entry["value"].text):
                if used in names and used not in before:
                    field = "metadata.labels['batch.kubernetes.io/job-completion-index']"
                    fix = f"write valueFrom fieldRef {field}" if used == _INDEX else "use it in args, or read it in the program"
                    yield entry["value"].line(f"$({used}) stays as it is: it is defined after the manifest's own variables", fix)
            before.add(entry["name"].text)


def _gpus(job: Job, pods: Pods) -> Iterator[str]:
    """K2, H5: GPUs are given by limits; requests must equal them."""
    for container in pods.containers:
        resources = container["resources"]
        limits = {entry.key: entry for entry in gpu_entries(resources["limits"])}
        for request in gpu_entries(resources["requests"]):
            limit = limits.get(request.key)
            if limit is None:
                yield request.line("GPUs requested without a limit", f"write limits: {{{request.key}: {request.text}}}")
            elif limit.text != request.text:
                yield request.line(f"is not the limit, which is {limit.text}", "write the same number, or limits only")


def _ranks(job: Job, pods: Pods) -> Iterator[str]:
    """E11, J3, J11: ranks on a node against its GPUs and its launcher."""
    main, nproc = pods.main, job.nproc
    if main is None:
        return
    flag = main.flags.get("nproc-per-node")
    ranks = nproc if flag is None else flag
    number, gpus = ranks.number, main.gpus
    splits = main.launcher == "trainer" and number and gpus % number == 0  # the kit gives a rank several devices
    if number and gpus and number != gpus and not splits:
        yield ranks.line(
            f"is not the number of GPUs of container {main.own['name'].text or '?'}, {gpus}",
            f"make it {gpus}, or ask for {number}",
        )
    if job.kind == "PyTorchJob" and main.launcher == "torchrun" and not gpus and ranks.text in ("", "auto"):
        yield ranks.line(
            "auto without a GPU limit starts a rank for each CPU of the machine", 'write "1", or limit nvidia.com/gpu'
        )
    if job.kind == "Job" and main.launcher == "torchrun" and gpus > 1 and not ranks.text and not main.own["envFrom"].value:
        yield main["args"].line(f"torchrun starts one rank for {gpus} GPUs", f"add --nproc-per-node={gpus}")
    if main.launcher == "python" and job.kind == "PyTorchJob" and (nproc.number or 1) > 1:
        wrong = f"WORLD_SIZE counts {nproc.number} ranks a pod, and python starts one: the rest is waited for"
        yield main["command"].line(wrong, "start it with torchrun or trainer node")
    if (
        main.launcher == "python"
        and job.kind == "TrainJob"
        and job.nodes > 1
        and "RANK" not in [e["name"].text for e in main.env]
    ):
        yield main["command"].line("a TrainJob sets PET_* only, no RANK or WORLD_SIZE", "start it with torchrun or trainer node")


def _images(job: Job, pods: Pods) -> Iterator[str]:
    """B1: nodes that pull at different times get different software, and nothing says so."""
    for container in pods.containers:
        image = container["image"]
        if not image.text or re.search(r"[${<@]", image.text):
            continue
        tag = image.text.rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            yield image.line("may be another image on every node", "write a tag that does not move, or @sha256:...")


def _rights(job: Job, pods: Pods) -> Iterator[str]:
    """E17, H5: what a pod shares with its machine, and so with the machine's other pods."""
    spec = pods.spec
    if spec["hostIPC"].value is True:
        yield spec["hostIPC"].line("shares /dev/shm with every pod of the machine", "remove it; mount a memory-backed /dev/shm")
    if spec["automountServiceAccountToken"].value is True:
        yield spec["automountServiceAccountToken"].line("training code gets the cluster's credentials for nothing", "write false")
    if spec["activeDeadlineSeconds"].value is not None:
        wrong = "ends each pod by its own clock; its peers see a lost connection"
        yield spec["activeDeadlineSeconds"].line(wrong, "set it on the job, not on the pod")
    for container in pods.containers:
        privileged = container.own.at("securityContext.privileged")
        if privileged.value is True:
            fix = "remove it; RDMA needs capabilities {add: [IPC_LOCK]} only"
            yield privileged.line("sees every GPU of the machine, whatever its limits say", fix)


RULES: list[Callable[[Job, Pods], Iterator[str]]] = [
    _grace,
    _shell,
    _sidecar,
    _env_by_hand,
    _unexpanded,
    _gpus,
    _ranks,
    _images,
    _rights,
]
