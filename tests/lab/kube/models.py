"""A manifest held against the model classes of PyPI's kubeflow-training and kubernetes: for where the CRDs are not at hand."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from typing import Any

from tests.lab.kube.workload import Manifest

MODULES = ("kubeflow.training.models", "kubernetes.client.models")
_ROOTS = {"PyTorchJob": "KubeflowOrgV1PyTorchJob"}
_PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (int, float)}
_QUANTITIES = (".limits", ".requests", ".capacity")  # maps of strings, where numbers are taken too


def knows(kind: str) -> bool:
    return kind in _ROOTS


def violations(manifest: Manifest) -> Iterator[str]:
    """Unknown fields, wrong types and missing fields, as PATH: TEXT."""
    yield from _walk(manifest, _ROOTS[manifest["kind"]], "")


@functools.lru_cache
def _model(name: str) -> Any:
    for module in MODULES:
        found = getattr(importlib.import_module(module), name, None)
        if found is not None:
            return found
    raise LookupError(name)


def _walk(value: Any, kind: str, path: str) -> Iterator[str]:
    if value is None or kind in ("object", "datetime"):
        return
    where = path.lstrip(".") or "<root>"
    if kind.startswith("list["):
        yield from _list(value, kind[5:-1], path)
    elif kind.startswith("dict("):
        yield from _map(value, kind[5:-1].split(", ", 1)[1], path)
    elif kind in _PLAIN:
        if not isinstance(value, _PLAIN[kind]) or (kind != "bool" and isinstance(value, bool)):
            yield f"{where}: {kind} wanted, got {value!r}"
    elif not isinstance(value, dict):
        yield f"{where}: {kind} wanted, got {value!r}"
    else:
        yield from _object(value, kind, path)


def _list(value: Any, kind: str, path: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{path.lstrip('.')}: a list wanted, got {value!r}"
        return
    for place, item in enumerate(value):
        yield from _walk(item, kind, f"{path}.{place}")


def _map(value: Any, kind: str, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{path.lstrip('.')}: a map wanted, got {value!r}"
        return
    for key, item in value.items():
        if not (kind == "str" and path.endswith(_QUANTITIES)):
            yield from _walk(item, kind, f"{path}.{key}")


def _object(value: Manifest, kind: str, path: str) -> Iterator[str]:
    model = _model(kind)
    attributes = {key: attribute for attribute, key in model.attribute_map.items()}
    for key, item in value.items():
        if key in attributes:
            yield from _walk(item, model.openapi_types[attributes[key]], f"{path}.{key}")
        else:
            yield f"{path}.{key}: unknown field".lstrip(".")
    try:
        model(**{attributes[key]: item for key, item in value.items() if key in attributes})
    except (ValueError, TypeError) as error:  # a required field is missing
        yield f"{path.lstrip('.') or '<root>'}: {error}"
