"""Targets looked up in the source: what is certainly wrong is said, and nothing that may be right is refused."""

from pathlib import Path

import pytest

from trainer import targets
from trainer.errors import ConfigError

FINE = {
    "rebound": "from functools import partial\ndef net(root): ...\nnet = partial(net, root=1)\n",
    "own_after_star": "from base import *\ndef net(width=1): ...\n",
    "decorated": "import functools\n@functools.wraps(print)\ndef net(a): ...\n",
    "keywords": "def net(**anything): ...\n",
    "dynamic": "globals()['net'] = print\n",
    "lazy": "def __getattr__(name): return print\n",
    "conditional": "import sys\nif sys:\n    def net(): ...\n",
    "circle_a": "from circle_b import *\n",
    "nested": "class Box:\n    @staticmethod\n    def net(): ...\n",
    "broken": "def net(:\n",
}


@pytest.fixture
def modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FINE.items():
        (folder / f"{name}.py").write_text(text)
    (folder / "base.py").write_text("def net(depth): ...\nclass Net:\n    def __init__(self, depth, width=3): ...\n")
    (folder / "circle_b.py").write_text("from circle_a import *\ndef net(): ...\n")
    (folder / "boom.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.chdir(folder)
    targets._tree.cache_clear()
    return folder


@pytest.mark.parametrize("name", [name for name in FINE if name not in ("nested", "keywords")])
def test_what_may_be_right_is_not_refused(name: str, modules: Path) -> None:
    assert targets.problem("model", f"{name}:net", {}, strict=True) is None


def test_more_that_may_be_right(modules: Path) -> None:
    assert targets.problem("model", "keywords:net", {"any": 1}, strict=True) is None
    assert targets.problem("model", "nested:Box.net", {}, strict=True) is None
    assert targets.problem("optimizer", "base:Net", {"width": 1}, first=1, strict=True) is None, "the first comes by position"
    assert targets.problem("model", "elsewhere:net", {}) is None, "it may be in the image"


@pytest.mark.parametrize(
    ("target", "args", "words"),
    [
        ("elsewhere:net", {}, "no module named 'elsewhere' here"),
        ("base:nets", {}, "base has no 'nets'; did you mean 'net'?"),
        ("base:net", {"dept": 1}, "model.args.dept=1: base:net has no such parameter; did you mean 'depth'?"),
        ("base:Net", {}, "model.args.depth: missing; base:Net needs it"),
        ("base.deeper:net", {}, "base is a module, not a package"),
    ],
)
def test_what_is_wrong_is_said(target: str, args: dict[str, object], words: str, modules: Path) -> None:
    assert words in str(targets.problem("model", target, args, strict=True))


def test_a_module_that_fails_to_load_is_the_configs_fault(modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(modules))
    with pytest.raises(ConfigError, match=r"model.target=boom:net: importing it raised RuntimeError: no licence \(boom.py:1\)"):
        targets.resolve("model", "boom:net")
    with pytest.raises(ConfigError, match="importing it raised SyntaxError"):
        targets.resolve("model", "broken:net")
