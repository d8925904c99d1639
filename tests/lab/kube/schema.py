"""Manifests as a strict API server takes them: an unknown field, a wrong type or a missing field is an error with its path.

CRDs come from shared/lab/kubernetes/crds beside the checkout; without it a PyTorchJob is held against PyPI's models
(models.py) and only the pod templates and the rules of the other kinds are looked at. Pods and core kinds: PyPI's
kubernetes-validate.
kubectl apply --dry-run=client checks nothing of all this, even with a real server.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.lab.kube import models, rules
from tests.lab.kube.workload import Manifest

CRDS = Path(__file__).resolve().parents[4] / "shared" / "lab" / "kubernetes" / "crds"
KUBERNETES = "1.32"
CRD_GROUPS = ("kubeflow.org", "trainer.kubeflow.org", "jobset.x-k8s.io", "kueue.x-k8s.io")
_LIMITS = ["minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties", "multipleOf"]
_KEPT = {"type", "enum", "pattern", "required", *_LIMITS}
_TEXT = 200  # characters of a message

Schema = dict[str, Any]


def missing() -> str:
    """Why manifests cannot be validated here; empty if they can."""
    wanted = {"jsonschema": "jsonschema", "kubernetes_validate": "kubernetes-validate"}
    if not CRDS.is_dir():
        wanted |= {"kubernetes": "kubernetes", "kubeflow": "kubeflow-training"}
    absent = [package for module, package in wanted.items() if importlib.util.find_spec(module) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def check(manifest: Manifest) -> list[str]:
    """All that is wrong with a manifest, each as PATH: TEXT; the schema's complaints come before the rules'."""
    version, kind = str(manifest.get("apiVersion")), str(manifest.get("kind"))
    errors = list(_schema_errors(manifest, version, kind))
    if not errors:  # the rules may count on the schema
        errors += rules.violations(manifest)
    return list(dict.fromkeys(errors))  # a CRD has most of core/v1 in it: they say the same


def _schema_errors(manifest: Manifest, version: str, kind: str) -> Iterator[str]:
    if version.partition("/")[0] not in CRD_GROUPS:
        try:
            yield from _complaints(_core(kind, version), manifest)
        except FileNotFoundError:
            yield f"kind: there is no {version} {kind}"
        return
    if CRDS.is_dir():
        if (version, kind) not in _crds():
            yield f"kind: there is no {version} {kind}"
            return
        yield from _complaints(_crds()[version, kind], manifest)
    elif models.knows(kind):
        yield from models.violations(manifest)
    yield from _complaints(_core("ObjectMeta", "meta/v1"), manifest.get("metadata") or {}, ("metadata",))
    for path, template in rules.pod_templates(manifest):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template.get("metadata") or {}, "spec": template["spec"]}
        yield from _complaints(_core("Pod", "v1"), pod, path)


def _complaints(validator: Any, value: Any, above: tuple[str, ...] = ()) -> Iterator[str]:
    for error in validator.iter_errors(value):
        path = [*above, *map(str, error.absolute_path)]
        if error.validator == "additionalProperties" and isinstance(error.instance, dict):
            for field in error.instance.keys() - (error.schema.get("properties") or {}).keys():
                yield f"{'.'.join([*path, field])}: unknown field"
        else:
            yield f"{'.'.join(path) or '<root>'}: {error.message[:_TEXT]}"


@functools.lru_cache
def _core(kind: str, version: str) -> Any:
    """A validator that finds all errors of a core kind; kubernetes_validate itself stops at the first."""
    utils = importlib.import_module("kubernetes_validate.utils")
    jsonschema = importlib.import_module("jsonschema")
    folder = f"kubernetes-json-schema/v{KUBERNETES}.0-local-strict"
    name = f"{kind.lower()}-" + re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", version)
    schema = utils.schema_contents(f"{folder}/{name}.json", KUBERNETES)
    definitions = utils.schema_contents(f"{folder}/_definitions.json", KUBERNETES)
    registry = utils.Resource.from_contents(definitions) @ (utils.Resource.from_contents(schema) @ utils.Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


@functools.lru_cache
def _crds() -> dict[tuple[str, str], Any]:
    jsonschema = importlib.import_module("jsonschema")
    strict = jsonschema.validators.extend(jsonschema.Draft202012Validator, {"listMap": _list_map})
    found = {}
    for file in sorted(CRDS.glob("*.json")):
        spec = json.loads(file.read_text())["spec"]
        for version in spec["versions"]:
            key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            found[key] = strict(_strict(version["schema"]["openAPIV3Schema"], root=True))
    return found


def _strict(structural: Any, root: bool = False) -> Any:
    """A structural schema as a JSON schema in which a field that the server would prune is an error."""
    if not isinstance(structural, dict):
        return structural
    made: Schema = {key: value for key, value in structural.items() if key in _KEPT}
    either = bool(structural.get("x-kubernetes-int-or-string"))
    if either:
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    if structural.get("format") in ("int32", "int64") and "minimum" not in made:
        bits = int(structural["format"][3:]) - 1
        made |= {"minimum": -(2**bits), "maximum": 2**bits - 1}
    if structural.get("nullable") and "type" in made:
        made["type"] = [made["type"], "null"]
    if not either:  # these only validate: what they name is not known for that
        made |= {key: structural[key] for key in ("allOf", "anyOf", "oneOf") if key in structural}
    return made | _members(structural, root)


def _members(structural: Schema, root: bool) -> Schema:
    """Fields, items and values of a structural schema."""
    made: Schema = {}
    fields = dict(structural.get("properties") or {})
    if root or structural.get("x-kubernetes-embedded-resource"):
        fields |= {"apiVersion": {"type": "string"}, "kind": {"type": "string"}}
        fields["metadata"] = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    if fields:
        made["properties"] = {key: _strict(value) for key, value in fields.items()}
    if "items" in structural:
        made["items"] = _strict(structural["items"])
    if structural.get("x-kubernetes-list-type") == "map":
        of_item = structural["items"].get("properties") or {}
        made["listMap"] = [(key, (of_item.get(key) or {}).get("default")) for key in structural["x-kubernetes-list-map-keys"]]
    values = structural.get("additionalProperties")
    if isinstance(values, dict):
        made["additionalProperties"] = _strict(values)
    elif structural.get("type") == "object" and values is not True and not structural.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made


def _list_map(_: Any, keys: list[tuple[str, Any]], items: Any, __: Any) -> Iterator[Exception]:
    """x-kubernetes-list-type: map: no two items with the same keys."""
    error = importlib.import_module("jsonschema").ValidationError
    seen = set()
    for place, item in enumerate(items if isinstance(items, list) else ()):
        identity = tuple(item.get(key, default) for key, default in keys) if isinstance(item, dict) else (place,)
        if identity in seen:
            yield error(f"a second item with {dict(zip([key for key, _ in keys], identity, strict=True))}", path=[place])
        seen.add(identity)
