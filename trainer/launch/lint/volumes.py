"""What breaks DDP in a pod's volumes: /dev/shm, mounts and ConfigMaps that are not there, checkpoints that do not last.

Letters and numbers (E1, G8) are the fault catalogue's, A.2 is a section of the project's notes on Kubernetes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from trainer.launch.lint.fields import Container, Field
from trainer.launch.lint.jobs import Job, Pods

_SHM = "/dev/shm"
_SHM_DEFAULT = 64 << 20  # bytes that a container gets without a volume
_RUNS = "/workspace/runs"  # where the kit's image writes
_CHECKPOINTS = {"runs", "checkpoint", "checkpoints", "ckpt", "ckpts"}  # folder names that say what is in them
_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_CLUSTERS_OWN = {"kube-root-ca.crt", "istio-ca-root-cert"}  # ConfigMaps that are in every namespace
_PASSING = ("emptyDir", "ephemeral")  # gone with the pod


def _bytes(field: Field) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(|[KMGT]i|[kMGT])", field.text)
    return float(found[1]) * _UNITS[found[2]] if found else None


def _shared_memory(job: Job, pods: Pods) -> Iterator[str]:
    """E1, J4, K1: loader workers pass batches through /dev/shm."""
    main = pods.main
    if main is None or not pods.whole or pods.spec["hostIPC"].value is True:
        return
    mount = _mount_of(main, _SHM)
    if mount is None:
        wrong = f"no volume on {_SHM}, so it has 64 MiB and loader workers die of it"
        yield main.own["volumeMounts"].line(wrong, f"mount an emptyDir {{medium: Memory}} on {_SHM}")
        return
    volume = pods.volumes().get(mount["name"].text)
    if volume is None or volume["emptyDir"].value is None:
        return
    size = volume.at("emptyDir.sizeLimit")
    if volume.at("emptyDir.medium").text != "Memory":
        yield volume.at("emptyDir.medium").line(f"{_SHM} lies on a disk", "write medium: Memory")
    elif (limit := _bytes(size)) is not None and limit <= _SHM_DEFAULT:
        yield size.line(
            "no more than the 64 MiB that a pod has without it", "write 1Gi or more for each rank with loader workers"
        )


def _mount_of(container: Container, folder: str) -> Field | None:
    """The mount that a folder lies on: the deepest one above it, or exactly it for /dev/shm."""
    path = PurePosixPath(folder)
    mounts = [m for m in container.own["volumeMounts"].each() if m["mountPath"].text]
    above = [m for m in mounts if (at := PurePosixPath(m["mountPath"].text)) == path or (at in path.parents and folder != _SHM)]
    return max(above, key=lambda m: len(PurePosixPath(m["mountPath"].text).parts), default=None)


def _mounts(job: Job, pods: Pods) -> Iterator[str]:
    """A.2: every mount names a volume of the same pod."""
    volumes = pods.volumes()
    for container in pods.spec["containers"].each() + pods.spec["initContainers"].each() if pods.whole else []:
        for mount in container["volumeMounts"].each():
            name = mount["name"]
            if name.text not in volumes:
                yield name.line("no such volume in the pod", f"add it to volumes (there: {', '.join(volumes) or 'none'})")


def _config_maps(job: Job, pods: Pods) -> Iterator[str]:
    """A.2: a ConfigMap of another name than the one rendered leaves the pods in CreateContainerConfigError."""
    maps = {document.at("metadata.name").text: document for document in job.documents("ConfigMap")}
    for reference in _references(pods) if maps else []:
        name = reference["name"]
        if not name.text or reference["optional"].value is True or name.text in _CLUSTERS_OWN:
            continue
        if name.text not in maps:
            yield name.line("no such ConfigMap in these files", f"correct it (there: {', '.join(sorted(maps))})")
            continue
        data = {entry.key for part in ("data", "binaryData") for entry in maps[name.text][part].each()}
        for key in [reference["key"], *(item["key"] for item in reference["items"].each())]:
            if key.text and key.text not in data:
                yield key.line(
                    f"ConfigMap {name.text} has no such key", f"correct it (there: {', '.join(sorted(data)) or 'none'})"
                )


def _references(pods: Pods) -> Iterator[Field]:
    for volume in pods.spec["volumes"].each():
        yield volume["configMap"]
        yield from (source["configMap"] for source in volume.at("projected.sources").each())
    for container in pods.containers:
        yield from (entry.at("valueFrom.configMapKeyRef") for entry in container.env)
        yield from (entry["configMapRef"] for entry in container.own["envFrom"].each())


def _kept(job: Job, pods: Pods) -> Iterator[str]:
    """G8, G12: checkpoints must outlive the pod; said only of folders that are known to hold them."""
    main, volumes = pods.main, pods.volumes()
    if main is None or not pods.whole:
        return
    folder = _run_folder(job, main) if main.launcher == "trainer" else None
    mount = _mount_of(main, folder) if folder is not None else None
    fix = "mount a PersistentVolumeClaim that all pods can write (ReadWriteMany)"
    if folder is not None and mount is None:
        yield main.own["volumeMounts"].line(f"no volume on {folder}: checkpoints are lost with the pod", fix)
    for at in main.own["volumeMounts"].each():
        volume, parts = volumes.get(at["name"].text), set(PurePosixPath(at["mountPath"].text).parts)
        passing = [kind for kind in _PASSING if volume is not None and volume[kind].value is not None]
        if passing and (at == mount or parts & _CHECKPOINTS):
            yield at["mountPath"].line(f"an {passing[0]} volume: checkpoints are lost with the pod", fix)


def _run_folder(job: Job, main: Container) -> str | None:
    """Where `trainer node` writes: by its arguments, else by a config in a ConfigMap, else the image's default."""
    said = [word.partition("=")[2] for word, _ in main.words if re.match(r"runs?_dir=", word)]
    for document in job.documents("ConfigMap"):
        for entry in document["data"].each():
            said += re.findall(r"^runs?_dir:[ ]*[\"']?([^\s\"'#]+)", entry.text, re.MULTILINE)
    absolute = [folder for folder in said if folder.startswith("/")]
    return absolute[0] if absolute else None if said else _RUNS


def _claims(job: Job, pods: Pods) -> Iterator[str]:
    """A12, G8: a ReadWriteOnce volume is on one machine, and the pods elsewhere never start."""
    claims = {document.at("metadata.name").text: document for document in job.documents("PersistentVolumeClaim")}
    for volume in pods.spec["volumes"].each():
        claim = claims.get(volume.at("persistentVolumeClaim.claimName").text)
        if claim is None or job.nodes < 2:
            continue
        modes = claim.at("spec.accessModes").each()
        if modes and not {mode.text for mode in modes} & {"ReadWriteMany", "ReadOnlyMany"}:
            yield modes[0].line(f"only one machine can mount it, and the job has {job.nodes} pods", "write ReadWriteMany")


RULES: list[Callable[[Job, Pods], Iterator[str]]] = [_shared_memory, _mounts, _config_maps, _kept, _claims]
