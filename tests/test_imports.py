"""Rooms that do not import each other, seen from fresh interpreters, and a package that is found however it is installed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.conftest import DIGITS, ROOT

ROOMS = ("launch", "node", "train")
SHOW = "import sys; print(*sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'submitit', 'trainer')))"


def loaded(code: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", f"{code}\n{SHOW}"], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


def room_of(modules: set[str], *rooms: str) -> set[str]:
    return {m for m in modules if m.startswith(tuple(f"trainer.{room}" for room in rooms))}


@pytest.mark.parametrize(
    "code",
    [
        "import trainer",
        "import trainer.launch.local",
        f"from trainer.cli import main; main(['check', {str(DIGITS)!r}])",
        f"from trainer.cli import main; main(['render', {str(DIGITS)!r}])",
        "import trainer.node.__main__, trainer.node.guard, trainer.node.ranks",
    ],
)
def test_the_login_side_and_the_nodes_first_steps_load_no_torch(code: str) -> None:
    modules = loaded(code)
    assert "torch" not in modules and "submitit" not in modules
    assert not room_of(modules, "train")


@pytest.mark.ranks
def test_the_training_room_loads_no_submitit_and_no_other_room() -> None:
    modules = loaded("import trainer.train.__main__")
    assert "torch" in modules and "submitit" not in modules
    assert not room_of(modules, "launch", "node")


@pytest.mark.ranks
def test_the_node_room_loads_no_other_room() -> None:
    assert not room_of(loaded("import trainer.node.__main__, trainer.node.rollcall, trainer.node.watch"), "launch", "train")


@pytest.mark.parametrize("path", sorted((ROOT / "trainer").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_import_at_the_top_and_stay_in_their_room(path: Path) -> None:
    tree = ast.parse(path.read_text())
    inside = [
        node
        for f in ast.walk(tree)
        if isinstance(f, ast.FunctionDef)
        for node in ast.walk(f)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    assert not inside, "an import inside a function"
    names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    own = path.relative_to(ROOT / "trainer").parts[0]
    if own in ROOMS:
        assert not room_of(names, *(room for room in ROOMS if room != own))


FIND = "import trainer, trainer.launch.plan as r; print(trainer.__file__); print(r.KIT); print(sorted(p.name for p in (r.KIT / 'slurm').iterdir()), (r.KIT / 'k8s').is_dir())"


def find_from(place: Path | None, cwd: Path) -> list[str]:
    environ = {**os.environ, "PYTHONPATH": str(place) if place else "", "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", FIND], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def pip(*arguments: str) -> None:
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    done = subprocess.run([sys.executable, "-m", "pip", *arguments, *offline], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def build(kind: str, folder: Path) -> Path:
    code = f"import hatchling.build as b; print(b.build_{kind}({str(folder)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.mark.parametrize("way", ["checkout", "editable", "wheel", "sdist"])
def test_the_templates_are_found_however_the_kit_is_installed(way: str, folder: Path) -> None:
    place: Path | None = folder / "site"
    if way == "checkout":
        place = ROOT
    elif way == "editable":  # how `make` sets the environment up
        place = None
    elif way == "wheel":
        pip("install", str(build("wheel", folder)), "--target", str(place))
    else:
        with tarfile.open(build("sdist", folder)) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        (source,) = (folder / "unpacked").iterdir()
        pip("install", str(source), "--target", str(place))
    where, kit, found = find_from(place, folder)
    assert "site.yaml" in found and found.endswith("True")
    assert Path(where).is_relative_to(place or ROOT), "another copy was imported"
    assert kit == (str(place / "trainer" / "_kit") if way in ("wheel", "sdist") and place else str(ROOT))
