from importlib import metadata
from pathlib import Path

import pytest

from tests.conftest import DIGITS
from trainer.cli import main


def test_check_says_what_the_run_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(DIGITS), "resources.nodes=4"]) == 0
    assert capsys.readouterr().out == "ok: digits on local: 4 nodes x 2 ranks, CPU on each node\n"


def test_a_setting_may_be_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(DIGITS), "slurm.options.comment=/a/" + "b" * 5000]) == 0, capsys.readouterr()


def test_slurm_without_slurm_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.chdir(folder)
    assert main(["submit", str(DIGITS), "backend=slurm"]) == 2
    assert "error: backend=slurm: no sbatch on PATH; " in capsys.readouterr().err
    assert not list(folder.iterdir()), "nothing was made"


@pytest.mark.parametrize("argv", [["status"], ["logs", "nothing"], ["cancel", "nothing"]])
def test_a_run_that_is_not_there(argv: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(folder)
    assert main(argv) == 2
    assert "error: RUN" in capsys.readouterr().err


def test_a_folder_that_is_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(folder)]) == 2
    assert "holds no job.json" in capsys.readouterr().err


def test_logs_wants_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["logs", "--rank", "first"])
    assert "'first' is neither a rank nor all" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "file").write_text("")
    assert main(["submit", str(DIGITS), f"run_dir='{str(folder / 'file' / 'run').replace(chr(39), chr(39) * 2)}'"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: run_dir=") and "choose a folder that can be written" in line


def test_the_other_trainer_of_pypi_is_recognised(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.36")
    assert main(["check", str(DIGITS)]) == 2
    assert "trainer 0.0.36 from PyPI is installed in this environment" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "words"), [("schema", '"title": "Config"'), ("settings", "| `training.epochs` |")])
def test_schema_and_settings(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command]) == 0
    assert words in capsys.readouterr().out
