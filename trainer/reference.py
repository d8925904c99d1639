"""All settings for people and editors: a table, and a JSON Schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from trainer.config import Config
from trainer.placement import Section


def schema() -> str:
    """JSON Schema of the config file, for editors."""
    return json.dumps(Config.model_json_schema(), indent=2)


def settings_table() -> str:
    """A Markdown table of every setting: dotted name, type, default, what it is."""
    lines = ["| setting | type | default | what it is |", "|---|---|---|---|"]
    for name, kind, default, text in rows(Config, ""):
        lines.append(f"| `{name}` | {kind} | {default} | {' '.join(text.split())} |")
    return "\n".join(lines)


def rows(model: type[Section], prefix: str) -> Iterator[tuple[str, str, str, str]]:
    """Dotted name, type, default and meaning of every setting of a section and those in it."""
    for name, field in model.model_fields.items():
        sections = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type) and issubclass(t, Section)]
        if sections:
            yield from rows(sections[0], f"{prefix}{name}.")
            continue
        default = "required" if field.is_required() else f"`{json.dumps(field.default)}`"
        yield f"{prefix}{name}", _type_name(field.annotation), default, field.description or ""


def _type_name(annotation: Any) -> str:
    """A type as a user would say it: `int or null`, `list of str`, `fp32, bf16 or fp16`."""
    origin, inside = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _type_name(inside[0])
    if origin is Literal:
        return ", ".join(map(str, inside[:-1])) + f" or {inside[-1]}"
    if origin is list:
        return f"list of {_type_name(inside[0])}"
    if origin is dict:
        return "mapping" if inside[1] is Any else f"mapping to {_type_name(inside[1])}"
    return " or ".join(_type_name(part) for part in inside) if inside else str(annotation.__name__)
