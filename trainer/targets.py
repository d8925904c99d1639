"""Targets: `package.module:callable` in a config. Found by import where torch is loaded anyway, and looked up in the
source, without running it, where a login host must answer in a fraction of a second.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, where


def resolve(setting: str, target: str) -> Callable[..., Any]:
    """Import a target.

    Args:
        setting: the dotted name of the section it stands in, for the error.
        target: `package.module:callable`.

    Raises:
        ConfigError: the module cannot be imported or has no such name.
    """
    module_name, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{setting}.target={target}: {error}; correct the target or install its package") from None
    except Exception as error:  # whatever the user's module does when it is loaded
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"{setting}.target={target}: importing it raised {text} ({where(error)}); correct that module"
        ) from None
    if not callable(found):
        raise ConfigError(f"{setting}.target={target}: is a {type(found).__name__}, not a callable; name a function or class")
    return found  # type: ignore[no-any-return]


def call(setting: str, target: str, args: dict[str, Any], *positional: Any, **extra: Any) -> Any:
    """`resolve(target)(*positional, **args, **extra)`; a call that does not fit is the config's error.

    Raises:
        ConfigError: as `resolve`, or the arguments do not fit the callable.
    """
    function = resolve(setting, target)
    try:
        return function(*positional, **args, **extra)
    except TypeError as error:
        trace = error.__traceback__
        if trace is not None and trace.tb_next is None:  # raised by the call itself, not from inside
            raise ConfigError(f"{setting}.args={args}: {error}; correct the arguments of {target}") from None
        raise


def problem(
    setting: str, target: str, args: dict[str, Any], given: Iterable[str] = (), first: int = 0, strict: bool = False
) -> str | None:
    """What is certainly wrong with a target and its arguments, as far as the source tells without running it.

    Args:
        given: parameter names that the kit fills in itself.
        first: how many parameters the kit fills in by position.
        strict: the code will run on this machine, so a package that is missing here is an error.

    Returns:
        A line for the user, or None: nothing wrong, or not to be told from here.
    """
    module_name, _, path = target.partition(":")
    name, *inner = path.split(".")
    source = _find_module(module_name, strict)
    if isinstance(source, str):
        return f"{setting}.target={target}: {source}"
    if source is None or inner:
        return None
    names = _names(source)
    if names is not None and name not in names:
        return f"{setting}.target={target}: {module_name} has no {name!r}{_did_you_mean(name, names)}"
    parameters = _parameters(source, name)
    if parameters is None:
        return None
    for key, value in args.items():
        if key not in parameters.all:
            return f"{setting}.args.{key}={value!r}: {target} has no such parameter{_did_you_mean(key, parameters.all)}"
    for key in parameters.required:
        if key not in args and key not in given and key not in parameters.all[:first]:
            return f"{setting}.args.{key}: missing; {target} needs it"
    return None


def _did_you_mean(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else "; correct it"


def _find_module(dotted: str, strict: bool) -> Path | str | None:
    """The source file of a module, a text that says what is wrong, or None where it cannot be told."""
    top, *rest = dotted.split(".")
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None and top not in sys.builtin_module_names:
        known = difflib.get_close_matches(top, ["torch", "torchvision", "trainer"], n=1, cutoff=0.75)
        if known or strict:
            return f"no module named {top!r} here" + (
                f"; did you mean {known[0]!r}?" if known else "; install it or correct the name"
            )
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    for index, part in enumerate(rest):
        if path.name != "__init__.py":
            return f"{'.'.join([top, *rest[:index]])} is a module, not a package, so it has no {part!r}; correct it"
        found = [p for p in (path.parent / part / "__init__.py", path.parent / f"{part}.py") if p.is_file()]
        if not found:
            if part in _bound(path) or any(path.parent.glob(f"{part}*")):
                return None  # bound at run time, an extension module or a namespace package
            siblings = {p.stem for p in path.parent.iterdir() if p.suffix == ".py" or p.is_dir()}
            return f"{'.'.join([top, *rest[:index]])} has no module {part!r}{_did_you_mean(part, siblings)}"
        path = found[0]
    return path


@cache
def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ast.parse("globals()")  # not to be read: nothing can be told


_DYNAMIC = {"__getattr__", "globals"}  # with these, code decides which names there are


def _bound(path: Path) -> set[str]:
    """The names that a module's own text binds, with "*" for an `import *` and "globals" if it writes into its own namespace."""
    names: set[str] = set()
    for node in ast.walk(_tree(path)):  # conditional definitions count; those inside functions do no harm here
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import):
            names.update(alias.asname or alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name):
            names.update([node.id] if isinstance(node.ctx, ast.Store) or node.id == "globals" else [])
    return names


def _names(path: Path, seen: frozenset[Path] = frozenset()) -> set[str] | None:
    """The names a module has, those from `import *` included; None where that cannot be told."""
    names = _bound(path)
    if names & _DYNAMIC:
        return None
    if "*" not in names or path in seen:
        return names
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            source = _import_source(path, node)
            more = _names(source, seen | {path}) if source else None
            if more is None:
                return None
            names |= more
    return names


def _import_source(path: Path, node: ast.ImportFrom) -> Path | None:
    """The file that a `from ... import` in `path` reads, where it is plain source."""
    if not node.level:
        found = _find_module(node.module or "", strict=False)
        return found if isinstance(found, Path) else None
    folder = path.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    stem = folder.joinpath(*(node.module or "").split("."))
    return next((p for p in (stem / "__init__.py", stem.with_suffix(".py")) if p.is_file()), None)


@dataclass(frozen=True)
class _Parameters:
    all: list[str]
    required: list[str]


def _parameters(path: Path, name: str, seen: frozenset[Path] = frozenset()) -> _Parameters | None:
    """The parameters of a function, or of a class's own `__init__`; None where a decorator, a second definition or `**kwargs`
    hides them."""
    if path in seen:
        return None
    body = _tree(path).body
    defined = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    rebound = [n for n in ast.walk(_tree(path)) if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Store)]
    imported = [
        (node, alias)
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (alias.asname or alias.name) in (name, "*")
    ]
    if rebound or len(defined) > 1:
        return None
    if defined:
        return _signature_of(defined[0])
    for node, alias in imported:
        source = _import_source(path, node)
        found = _parameters(source, name if alias.name == "*" else alias.name, seen | {path}) if source else None
        if found:
            return found
    return None


def _signature_of(node: ast.FunctionDef | ast.ClassDef) -> _Parameters | None:
    if isinstance(node, ast.FunctionDef):
        return _signature(node, skip=0)
    own = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return _signature(own[0], skip=1) if own and not node.decorator_list else None


def _signature(node: ast.FunctionDef, skip: int) -> _Parameters | None:
    arguments = node.args
    if node.decorator_list or arguments.kwarg or arguments.vararg:
        return None
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)][skip:]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [a.arg for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None]
    return _Parameters(positional + [a.arg for a in arguments.kwonlyargs], required)
