"""What `trainer lint` looks at, in large: each kind of job as nodes, ranks and the pod templates that its controller fills in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from trainer.launch.lint.fields import Container, Field

RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
STEP = "trainer.kubeflow.org/trainjob-ancestor-step"
_REPLICA_TYPES = {"master": "Master", "worker": "Worker"}
_PATCHES = ("runtimePatches", "podTemplateOverrides", "podSpecOverrides")  # trainer 2.2+, 2.1, 2.0


@dataclass(frozen=True)
class Pods:
    """One pod template, and how many pods are made of it."""

    template: Field
    count: int
    restart: Field  # the field that rules whether a pod is restarted
    containers: list[Container]
    whole: bool = True  # False: part of the pod is not in these files, so nothing can be called missing
    replica_type: str = ""

    @property
    def spec(self) -> Field:
        """The pod's spec."""
        return self.template["spec"]

    @property
    def main(self) -> Container | None:
        """The container that trains."""
        return next((c for c in self.containers if c.trains), None)

    def volumes(self) -> dict[str, Field]:
        """The pod's volumes by name."""
        return {volume["name"].text: volume for volume in self.spec["volumes"].each()}


@dataclass(frozen=True)
class Job:
    """A job of any kind. Numbers that these files do not tell are 0."""

    top: Field
    kind: str  # PyTorchJob, TrainJob, TrainingRuntime (one that no TrainJob here uses) or Job
    nodes: int
    nproc: Field
    pods: list[Pods]
    files: list[Field]  # all documents
    runtime: Field | None = None
    injected: frozenset[str] = field(default_factory=frozenset)  # variables that the controller sets

    @property
    def name(self) -> str:
        """Its name, with what the API server puts behind a generateName."""
        prefix = self.top.at("metadata.generateName").text
        return self.top.at("metadata.name").text or (f"{prefix}xxxxx" if prefix else "")

    def documents(self, *kinds: str) -> list[Field]:
        """The documents of these kinds."""
        return [document for document in self.files if document["kind"].text in kinds]


def jobs(documents: list[Field]) -> list[Job]:
    """Every job in the files, and every runtime that no TrainJob in them uses."""
    return list(_jobs(documents))


def _jobs(documents: list[Field]) -> Iterator[Job]:
    used = []
    for document in documents:
        kind = document["kind"].text
        if kind == "PyTorchJob":
            yield _pytorchjob(document, documents)
        elif kind == "Job" and (job := _indexed_job(document, documents)):
            yield job
        elif kind == "TrainJob":
            job = _trainjob(document, documents)
            used.append(job.runtime)
            yield job
    for document in documents:
        if document["kind"].text in RUNTIMES and document not in used:
            nodes = document.at("spec.mlPolicy.numNodes").number or 1
            yield Job(
                document,
                "TrainingRuntime",
                nodes,
                document.at("spec.trainer"),
                _runtime_pods(document, nodes),
                documents,
                document,
            )


def _pytorchjob(top: Field, documents: list[Field]) -> Job:
    specs = top.at("spec.pytorchReplicaSpecs").each()
    pods = []
    for spec in specs:
        kind = _REPLICA_TYPES.get(spec.key.lower(), spec.key)
        number = spec["replicas"].number
        containers = _containers(spec["template"], "pytorch")
        pods.append(Pods(spec["template"], 1 if number is None else number, spec["restartPolicy"], containers, replica_type=kind))
    injected = {"PET_NPROC_PER_NODE", "PET_NNODES"}
    if any(p.replica_type == "Master" for p in pods):
        injected |= {"MASTER_ADDR", "MASTER_PORT", "PET_MASTER_ADDR", "PET_MASTER_PORT", "WORLD_SIZE", "RANK", "PET_NODE_RANK"}
    if top.at("spec.elasticPolicy").value is not None:
        injected |= {"PET_RDZV_ENDPOINT", "PET_RDZV_BACKEND"}
    nodes = sum(p.count for p in pods)
    return Job(top, "PyTorchJob", nodes, top.at("spec.nprocPerNode"), pods, documents, injected=frozenset(injected))


def _trainjob(top: Field, documents: list[Field]) -> Job:
    ref, trainer = top.at("spec.runtimeRef"), top.at("spec.trainer")
    wanted = (ref["kind"].text or "ClusterTrainingRuntime", ref["name"].text)
    runtime = next((d for d in documents if (d["kind"].text, d.at("metadata.name").text) == wanted), None)
    nodes = trainer["numNodes"].number or 0
    if runtime is not None:
        nodes = nodes or runtime.at("spec.mlPolicy.numNodes").number or 1
        whole = all(top["spec"][patch].value is None for patch in _PATCHES)
        pods = _runtime_pods(runtime, nodes, trainer, whole)
    else:
        nothing = Field(top.where, "spec.trainer", None)
        pods = [Pods(nothing, nodes, nothing, [Container(nothing, True, trainer)], whole=False)]
    names = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")
    return Job(top, "TrainJob", nodes, trainer["numProcPerNode"], pods, documents, runtime, frozenset(names))


def trainer_job(runtime: Field) -> Field | None:
    """The replicated job of a runtime that trains: by its label, else by what it is most likely meant to be."""
    found = runtime.at("spec.template.spec.replicatedJobs").each()
    labelled = [job for job in found if job.at("template.metadata.labels")[STEP].text == "trainer"]
    named = [job for job in found if job["name"].text == "node"]
    return next(iter(labelled or named or (found if len(found) == 1 else [])), None)


def _runtime_pods(runtime: Field, nodes: int, trainer: Field | None = None, whole: bool = True) -> list[Pods]:
    job = trainer_job(runtime)
    if job is None:
        return []
    template = job.at("template.spec.template")
    return [Pods(template, nodes, template.at("spec.restartPolicy"), _containers(template, "node", trainer), whole)]


def _indexed_job(top: Field, documents: list[Field]) -> Job | None:
    """A Job that trains on several pods or runs a launcher; any other is none of our business."""
    template = top.at("spec.template")
    containers = _containers(template, "")
    nodes = max(top.at("spec.completions").number or 1, top.at("spec.parallelism").number or 1)
    indexed = top.at("spec.completionMode").text == "Indexed"
    if not (nodes > 1 or indexed or any(c.launcher in ("trainer", "torchrun") for c in containers)):
        return None
    pods = Pods(template, nodes, template.at("spec.restartPolicy"), containers)
    env = pods.main.env if pods.main is not None else []
    nproc = next((e["value"] for e in env if e["name"].text == "PET_NPROC_PER_NODE"), Field(top.where, "spec", None))
    return Job(top, "Job", nodes, nproc, [pods], documents)


def _containers(template: Field, main: str, trainer: Field | None = None) -> list[Container]:
    """The containers of a template. Which one trains: the controller's by name, else the first with a launcher or GPUs."""
    own = template.at("spec.containers").each()
    named = [c for c in own if main and c["name"].text == main]
    busy = [c for c in own if (one := Container(c, False)).launcher or one.gpus]
    first = next(iter(named or busy or own), None)
    return [Container(c, c is first, trainer if c is first else None) for c in own]
