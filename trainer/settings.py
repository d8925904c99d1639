"""Reading a config: files merged left to right, then `section.key=value`, then every problem told by its dotted name."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from trainer import targets, yaml12
from trainer.config import TRAIN, Config
from trainer.errors import ConfigError
from trainer.reference import rows

_OVERRIDE = re.compile(r"^[A-Za-z_][\w.-]*=")
_SHORT = 80  # characters of a value that an error shows


def load_config(*arguments: str | Path) -> Config:
    """Read one run's config.

    Args:
        arguments: YAML files, merged in order (a later file's keys win), and `section.key=value` overrides, which win over
            all files. A value is read as YAML. Where a target is replaced by another, its `args` go with it.

    Raises:
        ConfigError: a line for each problem: dotted setting, value, remedy.
    """
    files = [a for a in arguments if not is_override(a)]
    overrides = [str(a) for a in arguments if is_override(a)]
    if not files:
        raise ConfigError("no config file given; name one, such as configs/digits.yaml")
    merged: dict[str, Any] = {}
    for file in files:
        merged = _merge(merged, _read(Path(file)))
    above: dict[str, Any] = {}
    for override in overrides:
        above = _merge(above, _parse_override(override))
    merged = _merge(merged, above)
    try:
        return Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError("\n".join(_lines(error.errors(), merged))) from None


def dump_config(config: Config) -> str:
    """The resolved config as YAML: every setting, defaults included, so that a run's file says all."""
    return yaml12.dump(config.model_dump())


def changed(config: Config) -> dict[str, str]:
    """The settings that are not at their default: `section.key` -> value as JSON."""
    return dict(_flat(config.model_dump(exclude_defaults=True), ""))


def _flat(values: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", json.dumps(value, default=str)


def check(config: Config) -> None:
    """Look at what a config names without importing any of it: targets, their arguments, the script.

    Raises:
        ConfigError: a line for each problem.
    """
    strict = config.backend == "local" or (config.backend == "slurm" and config.container.runtime == "none")
    problems = []
    if config.entrypoint == TRAIN:
        for name in ("model", "data", "loss", "optimizer"):
            section, given = getattr(config, name), ["devices"] if name == "model" else []
            first = 1 if name == "optimizer" else 0  # the parameters
            problems.append(targets.problem(name, section.target, section.args, given, first, strict))
    elif strict and not Path(config.entrypoint).is_file():
        problems.append(f"entrypoint={config.entrypoint}: no such file under {Path.cwd()}; correct the path")
    if found := [line for line in problems if line]:
        raise ConfigError("\n".join(found))


def check_resume(config: Config, folder: Path) -> None:
    """Refuse a change that the checkpoints of a run folder would refuse later, before it is written into the folder.

    Raises:
        ConfigError: the order of the samples would be another one.
    """
    file = folder / "config.yaml"
    if not file.is_file() or not any(folder.glob("checkpoints/step-*/manifest.json")):
        return
    before = load_config(file)
    for name in ("training.batch_size", "training.seed", "data.shuffle_block_size"):
        old, new = (getattr(getattr(each, name.partition(".")[0]), name.partition(".")[2], None) for each in (before, config))
        if old != new:
            raise ConfigError(
                f"{name}={new}: the checkpoints in {folder} were made with {old}, and the order of the samples "
                "hangs on it; set it back or start a new run"
            )


def refuse_stopped(config: Config, there: bool) -> None:
    """Refuse to start a run that was stopped by its stop file.

    Args:
        there: whether the file is still there.

    Raises:
        ConfigError: it is.
    """
    if there:
        raise ConfigError(f"{config.stop_file}: the run is stopped while this file is there; remove it to go on")


def is_override(argument: str | Path) -> bool:
    """Whether it is a `section.key=value`, not a file."""
    return isinstance(argument, str) and bool(_OVERRIDE.match(argument)) and not os.path.isfile(argument)  # noqa: PTH113 (any length)


def _read(path: Path) -> dict[str, Any]:
    try:
        value = yaml12.load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name a config file that can be read") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is no UTF-8 text; save it as UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        got = "empty" if value is None else f"a {type(value).__name__}"
        raise ConfigError(f"{path}: is {got}, not a mapping of settings; start from configs/digits.yaml")
    return value


def _parse_override(text: str) -> dict[str, Any]:
    dotted, _, raw = text.partition("=")
    try:
        value: Any = yaml12.load(raw)
    except ConfigError as error:
        raise ConfigError(f"{text}: {error}; quote the value for the shell") from None
    for key in reversed(dotted.split(".")):
        if not key:
            raise ConfigError(f"{text}: an empty name between dots; write section.key=value")
        value = {key: value}
    return value  # type: ignore[no-any-return]


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    if "target" in below and above.get("target", below["target"]) != below["target"]:
        merged.pop("args", None)  # they were another callable's
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _lines(details: list[ErrorDetails], merged: dict[str, Any]) -> list[str]:
    """A line for each setting: a value that fits no branch of a union is one problem, though pydantic tells it once a branch."""
    found: dict[tuple[int | str, ...], str] = {}
    for detail in details:
        key = tuple(detail["loc"] if detail["type"] == "missing" else _as_written(detail["loc"], merged))
        line = _line(detail, merged)
        if key in found and line != found[key]:
            other = re.search(r"must be (.*); correct it$", line)
            line = re.sub("; correct it$", f" or {other[1]}; correct it", found[key]) if other else found[key]
        found[key] = line
    return list(found.values())


def _line(detail: ErrorDetails, merged: dict[str, Any]) -> str:
    """One problem that pydantic found, as `setting=value: what is wrong; what to do`."""
    location = detail["loc"] if detail["type"] == "missing" else _as_written(detail["loc"], merged)
    dotted = ".".join(str(part) for part in location)
    kind, message = detail["type"], detail["msg"]
    plain = isinstance(detail["input"], str) and not kind.startswith(("int", "float", "bool"))  # else "64" must not look like 64
    value = str(detail["input"]) if plain else json.dumps(detail["input"], default=str)
    shown = f"{dotted}={value if len(value) <= _SHORT else value[: _SHORT - 3] + '...'}"
    if kind == "extra_forbidden":
        return f"{shown}: no such setting{_suggestion(location)}"
    if kind == "missing":
        return f"{dotted}: missing; give it a value"
    if kind == "value_error":
        text = message.removeprefix("Value error, ")
        return text if re.match(r"[a-z_]+(\.\w+)*(=|:)", text) else f"{shown}: {text}"
    if kind == "literal_error":
        expected = str(detail.get("ctx", {}).get("expected", ""))
        choices = re.findall(r"'([^']+)'", expected)
        close = difflib.get_close_matches(str(detail["input"]), choices, n=1)
        return f"{shown}: must be one of {', '.join(choices)}" + (f"; did you mean {close[0]}?" if close else "; choose one")
    if kind == "string_type" and isinstance(detail["input"], int | float | bool):
        return f'{shown}: must be a string; write it in quotes: "{value}"'
    hint = {"model_type": "write a mapping of settings", "dict_type": "write a mapping", "list_type": "write a list: [a, b]"}
    text = re.sub(r"a valid dictionary or instance of \w+", "a section", message.removeprefix("Input should be "))
    return f"{shown}: must be {text}; {hint.get(kind, 'correct it')}"


def _as_written(location: Sequence[int | str], merged: dict[str, Any]) -> list[int | str]:
    """The part of pydantic's location that is in the file: behind it stand the names of a union's branches."""
    path: list[int | str] = []
    value: Any = merged
    for part in location:
        known = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else {}
        if part not in known:
            break
        value = known[part]
        path.append(part)
    return path


def _suggestion(location: Sequence[int | str]) -> str:
    """The setting that was probably meant: a close name in the same section, the same name elsewhere, or in `args`."""
    *sections, key = [str(part) for part in location]
    names = [row[0] for row in rows(Config, "")]
    parent = ".".join(sections)
    prefix = f"{parent}." if parent else ""
    here = {n[len(prefix) :].split(".")[0] for n in names if n.startswith(prefix)}
    if close := difflib.get_close_matches(key, sorted(here), n=1):
        return f"; did you mean {prefix}{close[0]}?"
    if elsewhere := [n for n in names if n.split(".")[-1] == key]:
        return f"; did you mean {elsewhere[0]}?"
    if "args" in here:
        return f"; did you mean {prefix}args.{key}?"
    return f"; {parent or 'the top level'} has {', '.join(sorted(here))}"
