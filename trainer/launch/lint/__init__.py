"""`trainer lint`: a user's own Kubernetes manifests, looked at for what breaks a DDP job. Nothing is run or asked; no cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from trainer.launch.lint import indexed, kinds, network, pods, volumes
from trainer.launch.lint.fields import Field
from trainer.launch.lint.jobs import RUNTIMES, jobs

_API = {  # the versions that the rules know
    "PyTorchJob": "kubeflow.org/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    **dict.fromkeys(RUNTIMES, "trainer.kubeflow.org/v1alpha1"),
    "Job": "batch/v1",
}
_BESIDE = {
    "Service",
    "ConfigMap",
    "Secret",
    "Namespace",
    "PersistentVolumeClaim",
    "PersistentVolume",
    "LocalQueue",
    "ServiceAccount",
}


def lint(files: list[Path]) -> list[str]:
    """Look at manifests together: a Service, ConfigMap or runtime may stand in another file than the job.

    Returns:
        A line for each problem, `FILE: KIND/NAME: field: what is wrong (value); fix: what to do`; none for a good manifest.
    """
    lines: list[str] = []
    documents: list[Field] = []
    for file in files:
        try:
            found = [document for value in _load(file) for document in _flat(str(file), value)]
        except _UnreadableError as error:
            lines.append(f"{file}: {error}")
            continue
        lines += _kinds(str(file), found)
        documents += found
    found_jobs = jobs(documents)
    if documents and not lines and not found_jobs:
        lines.append(f"{documents[0].where.split(': ')[0]}: no job that trains in these files; fix: name the job's file too")
    for job in found_jobs:
        for rule in (*kinds.RULES, *indexed.RULES):
            lines += rule(job)
        for made in job.pods:
            for pod_rule in (*pods.RULES, *volumes.RULES, *network.RULES):
                lines += pod_rule(job, made)
    return list(dict.fromkeys(lines))


class _UnreadableError(Exception):
    """A file that is no YAML."""


class _Loader(yaml.SafeLoader):
    """YAML as kubectl reads it (1.1, with merge keys); a key that stands twice is an error, as it is there."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen and name != "<<":
                raise yaml.MarkedYAMLError(problem=f"the key '{name}' stands twice in one mapping", problem_mark=key.start_mark)
            seen.add(name)
        return node


def _load(file: Path) -> list[Any]:
    try:
        return list(yaml.load_all(file.read_text(encoding="utf-8"), Loader=_Loader))
    except OSError as error:
        raise _UnreadableError(f"cannot be read: {error.strerror or error}; fix: name a file that can be read") from None
    except UnicodeDecodeError:
        raise _UnreadableError("is no UTF-8 text; fix: save it as UTF-8") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        text = " ".join(str(error.problem or error.context).split())
        raise _UnreadableError(f"{place}not valid YAML: {text}; fix: correct that line") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _UnreadableError(f"not valid YAML: {' '.join(str(error).split())}; fix: correct the file") from None


def _flat(file: str, value: Any) -> Iterator[Field]:
    """The documents of a value: the items of a `List` are documents too."""
    if value is None:
        return
    document = Field(file, "", value)
    kind, meta = document["kind"].text, document["metadata"]
    if kind == "List":
        for item in document["items"].each():
            yield from _flat(file, item.value)
        return
    name = meta["name"].text or meta["generateName"].text or "?"
    yield Field(f"{file}: {kind or '?'}/{name}", "", value)


def _kinds(file: str, documents: list[Field]) -> list[str]:
    """What is said of a file by its kinds alone."""
    lines = []
    for document in documents:
        kind, version = document["kind"].text, document["apiVersion"]
        if kind in _API and version.text != _API[kind]:
            lines.append(version.line(f"a {kind} of this version is not known here", f"write {_API[kind]}"))
    found = {document["kind"].text for document in documents}
    if not found & ({*_API} | _BESIDE):
        got = ", ".join(sorted(kind or "no kind" for kind in found)) or "empty"
        lines.append(f"{file}: no PyTorchJob, TrainJob or Job in it ({got}); fix: name the file of the job")
    return lines
