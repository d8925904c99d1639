"""Label and field selectors of list requests."""

from __future__ import annotations

import re
from typing import Any

from tests.lab.kube.workload import Manifest


def selected(found: Manifest, query: dict[str, str]) -> bool:
    """Whether labelSelector and fieldSelector let an object through: =, ==, !=, in (...), notin (...), NAME, !NAME."""
    labels = found["metadata"].get("labels") or {}
    by_label = all(_holds(labels.get(_name(term)), term) for term in _terms(query.get("labelSelector", "")))
    return by_label and all(_holds(_at(found, _name(term)), term) for term in _terms(query.get("fieldSelector", "")))


def _terms(selector: str) -> list[str]:
    """Split by the commas that are not in parentheses."""
    return [term.strip() for term in re.split(r",(?![^(]*\))", selector) if term]


def _name(term: str) -> str:
    return re.split(r"!?==?| (?:not)?in ", term.lstrip("!"))[0]


def _at(value: Any, path: str) -> Any:
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _holds(value: Any, term: str) -> bool:
    among = re.fullmatch(r".* (not)?in \((.*)\)", term)
    if among:
        return (value in [word.strip() for word in among[2].split(",")]) != bool(among[1])
    if "!=" in term:
        return bool(value != term.partition("!=")[2])
    if "=" in term:
        return bool(value == term.partition("=")[2].lstrip("="))
    return (value is None) == term.startswith("!")
