"""The patches that kubectl sends: merge patches (RFC 7386), and strategic ones as far as lists of named things go."""

from __future__ import annotations

from typing import Any

_MERGE_KEYS = ("name", "containerPort", "port", "mountPath", "key")


def merged(old: Any, patch: Any, strategic: bool) -> Any:
    """The value after a patch; None in a patch removes a field."""
    if isinstance(patch, list) and strategic:
        return _merged_list(old, patch)
    if not isinstance(patch, dict):
        return patch
    made = dict(old) if isinstance(old, dict) and patch.get("$patch") != "replace" else {}
    for key, value in patch.items():
        if key.startswith("$"):
            continue  # $setElementOrder, $retainKeys: the order is kept anyway
        if value is None:
            made.pop(key, None)
        else:
            made[key] = merged(made.get(key), value, strategic)
    return made


def _merged_list(old: Any, patch: list[Any]) -> list[Any]:
    """By the first key that all items have; a list of plain values, or without such a key, is replaced."""
    items = [*(old if isinstance(old, list) else []), *patch]
    key = next((key for key in _MERGE_KEYS if all(isinstance(item, dict) and key in item for item in items)), None)
    if key is None:
        return patch
    made = {item[key]: item for item in old or []}
    for item in patch:
        if item.get("$patch") == "delete":
            made.pop(item[key], None)
        else:
            made[item[key]] = merged(made.get(item[key]), item, True)
    return list(made.values())
