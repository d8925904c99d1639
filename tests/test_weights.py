"""Weights that leave the kit, and weights that come from elsewhere."""

from __future__ import annotations

import os
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.conftest import DIGITS
from tests.jobs import SHORT, TRAINER, command, metrics, overrides
from trainer.cli import main
from trainer.errors import ConfigError
from trainer.train.checkpoint import Checkpointer
from trainer.train.distributed import World
from trainer.train.stored import name_of, part_name
from trainer.train.weights import export, load


def net(classes: int = 4) -> nn.Module:
    torch.manual_seed(classes)
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, classes))


def store(run: Path, step: int, state: dict[str, Any]) -> None:
    with closing(Checkpointer(run / "checkpoints", World())) as checkpoints:
        checkpoints.save(step, state, {})
        checkpoints.finish()


def write(run: Path, *steps: int, average: bool = False) -> nn.Module:
    """A run folder with checkpoints of one model, its weights increased by 1 at each."""
    model = net()
    for step in steps:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        mean = {name: value * 0 for name, value in model.state_dict().items()} if average else None
        store(run, step, {"model": model.state_dict(), "average": mean})
    return model


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt"])
def test_what_is_exported_loads_into_the_bare_model(name: str, tmp_path: Path) -> None:
    model = write(tmp_path, 5, 10)
    chosen, count = export(tmp_path / "checkpoints", tmp_path / name)
    found = load_file(tmp_path / name) if name.endswith(".safetensors") else torch.load(tmp_path / name)
    fresh = net()
    fresh.load_state_dict(found, strict=True)
    assert chosen.name == "step-00000010" and count == len(found)
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), model.state_dict().values(), strict=True))
    assert not list(tmp_path.glob(".*.tmp"))


def test_an_earlier_step_the_average_and_what_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, 5, 10, average=True)
    export(tmp_path / "checkpoints", tmp_path / "a.pt")
    export(tmp_path / "checkpoints", tmp_path / "b.pt", step=5, average=False)
    assert all(value.eq(0).all() for value in torch.load(tmp_path / "a.pt").values())
    assert torch.equal(torch.load(tmp_path / "b.pt")["0.bias"], net().state_dict()["0.bias"] + 1)
    with pytest.raises(ConfigError, match="no whole checkpoint of step 7 there; see trainer checkpoints"):
        export(tmp_path / "checkpoints", tmp_path / "c.pt", step=7)
    with pytest.raises(ConfigError, match=r"nowhere/c.pt: .*; choose another place"):
        export(tmp_path / "checkpoints", tmp_path / "nowhere" / "c.pt")


def test_a_tied_weight_is_exported_under_both_names(tmp_path: Path) -> None:
    weight = torch.ones(3, 3)
    store(tmp_path, 1, {"model": {"in": weight, "out": weight}, "average": None})
    export(tmp_path / "checkpoints", tmp_path / "m.safetensors")
    assert set(load_file(tmp_path / "m.safetensors")) == {"in", "out"}


@pytest.mark.parametrize(
    "foreign",
    [
        lambda state: state,
        lambda state: {f"module.{name}": value for name, value in state.items()},
        lambda state: {"state_dict": {f"module._orig_mod.{name}": value for name, value in state.items()}, "epoch": 3},
        lambda state: {"model": state, "optimizer": {"lr": 0.1}},
    ],
)
def test_weights_of_other_programs(foreign: Any, tmp_path: Path) -> None:
    source, target = net(), net()
    with torch.no_grad():
        source[0].weight += 1
    torch.save(foreign(source.state_dict()), tmp_path / "w.pt")
    assert load(target, tmp_path / "w.pt") == len(source.state_dict())
    assert torch.equal(target[0].weight, source[0].weight)


def test_a_head_for_other_classes_keeps_its_fresh_values(tmp_path: Path) -> None:
    save_file(net(4).state_dict(), tmp_path / "w.safetensors")
    model, fresh = net(9), net(9)
    with pytest.raises(ConfigError) as error:
        load(model, tmp_path / "w.safetensors")
    assert "2.bias is (4,), not (9,); 2.weight is (4, 6), not (9, 6); correct model.args" in str(error.value)
    assert load(model, tmp_path / "w.safetensors", ["2."]) == 7
    assert torch.equal(model[2].weight, fresh[2].weight) and torch.equal(model[0].weight, net(4)[0].weight)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"0.weight": torch.ones(6, 8)}, "it has no 0.bias; it has no 1.bias; it has no 1.num_batches_tracked and "),
        ({**net().state_dict(), "extra": torch.ones(1)}, "does not fit: extra is not in the model; correct"),
        ({"epoch": 3}, "holds no state dict"),
        ([1, 2], "holds no state dict"),
        (None, "No such file or directory; correct the path"),
        (b"not a file of weights", "cannot be read ("),
        (lambda: 0, "cannot be read ("),
    ],
)
def test_what_does_not_fit_is_named(content: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif callable(content):
        torch.save({"trap": os.system}, file)  # a pickle of more than tensors is never run
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ConfigError) as error:
        load(net(), file)
    assert str(error.value).startswith(f"model.weights={file}: ") and words in str(error.value)


def test_checkpoints_are_listed_with_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 5, 10, 15)
    state = tmp_path / "checkpoints" / name_of(10) / part_name(0)
    state.write_bytes(state.read_bytes()[:-7])
    assert main(["checkpoints", str(tmp_path)]) == 0
    head, first, second, third = capsys.readouterr().out.splitlines()
    today = time.strftime("%Y-%m-%d", time.localtime(state.parent.stat().st_mtime))
    assert head.split() == ["step", "saved", "MB"]
    assert re.fullmatch(rf" +5  {today} [\d:]+ +0\.0  whole", first) and third.endswith("whole")
    assert f"{state} has {state.stat().st_size} bytes instead of {state.stat().st_size + 7}" in second
    assert main(["checkpoints", str(tmp_path / "nothing")]) == 2


@pytest.mark.ranks
def test_a_run_starts_from_the_weights_of_another(folder: Path) -> None:
    first, second, out = folder / "first", folder / "second", folder / "digits.safetensors"
    code, output = command(*TRAINER, "run", *SHORT, overrides(first))
    assert code == 0, output
    code, output = command(*TRAINER, "export", str(first), str(out))
    assert code == 0 and f"{out}: " in output and "step-00000020" in output, output
    weights = f"model.weights='{str(out).replace(chr(39), chr(39) * 2)}'"
    code, output = command(
        *TRAINER, "run", str(DIGITS), "training.max_steps=1", "training.log_every_steps=1", weights, overrides(second)
    )
    assert code == 0 and " weights of " in output, output
    assert metrics(second)[0]["loss"] < metrics(first)[0]["loss"]
