import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import DIGITS, ROOT
from trainer.cli import main
from trainer.config import accumulation_steps
from trainer.errors import ConfigError
from trainer.launch.job import submit_array
from trainer.reference import schema, settings_table
from trainer.settings import check, dump_config, load_config

# What is typed wrong, and what the one line must say.
BAD = [
    ("training.epoch=3", "training.epoch=3: no such setting; did you mean training.epochs?"),
    ("trainig.epochs=3", "did you mean training?"),
    ("epochs=3", "did you mean training.epochs?"),
    ("optimizer.lr=0.1", "did you mean optimizer.args.lr?"),
    ("resources.gpu_per_node=2", "did you mean resources.gpus_per_node?"),
    ("training.epochs=12:30:00", 'training.epochs="12:30:00": must be a valid integer'),
    ("training.epochs=1.5", "training.epochs=1.5"),
    ("training.epochs=no", 'training.epochs="no"'),
    ("training.batch_size='64'", 'training.batch_size="64"'),
    ("training.seed=true", "training.seed=true"),
    ("resources.nodes=0", "resources.nodes=0: must be greater than 0"),
    ("training.grad_clip_norm=.nan", "training.grad_clip_norm=NaN"),
    ("backend=slrum", "backend=slrum: must be one of slurm, kubernetes, compose, local; did you mean slurm?"),
    ("name=My Run", "name=My Run: is no job name"),
    ("container.env.NCCL_DEBUG_LEVEL=1", 'container.env.NCCL_DEBUG_LEVEL=1: must be a string; write it in quotes: "1"'),
    ("container.mounts=/data", "container.mounts=/data: must be a valid list; write a list"),
    ("slurm.options.x=[1]", "slurm.options.x=[1]"),
    ("checkpoint.keep_last=1", "checkpoint.keep_last=1: where the newest is damaged, the one before it is needed; make it at least 2"),
    ("checkpoint.folder=/data/c", "checkpoint.folder=/data/c: is no URL; write one such as s3://bucket/path, or null for RUN/checkpoints"),
    ("checkpoint.folder=memory://c", "checkpoint.folder=memory://c: is gone when the process ends; use s3://, gs:// or file://"),
    ("checkpoint.local_folder=$SLURM_TMPDIR", "checkpoint.local_folder=$SLURM_TMPDIR: is not the same place on every node (only ~ is expanded)"),
    ("checkpoint.local_folder=tmp", "checkpoint.local_folder=tmp: is not the same place on every node"),
    ("training.batch_size=7", "training.batch_size=7: cannot be shared out evenly among 2 ranks; make it a multiple of 2"),
    ("training.micro_batch_size=24", "batch_size=32: cannot be split into micro-batches of 24 on 2 ranks; make it a multiple of 48"),
    ("entrypoint=train", "entrypoint=train: is neither trainer.train nor a path that ends in .py"),
    ("entrypoint=gone.py", "entrypoint=gone.py: no such file"),
    ("entrypoint_args=[--x]", "entrypoint_args"),
    ("model.target=torch.nn", "model.target=torch.nn: is no target; write package.module:callable"),
    ("model.target=trainer.train.models:lnet", "has no 'lnet'; did you mean 'lenet'?"),
    ("model.args.image_sise=8", "did you mean 'image_size'?"),
    ("data.target=trainer.train.data:digit", "did you mean 'digits'?"),
    ("optimizer.target=torch.optim:SDG", "torch.optim has no 'SDG'; did you mean 'SGD'?"),
    ("optimizer.target=torhc.optim:SGD", "no module named 'torhc' here; did you mean 'torch'?"),
    ("optimizer.target=torch.optm:SGD", "torch has no module 'optm'; did you mean 'optim'?"),
    ("optimizer.args.momentun=0.9", "momentun=0.9: torch.optim:SGD has no such parameter; did you mean 'momentum'?"),
    ("model=null", "model: missing"),
    ("training=3", "training=3: must be a section; write a mapping of settings"),
    ("resources.ranks_per_node=two", 'resources.ranks_per_node="two": must be a valid integer'),
    ("model.sync_batchnorm=true", "model.sync_batchnorm=true"),
    ("training.seed={a", "not valid YAML"),
    ("training.epochs='!!int abc'", "training.epochs"),
    ("model.args.x=!!binary aGk=", "not valid YAML"),
    ("training.seed=5000000000", "training.seed=5000000000: must be less than 4294967296"),
    ("watch.stall_seconds=1e30", "watch.stall_seconds"),
    ("runs_dir=''", "runs_dir=: is no folder"),
    ("container.env={A=B: x}", "container.env"),
    ("a..b=1", "an empty name between dots"),
]  # fmt: skip


