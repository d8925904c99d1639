"""The manifests in k8s/ with one run's name, config, nodes and resources: parsed and patched, never built from strings."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.config import Config
from trainer.errors import ConfigError
from trainer.image import pinned

Document = dict[str, Any]

NAME = "ddp"  # what everything is called in the files
JOBS = {"pytorchjob": "PyTorchJob", "trainjob": "TrainJob", "indexed-job": "Job"}
RUNS = "/workspace/runs"
_CONFIG_MAP_BYTES = 1 << 20  # Kubernetes' limit for a ConfigMap
# What the controllers add to a job's name. Pods' names may have 63 characters; with longer ones it is admitted, and never starts.
_ADDED = {"pytorchjob": "-worker-{last}", "trainjob": "-node-0-{last}-abcde", "indexed-job": "-{last}-abcde"}
_GRACE_SECONDS = 30  # beyond the time that the ranks may take to save


def check_name(name: str, kind: str, nodes: int) -> None:
    """Refuse a name with which the job could not start.

    Raises:
        ConfigError: it is no DNS label (RFC 1035), or too long with what the controller adds.
    """
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        raise ConfigError(f"name={name}: Kubernetes wants small letters, digits and dashes, a letter first; choose another name")
    longest = name + _ADDED[kind].format(last=nodes - 1)
    if len(longest) > 63:
        raise ConfigError(
            f"name={name}: its pods would be called {longest}, {len(longest)} characters of 63; choose a shorter name"
        )


def patched(documents: list[Document], config: Config, name: str, config_text: str) -> list[Document]:
    """The documents of one run.

    Args:
        documents: what a manifest holds; left as they are.
        name: of the job and all that goes with it.
        config_text: for the ConfigMap.

    Raises:
        ConfigError: what was asked for does not fit the kind of job, or the config is too large for a ConfigMap.
    """
    kind = config.kubernetes.kind
    if config.container.mounts:
        raise ConfigError(
            f"container.mounts={config.container.mounts}: pods do not see the host's folders; use kubernetes.manifest"
        )
    if config.kubernetes.gang and kind != "pytorchjob":
        raise ConfigError(f"kubernetes.gang=true: is for kubernetes.kind=pytorchjob, not {kind}")
    if len(config_text.encode()) > _CONFIG_MAP_BYTES - 1024:
        raise ConfigError(
            f"config: {len(config_text.encode())} bytes are more than a ConfigMap may hold (1 MiB); make it smaller"
        )
    found = [_renamed(copy.deepcopy(document), name) for document in documents]
    jobs = [document for document in found if document.get("kind") == JOBS[kind]]
    if len(jobs) != 1:
        raise ConfigError(f"kubernetes.manifest={config.kubernetes.manifest}: has {len(jobs)} of {JOBS[kind]} instead of one")
    for document in found:
        if document.get("kind") == "ConfigMap" and document["metadata"]["name"] == name:
            document["data"]["config.yaml"] = config_text
    _patch_job(found, jobs[0], config)
    for template in _templates(found):
        _patch_pod(template["spec"], config)
    return found


def dump(documents: list[Document]) -> str:
    """The documents as YAML."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block_text)


def _renamed(value: Any, name: str) -> Any:
    """`ddp` and `ddp-0.ddp` under the job's own name; the volume's claim is no part of the job."""
    if isinstance(value, str):
        return re.sub(rf"^{NAME}(-0\.{NAME})?$", lambda found: f"{name}-0.{name}" if found[1] else name, value)
    if isinstance(value, dict):
        return {key: _renamed(part, name) for key, part in value.items()}
    return [_renamed(part, name) for part in value] if isinstance(value, list) else value


def _templates(documents: list[Document]) -> Iterator[Document]:
    """The pod templates of all kinds."""
    for document in documents:
        spec = document.get("spec") or {}
        if document.get("kind") == "PyTorchJob":
            yield from (replica["template"] for replica in spec["pytorchReplicaSpecs"].values())
        elif document.get("kind") == "Job":
            yield spec["template"]
        elif document.get("kind") == "TrainingRuntime":
            yield from (job["template"]["spec"]["template"] for job in spec["template"]["spec"]["replicatedJobs"])


