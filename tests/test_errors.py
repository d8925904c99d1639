import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed

from trainer.errors import ConfigError, ExitCode, Fault, in_words, write_error_file


def test_a_fault_is_one_line_whatever_is_in_it() -> None:
    fault = Fault("C1", "n1", "ValueError: bad\n  sample", "look\tthere", ExitCode.RANK_FAILED, rank=3)
    assert fault.line() == "FAULT C1 host=n1 rank=3: ValueError: bad sample; fix: look there"
    assert Fault("A12", "n0", "x", "y", ExitCode.JOIN, node_rank=2).line().startswith("FAULT A12 host=n0 node_rank=2: ")
    assert Fault.from_json(fault.to_json()) == fault


def test_exit_codes_keep_to_the_border_that_kubernetes_draws() -> None:
    final = {code for code in ExitCode if not code.retryable}
    assert final == {ExitCode.DONE, ExitCode.ERROR, ExitCode.CONFIG, ExitCode.RANK_FAILED, ExitCode.REFUSED}
    assert all(code < 128 for code in final) and all(128 <= code < 256 for code in set(ExitCode) - final)
    assert not {130, 137, 143} & set(ExitCode), "what a shell makes of signals must stay apart"


def _bad_sample() -> None:
    raise ValueError("bad\nsample")


def test_the_error_file_has_type_message_and_the_users_line(tmp_path) -> None:
    path = tmp_path / "error.json"
    with pytest.raises(ValueError) as caught:
        _bad_sample()
    write_error_file(str(path), caught.value)
    text = path.read_text()
    assert '"type": "ValueError"' in text and '"message": "bad sample"' in text and '"where": "test_errors.py:' in text
    write_error_file(str(path), ConfigError("later"))
    assert path.read_text() == text, "the first reason stands"


def _caught(what: Callable[[], object]) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            what()
        except Exception as error:
            write_error_file(f"{folder}/error.json", error)
        return dict(json.loads(Path(folder, "error.json").read_text()))


def _from_python() -> None:
    raise RuntimeError("failed to connect to the database")


def _from_native_code() -> None:
    torch.zeros(2, 3) @ torch.zeros(2, 3)


def _from_native_code_and_wrapped() -> None:
    try:
        _from_native_code()
    except RuntimeError as error:
        raise RuntimeError(f"step 3: {error}") from error


def test_it_is_known_whether_python_code_outside_torch_has_raised() -> None:
    assert _caught(_from_python)["own"] is True
    assert _caught(_from_native_code)["own"] is False
    assert _caught(_from_native_code_and_wrapped)["own"] is False
    assert _caught(lambda: torch.distributed.all_reduce(torch.ones(1)))["own"] is False, "raised by torch's Python code"


class Mute(Exception):
    def __str__(self) -> str:
        raise TypeError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("bad\n  sample 7"), "ValueError: bad sample 7 (test_errors.py:"),
        (AssertionError(), "AssertionError (test_errors.py:"),
        (Mute(), "Mute (test_errors.py:"),
    ],
)
def test_an_exception_in_words_whatever_it_is(error: Exception, words: str, tmp_path: Path) -> None:
    try:
        try:
            raise error
        finally:
            raise KeyError("on the way out")
    except KeyError as last:
        assert in_words(last).startswith(words)
        write_error_file(str(tmp_path / "error.json"), last)
    told = json.loads((tmp_path / "error.json").read_text())
    assert told["type"] == "KeyError" and told["first"]["type"] == type(error).__name__
