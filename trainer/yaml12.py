"""YAML as its 1.2 standard reads it, on top of PyYAML (which reads 1.1), and strict about repeated keys.

1.2's core schema is what people expect: `1e-3` is a number, `no` and `12:30:00` are strings, and only `true` and
`false` are booleans (https://yaml.org/spec/1.2.2/#103-core-schema).
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from trainer.errors import ConfigError

_CORE = [
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", "~nN\0"),
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own way)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(f"line {line}: the key {key!r} is not a string; put it in quotes")
            if key in mapping:
                raise ConfigError(f"line {line}: the key '{key}' stands twice in one mapping; keep one of them")
            mapping[key] = self.construct_object(value_node, deep=True)
        return mapping

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        text = str(node.value)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base) if base != 10 else int(text)

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        return float(str(node.value).lower().replace(".inf", "inf").replace(".nan", "nan"))


class _Dumper(yaml.SafeDumper):
    """Quotes every string that any reader, 1.1 or 1.2, would take for something else."""

    # PyYAML's writer asks its own resolvers whether a plain scalar is ambiguous: give it both sets.
    yaml_implicit_resolvers: dict[str, Any] = {  # noqa: RUF012
        key: list(rules) for key, rules in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        # YAML has line breaks that Python has not, and the writer would fold them: only double quotes keep them.
        style = '"' if re.search("[\x85\u2028\u2029\ufeff\r]", data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


for _tag, _pattern, _first in _CORE:
    for _class in (_Loader, _Dumper):
        _first_characters = ["" if character == "\0" else character for character in _first]
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), _first_characters)
_Loader.yaml_constructors = {  # only the core schema's tags
    tag: constructor
    for tag, constructor in _Loader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
}
_Dumper.add_representer(str, _Dumper.represent_str)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_mapping)


def load(text: str) -> Any:
    """The value of one YAML document.

    Raises:
        ConfigError: not YAML, a repeated key, a key that is no string, or a tag that names a Python object.
    """
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{where}not valid YAML: {error.problem or error.context}; see that line") from None
    except (ValueError, KeyError) as error:  # an explicit tag on a value that it does not fit
        raise ConfigError(f"not valid YAML: a tag that does not fit its value ({error}); remove it") from None
    except RecursionError:
        raise ConfigError("not valid YAML: nested too deeply; see the file") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}; see the file") from None


def dump(value: Any) -> str:
    """One YAML document that `load`, and any YAML 1.1 reader, reads back as the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