@pytest.mark.parametrize(("override", "words"), BAD, ids=[b[0] for b in BAD])
def test_a_bad_setting_is_one_line_and_exit_code_2(override: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(DIGITS), override]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert words in lines[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty, not a mapping"),
        ("- a", "is a list, not a mapping"),
        ("name: a\nname: b", "line 2: the key 'name' stands twice"),
        ("name: [", "not valid YAML"),
        ("resources: {nodes: 2}", "name: missing"),
        ("name: x", "model: missing; give model.target"),
    ],
)
def test_a_bad_file_is_one_line_and_exit_code_2(text: str, words: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "run.yaml"
    path.write_text(text)
    assert main(["check", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_missing_file_and_no_file() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: No such file"):
        load_config("nowhere.yaml")
    with pytest.raises(ConfigError, match="no config file given"):
        load_config("training.epochs=3")


def test_two_problems_are_two_lines() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(DIGITS, "training.epoch=1", "resources.nodes=0")
    assert len(error.value.lines) == 2


def test_later_files_and_overrides_win(folder: Path) -> None:
    site = folder / "site.yaml"
    site.write_text("training: {epochs: 7, seed: 1}\nslurm: {partition: gpu}\n")
    config = load_config(site, DIGITS, "training.seed=9", "optimizer.args.lr=1e-3")
    assert (config.training.epochs, config.training.seed, config.slurm.partition) == (40, 9, "gpu")
    assert config.optimizer.args["lr"] == 1e-3 and config.optimizer.args["momentum"] == 0.9


def test_args_go_with_their_target() -> None:
    config = load_config(
        DIGITS, "optimizer.args.lr=1e-3", "optimizer.target=torch.optim:AdamW", "model.target=trainer.train.models:lenet"
    )
    assert config.optimizer.args == {"lr": 1e-3}, "SGD's momentum is gone"
    assert config.model is not None and config.model.args["image_size"] == 8, "the same target keeps them"


def test_a_file_may_have_an_equals_sign_in_its_name(folder: Path) -> None:
    path = folder / "lr=3.yaml"
    path.write_text(DIGITS.read_text())
    assert load_config(str(path)).name == "digits"


def test_the_resolved_config_reads_back_the_same(folder: Path) -> None:
    config = load_config(
        DIGITS,
        "name=no",
        "container.env.X='1e-3'",
        "loss.args.weight=-.inf",
        "data.args.x=" + "a" * 5000,
        f"run_dir='{str(folder).replace(chr(39), chr(39) * 2)}'",
    )
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config
    assert config.name == "no" and config.run_dir == str(folder)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    check(load_config(path))


def test_the_site_file_goes_before_any_config() -> None:
    assert load_config(ROOT / "slurm" / "site.yaml", DIGITS, "backend=slurm").slurm.max_requeues == 3


def test_schema_and_table_know_every_setting() -> None:
    properties = json.loads(schema())["properties"]
    assert {"name", "resources", "training", "watch"} <= set(properties)
    table = settings_table()
    assert "| `training.batch_size` | int | `64` | Samples of one optimizer step over all ranks" in table
    assert "| `training.precision` | fp32, bf16 or fp16 |" in table
    assert all(not line.rstrip().endswith("|  |") for line in table.splitlines()), "a setting without a docstring"


@given(st.integers(1, 512), st.none() | st.integers(1, 64), st.integers(1, 64))
def test_accumulation_covers_the_batch_or_says_why_not(batch: int, micro: int | None, world: int) -> None:
    try:
        steps = accumulation_steps(batch, micro, world)
    except ValueError as error:
        assert str(batch) in str(error) and str(world) in str(error)
        assert batch % (world * (micro or 1))
    else:
        assert steps * (micro or batch // world) * world == batch


def test_tasks_of_an_array_do_not_share_a_url_for_checkpoints() -> None:
    one, other = (load_config(DIGITS, "checkpoint.folder=s3://b/p", f"training.seed={seed}") for seed in (1, 2))
    with pytest.raises(ConfigError, match=r"^checkpoint.folder=s3://b/p: several tasks of the array .*; give each its own"):
        submit_array([one, other])