def _patch_job(documents: list[Document], job: Document, config: Config) -> None:
    """Nodes, restarts and the queue."""
    nodes, ranks, settings = config.resources.nodes, config.resources.ranks, config.kubernetes
    spec = job["spec"]
    suspended = spec
    if settings.kind == "pytorchjob":
        suspended = spec["runPolicy"]
        spec["nprocPerNode"] = str(ranks)
        spec["runPolicy"]["backoffLimit"] = nodes * settings.max_restarts + 1  # the sum that must not be reached
        spec["pytorchReplicaSpecs"]["Worker"]["replicas"] = nodes - 1
        if nodes == 1:
            del spec["pytorchReplicaSpecs"]["Worker"]
        if settings.gang:
            spec["runPolicy"]["schedulingPolicy"] = {"minAvailable": nodes}
    elif settings.kind == "indexed-job":
        spec.update(completions=nodes, parallelism=nodes, backoffLimit=nodes * settings.max_restarts)
        values = {"PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(ranks)}
        for variable in spec["template"]["spec"]["containers"][0]["env"]:
            variable.update({"value": values[variable["name"]]} if variable["name"] in values else {})
    else:
        spec["trainer"].update(numNodes=nodes, numProcPerNode=ranks)
        (runtime,) = (document for document in documents if document.get("kind") == "TrainingRuntime")
        runtime["spec"]["mlPolicy"]["numNodes"] = nodes
        runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] = settings.max_restarts
    if settings.queue:
        suspended["suspend"] = True  # Kueue lets it go when it is admitted
        labels = {"kueue.x-k8s.io/queue-name": settings.queue, "kueue.x-k8s.io/priority-class": settings.priority_class}
        job["metadata"].setdefault("labels", {}).update({key: value for key, value in labels.items() if value})


def _patch_pod(spec: Document, config: Config) -> None:
    """Image, variables, resources and volumes of one pod template."""
    container, resources, settings = spec["containers"][0], config.resources, config.kubernetes
    start = ["trainer"] if config.container.python == "python3" else [config.container.python, "-m", "trainer"]
    container["image"] = config.container.image or pinned().built
    container["args"] = [*start, *container["args"][1:]]
    container.setdefault("env", []).extend({"name": name, "value": value} for name, value in config.container.env.items())
    container["envFrom"] = [{"secretRef": {"name": name}} for name in settings.secrets]
    needs, limits = container["resources"]["requests"], container["resources"]["limits"]
    if resources.cpus_per_node:
        needs["cpu"] = str(resources.cpus_per_node)
    if resources.memory_gb_per_node:
        needs["memory"] = limits["memory"] = f"{resources.memory_gb_per_node:g}G"
    if resources.gpus_per_node:
        limits["nvidia.com/gpu"] = resources.gpus_per_node
        spec["affinity"]["nodeAffinity"] = _driver_hint()
    if settings.rdma_resource:
        limits[settings.rdma_resource] = 1
        container["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]  # to pin memory for the network card
    spec["terminationGracePeriodSeconds"] = int(config.watch.stop_seconds) + _GRACE_SECONDS
    spec["nodeSelector"] = settings.node_selector
    spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secrets]
    for volume in spec["volumes"]:
        if volume["name"] == "runs":
            volume["persistentVolumeClaim"]["claimName"] = settings.volume
        if volume["name"] == "shm":
            volume["emptyDir"]["sizeLimit"] = f"{settings.shm_gb:g}G"
    for holder, key in ((container, "env"), (container, "envFrom"), (spec, "nodeSelector"), (spec, "imagePullSecrets")):
        if not holder[key]:
            del holder[key]


def _driver_hint() -> Document:
    """Rather machines whose driver runs the image's CUDA, as NVIDIA's feature discovery labels them."""
    wish = {"key": "nvidia.com/cuda.driver-version.major", "operator": "Gt", "values": [str(int(pinned().driver) - 1)]}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "preference": {"matchExpressions": [wish]}}]}


def read(path: Path) -> list[Document]:
    """The documents of a manifest.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return [document for document in yaml.safe_load_all(path.read_text(encoding="utf-8")) if document]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"kubernetes.manifest={path}: {' '.join(str(error).split())}; name a manifest that can be read"
        ) from None
