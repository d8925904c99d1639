"""What a kubelet reads out of a pod's spec: argv, environment and volumes. Pure, but for the files of a ConfigMap."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path

from tests.lab.kube.workload import Manifest, ManifestError, Pod, whole

SHM_SIZE = 64 * 2**20  # /dev/shm of a container runtime, unless a volume is mounted there


@dataclass(frozen=True)
class Objects:
    """What a pod may refer to."""

    config_maps: dict[str, dict[str, str]]
    secrets: dict[str, dict[str, str]]
    claims: dict[str, Path]  # persistentVolumeClaim -> host folder


@dataclass(frozen=True)
class Volume:
    """A folder to mount, or a fresh tmpfs of some bytes."""

    folder: Path | None = None
    files: dict[str, str] | None = None  # of a ConfigMap or Secret
    tmpfs_bytes: int = 0
    keeps_group: bool = False  # fsGroup is given to it


@dataclass(frozen=True)
class Identity:
    """What the downward API can tell of a running pod."""

    pod: Pod
    name: str  # with a Job pod's suffix
    namespace: str
    address: str
    node: str
    uid: str


def objects(manifests: list[Manifest], claims: dict[str, Path]) -> Objects:
    """The ConfigMaps and Secrets among the manifests."""
    maps = {m["metadata"]["name"]: m.get("data") or {} for m in manifests if m["kind"] == "ConfigMap"}
    secrets = {}
    for manifest in manifests:
        if manifest["kind"] == "Secret":
            decoded = {key: base64.b64decode(value).decode() for key, value in (manifest.get("data") or {}).items()}
            secrets[manifest["metadata"]["name"]] = decoded | (manifest.get("stringData") or {})
    return Objects(maps, secrets, claims)


def expand(text: str, environ: dict[str, str]) -> str:
    """$(NAME) by the kubelet's rules: $$ is a dollar, an unknown name stays."""
    return re.sub(r"\$\$|\$\(([-._a-zA-Z0-9]+)\)", lambda m: "$" if m[0] == "$$" else environ.get(m[1], m[0]), text)


def argv(container: Manifest, environ: dict[str, str]) -> list[str]:
    """command and args; args alone go to the image's entrypoint, which executes them."""
    words = [*(container.get("command") or []), *(container.get("args") or [])]
    if not words:
        raise ManifestError(f"container {container['name']}: neither command nor args, and there is no image to have them")
    return [expand(str(word), environ) for word in words]


def environment(container: Manifest, identity: Identity, known: Objects) -> dict[str, str]:
    """The container's variables; a later entry of a name wins, and $(NAME) sees earlier ones only."""
    found = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443", "HOSTNAME": identity.pod.hostname}
    for source in container.get("envFrom") or []:
        prefix = source.get("prefix", "")
        found |= {f"{prefix}{key}": value for key, value in _referred(source, "Ref", known).items()}
    for variable in container.get("env") or []:
        if "valueFrom" in variable:
            value = _value_from(variable["valueFrom"], identity, known)
        else:
            value = expand(str(variable.get("value", "")), found)
        if value is not None:
            found[variable["name"]] = value
    return found


def volumes(pod: Pod, known: Objects) -> dict[str, Volume]:
    """The pod's volumes by name."""
    return {volume["name"]: _volume(volume, known) for volume in pod.spec.get("volumes") or []}


def _volume(volume: Manifest, known: Objects) -> Volume:
    kinds = [key for key in volume if key != "name"]
    kind = kinds[0] if kinds else "emptyDir"
    source = volume.get(kind) or {}
    if kind == "emptyDir":
        size = whole(source["sizeLimit"]) if "sizeLimit" in source else 2**30
        return Volume(tmpfs_bytes=size if source.get("medium") == "Memory" else 0, keeps_group=True)
    if kind == "persistentVolumeClaim":
        name = source["claimName"]
        if name not in known.claims:
            raise ManifestError(f"volume {volume['name']}: no claim {name} (the pod would stay Pending)")
        return Volume(folder=known.claims[name], keeps_group=True)
    if kind == "hostPath":
        return Volume(folder=Path(source["path"]))
    if kind in {"configMap", "secret"}:
        data = _data(kind, source.get("name") or source.get("secretName"), known, bool(source.get("optional")))
        items = source.get("items")
        return Volume(files={item["path"]: data[item["key"]] for item in items} if items else data)
    raise ManifestError(f"volume {volume['name']}: {kind} is not emulated")


def _data(kind: str, name: str | None, known: Objects, optional: bool) -> dict[str, str]:
    table = known.config_maps if kind == "configMap" else known.secrets
    if name in table:
        return table[name]
    if optional:
        return {}
    raise ManifestError(f"there is no {kind} {name} (the pod would hang in CreateContainerConfigError)")


def _referred(source: Manifest, ending: str, known: Objects) -> dict[str, str]:
    """The data that configMapRef, secretKeyRef or the like refers to."""
    for kind in ("configMap", "secret"):
        reference = source.get(f"{kind}{ending}")
        if reference is not None:
            return _data(kind, reference["name"], known, bool(reference.get("optional")))
    raise ManifestError(f"{', '.join(source)}: not emulated")


def _value_from(source: Manifest, identity: Identity, known: Objects) -> str | None:
    if "fieldRef" in source:
        return _field(source["fieldRef"]["fieldPath"], identity)
    data = _referred(source, "KeyRef", known)
    reference = source.get("configMapKeyRef") or source["secretKeyRef"]
    if reference["key"] not in data and not reference.get("optional"):
        raise ManifestError(f"{reference['name']} has no key {reference['key']} (CreateContainerConfigError)")
    return data.get(reference["key"])


def _field(path: str, identity: Identity) -> str:
    entry = re.fullmatch(r"metadata\.(annotations|labels)\['(.*)'\]", path)
    if entry:
        return (identity.pod.annotations if entry[1] == "annotations" else identity.pod.labels).get(entry[2], "")
    fields: dict[str, str] = {
        "metadata.name": identity.name,
        "metadata.namespace": identity.namespace,
        "metadata.uid": identity.uid,
        "spec.nodeName": identity.node,
        "spec.serviceAccountName": str(identity.pod.spec.get("serviceAccountName", "default")),
        "status.podIP": identity.address,
        "status.hostIP": identity.address,
    }
    if path not in fields:
        raise ManifestError(f"fieldRef {path}: not emulated")
    return fields[path]
