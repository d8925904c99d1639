import fcntl
import json
import logging
import os
import pty
import select
import struct
import termios
import threading
from pathlib import Path

import pytest

from trainer.train.metrics import Metrics, Progress


def records(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_records_are_lines_of_json(folder: Path) -> None:
    metrics = Metrics(folder)
    metrics.write("train", 10, epoch=1, loss=0.1234567890123)
    metrics.close()
    (record,) = records(folder)
    assert (record["kind"], record["step"], record["loss"]) == ("train", 10, 0.1234567890123)


def test_a_resume_drops_what_is_done_again_and_a_line_cut_by_a_kill(folder: Path) -> None:
    metrics = Metrics(folder)
    for step in (5, 10, 12):
        metrics.write("train", step, loss=1.0)
    metrics.close()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "st')
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(f"damaged\n[]\n{text}")
    metrics = Metrics(folder, from_step=10)
    metrics.write("train", 11, loss=2.0)
    metrics.close()
    assert [record["step"] for record in records(folder)] == [5, 10, 11]


def test_a_record_whose_end_of_line_was_cut_by_a_kill_does_not_run_into_the_next(folder: Path) -> None:
    metrics = Metrics(folder)
    metrics.write("train", 10, loss=1.0)
    metrics.close()
    os.truncate(folder / "metrics.jsonl", (folder / "metrics.jsonl").stat().st_size - 1)
    metrics = Metrics(folder, from_step=10)
    metrics.write("train", 11, loss=2.0)
    metrics.close()
    assert [record["step"] for record in records(folder)] == [10, 11]


def test_tensorboard_gets_the_same_values(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = Metrics(folder, tensorboard=True)
    metrics.write("eval", 10, eval_loss=0.5)
    metrics.close()
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    (scalar,) = events.Scalars("eval/eval_loss")
    assert (scalar.step, scalar.value) == (10, 0.5)


def test_elsewhere_than_on_a_terminal_it_is_tidy_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = Progress(done=0, total=100, terminal=None)
    progress.show(10, 1, 5, {"loss": 0.51234, "accuracy": 0.9, "samples": 640, "samples_per_second": 12345.6, "lr": 0.1})
    assert "epoch 1/5 step 10/100 loss 0.5123 accuracy 0.9 images/s 12,346 lr 0.1 ETA 00:0" in caplog.text


def test_on_a_terminal_it_is_a_bar(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reader, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    progress = Progress(done=0, total=100, terminal=terminal)
    progress.show(50, 2, 4, {"loss": 0.25, "samples_per_second": 1000.0})
    progress.say("epoch 2 evaluation")
    assert [thread.name for thread in threading.enumerate() if "tqdm" in thread.name] == []
    progress.close()
    text = ""
    while select.select([reader], [], [], 0.5)[0]:
        text += os.read(reader, 65536).decode()
    assert "epoch 2/4:  50%" in text and "loss 0.25" in text and "images/s 1,000" in text
    assert "epoch 2 evaluation" in caplog.text
    for descriptor in (reader, terminal):
        os.close(descriptor)
