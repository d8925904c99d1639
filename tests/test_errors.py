import pytest

from trainer.errors import ConfigError, ExitCode, Fault, write_error_file


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
