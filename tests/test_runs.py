"""Whole runs on this machine: what is left in the folder, what survives a kill, what a stop and a fault look like."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DIGITS
from tests.forked import free_port
from tests.jobs import (
    TRAINER,
    command,
    equal,
    events,
    finish,
    logs,
    losses,
    metrics,
    overrides,
    processes_of,
    saved,
    start,
    wait_until,
)
from trainer.errors import ExitCode

pytestmark = pytest.mark.ranks

# 200 samples: 25 steps of 8 in an epoch; random augmentation and dropout, so that every generator counts.
SLOW = [
    str(DIGITS),
    "training.batch_size=8",
    "training.epochs=2",
    "training.log_every_steps=1",
    "checkpoint.every_steps=5",
    "model.target=tests.targets:dropout",
    "data.target=tests.targets:augmented",
]


def slow(run: Path, seconds: float = 0.005, **more: object) -> list[str]:
    settings = [f"{name.replace('__', '.')}={value}" for name, value in more.items()]
    return [*SLOW, overrides(run), f"data.args={{seconds: {seconds}}}", *settings]


def same_as(uninterrupted: Path, run: Path) -> bool:
    """To the last bit: every step's loss, once, and the weights."""
    return losses(run) == losses(uninterrupted) and equal(saved(run), saved(uninterrupted))


def at_step(run: Path, step: int) -> bool:
    return wait_until(lambda: metrics(run) and metrics(run)[-1]["step"] >= step)


def test_the_run_folder_tells_the_whole_run(folder: Path) -> None:
    run = folder / "run"
    code, output = command(*TRAINER, "submit", str(DIGITS), "training.epochs=2", overrides(run))
    assert code == 0 and f"follow with: trainer logs --follow {run}" in output
    code, output = command(*TRAINER, "logs", "--follow", "--rank", "all", str(run))
    assert code == 0 and "rank-0000: [" in output and f"{run}: done: the run ended well" in output, output + logs(run)
    names = {str(path.relative_to(run)) for path in run.rglob("*") if "checkpoints" not in path.parts}
    host = os.uname().nodename
    assert names == {
        ".lock",
        ".submit",
        "config.yaml",
        "events.jsonl",
        "job.json",
        "logs",
        "logs/attempt-000",
        f"logs/attempt-000/rank-0000.{host}.log",
        f"logs/attempt-000/rank-0001.{host}.log",
        "logs/node-0000.log",
        "metrics.jsonl",
        "plan.txt",
        "rollcall.json",
    }
    assert [record["step"] for record in metrics(run)] == [10, 20, 30, 40, 50, 60, 70, 80, 88]
    assert [(record["step"], record["eval_samples"]) for record in metrics(run, "eval")] == [(44, 360), (88, 360)]
    assert (run / "checkpoints" / "latest").resolve().name == "step-00000088"


def test_render_prints_what_submit_sends(folder: Path) -> None:
    settings = [str(DIGITS), "training.max_steps=2", overrides(folder / "run"), "resources.nodes=2", "resources.ranks_per_node=1"]
    code, rendered = command(*TRAINER, "render", *settings)
    assert code == 0 and not (folder / "run").exists()
    code, output = command(*TRAINER, "submit", *settings)
    assert code == 0, output
    assert rendered == (folder / "run" / "plan.txt").read_text()
    assert command(*TRAINER, "logs", "-f", str(folder / "run"))[0] == 0
    job = json.loads((folder / "run" / "job.json").read_text())
    for rank, sent in enumerate(job["commands"]):
        assert sent["environ"]["PET_NODE_RANK"] == str(rank) and sent["argv"][-1] == f"{folder}/run/config.yaml"
        assert f"PET_NODE_RANK={rank}" in rendered


@pytest.mark.parametrize("kill_at", [3, 14, 27])
def test_a_killed_run_goes_on_bit_for_bit(kill_at: int, uninterrupted: Path, folder: Path) -> None:
    run = folder / "run"
    node = start(*TRAINER, "node", *slow(run))
    assert at_step(run, kill_at)
    node.kill()
    finish(node)
    assert wait_until(lambda: not processes_of(run), 10), "something was left behind"
    code, output = command(*TRAINER, "node", str(run / "config.yaml"))
    assert code == 0, output
    found = re.search(r"resuming at step (\d+)", output)
    assert (int(found[1]) if found else 0) >= kill_at // 5 * 5 - 5, output  # the newest save may have been under way
    assert same_as(uninterrupted, run)
    assert (run / "logs" / "attempt-001").is_dir(), "the first attempt's logs are still there"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_stop_signal_saves_and_the_next_start_goes_on(number: signal.Signals, uninterrupted: Path, folder: Path) -> None:
    run = folder / "run"
    node = start(*TRAINER, "node", *slow(run, data__num_workers=1))
    assert at_step(run, 7)
    node.send_signal(number)
    node.send_signal(signal.SIGTERM)  # a second one changes nothing
    code, output = finish(node)
    step = metrics(run)[-1]["step"]
    assert code == ExitCode.STOPPED, output
    assert "asking the ranks to save and stop" in output and f"at step {step} of 50, saved" in output and "FAULT" not in output
    assert not processes_of(run)
    code, output = command(*TRAINER, "node", str(run / "config.yaml"))
    assert code == 0 and f"resuming at step {step}" in output, output
    assert same_as(uninterrupted, run)


def test_a_resume_at_another_world_size_sees_each_sample_once_and_learns_the_same(uninterrupted: Path, folder: Path) -> None:
    """2 -> 1 -> 4 ranks; without dropout, whose randomness belongs to ranks."""
    settings = {"model__target": "trainer.train.models:lenet", "model__args": "{channels: 1, image_size: 8, classes: 10}"}
    whole, run, log = folder / "whole", folder / "run", folder / "ids"
    assert command(*TRAINER, "node", *slow(whole, 0.0, **settings))[0] == 0
    settings["data__args"] = f"{{seconds: 0, log: {json.dumps(str(log))}}}"
    for ranks, steps in ((2, 6), (1, 14), (4, 25)):
        code, output = command(
            *TRAINER,
            "node",
            *slow(run, 0.0, **settings, resources__ranks_per_node=ranks),
            f"training.max_steps={steps}",
            "schedule.decay=constant",
        )
        assert code == 0, output
    assert sorted(map(int, log.read_text().split())) == list(range(200)), "one epoch, each sample once"
    constant = folder / "constant"
    del settings["data__args"]
    assert command(*TRAINER, "node", *slow(constant, 0.0, **settings), "training.max_steps=25", "schedule.decay=constant")[0] == 0
    for (step, loss), (other, expected) in zip(losses(run), losses(constant), strict=True):
        assert step == other and loss == pytest.approx(expected, abs=1e-6)
    assert equal(saved(run), saved(constant), within=1e-6)


def test_another_order_of_the_samples_is_refused_at_a_resume(folder: Path) -> None:
    assert command(*TRAINER, "node", *slow(folder / "run", 0.0), "training.max_steps=2")[0] == 0
    for change, before in {"training.batch_size=16": 8, "training.seed=3": 0, "data.shuffle_block_size=4": 1}.items():
        code, output = command(*TRAINER, "node", *slow(folder / "run", 0.0), change)
        assert code == ExitCode.CONFIG
        assert re.match(rf"error: {change}: the checkpoints in .* were made with {before}, ", output.splitlines()[-1]), output
    code, output = command(*TRAINER, "node", str(folder / "run" / "config.yaml"))
    assert code == 0 and "resuming at step 2" in output, "the refused change was not written into the run"


def test_cancel_and_a_second_submit_of_the_same_run(folder: Path) -> None:
    run = folder / "run"
    two = {"resources__nodes": 2, "resources__ranks_per_node": 1}
    assert command(*TRAINER, "submit", *slow(run, 0.02, **two))[0] == 0
    assert at_step(run, 3), logs(run)
    code, output = command(*TRAINER, "status", str(run))
    assert "running: 2 of 2 nodes" in output
    code, output = command(*TRAINER, "submit", str(run / "config.yaml"))
    assert code == ExitCode.CONFIG and "its run is still going on" in output
    assert "asked 2 nodes to save and stop" in command(*TRAINER, "cancel", str(run))[1]
    assert wait_until(lambda: ": stopped: " in command(*TRAINER, "status", str(run))[1]), logs(run)
    assert "not running" in command(*TRAINER, "cancel", str(run))[1]
    assert command(*TRAINER, "submit", str(run / "config.yaml"))[0] == 0
    assert "done: the run ended well" in command(*TRAINER, "logs", "-f", str(run))[1], logs(run)
    assert [step for step, _ in losses(run)] == list(range(1, 51))


def test_cancel_now_kills_and_the_status_says_so(folder: Path) -> None:
    run = folder / "run"
    assert command(*TRAINER, "submit", *slow(run, 0.02, data__num_workers=2))[0] == 0
    assert at_step(run, 2), logs(run)
    assert "killed 1 nodes" in command(*TRAINER, "cancel", "--now", str(run))[1]
    assert wait_until(lambda: not processes_of(run), 10)
    assert "lost: the run: 1 of 1 nodes ended without a word" in command(*TRAINER, "status", str(run))[1]


def test_a_killed_foreground_run_takes_its_nodes_along(folder: Path) -> None:
    run = folder / "run"
    front = start(*TRAINER, "run", *slow(run, 0.02, resources__nodes=2, resources__ranks_per_node=1))
    assert at_step(run, 2), logs(run)
    front.kill()
    assert wait_until(lambda: not processes_of(run), 20)
    finish(front)


def test_two_runs_at_once_do_not_meet(folder: Path) -> None:
    two = {"resources__nodes": 2, "resources__ranks_per_node": 1, "training__max_steps": 10}
    runs = [folder / "a", folder / "b"]
    fronts = [start(*TRAINER, "run", *slow(run, 0.0, **two)) for run in runs]
    for front in fronts:
        code, output = finish(front)
        assert code == 0, output
    assert losses(runs[0]) == losses(runs[1])


def fault_of(output: str) -> str:
    """The one fault line; nothing may come after it."""
    lines = output.splitlines()
    assert [line for line in lines if line.startswith("FAULT ")] == lines[-1:], output
    return lines[-1]


SCRIPT = """
import os, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
for step in range(400):
    if dist.get_rank() == {rank} and step == 3:
        {what}
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
"""


@pytest.mark.parametrize(
    ("what", "rank", "code", "words"),
    [
        ("raise ValueError('bad sample')", 1, ExitCode.RANK_FAILED, "ValueError: bad sample (train.py:6)"),
        ("sys.exit(7)", 0, ExitCode.RANK_FAILED, "exited with 7 (train.py:6)"),
        ("sys.exit('no data')", 1, ExitCode.RANK_FAILED, "exited with 1"),
        ("raise ConnectionRefusedError(111, 'Connection refused')", 1, ExitCode.RANK_FAILED, "ConnectionRefusedError: "),
        ("assert step < 3", 0, ExitCode.RANK_FAILED, "AssertionError (train.py:6)"),
        ("os.kill(os.getpid(), 40)", 0, ExitCode.RANK_KILLED, "killed by signal 40"),
        ("os._exit(9)", 1, ExitCode.RANK_FAILED, "vanished with exit code 9, no message"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, ExitCode.RANK_KILLED, "killed by signal 9 (SIGKILL)"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 0, ExitCode.RANK_KILLED, "killed by signal 11 (SIGSEGV)"),
    ],
)
def test_the_first_to_go_wrong_is_named_on_every_node(what: str, rank: int, code: ExitCode, words: str, folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.format(what=what, rank=rank))
    (folder / "run.yaml").write_text("name: faulty\nentrypoint: train.py\nresources: {nodes: 2, ranks_per_node: 1}\n")
    run = folder / "run"
    found, output = command(*TRAINER, "run", "run.yaml", overrides(run), cwd=folder)
    assert found == code, output
    line = fault_of(output)
    assert line.startswith(f"FAULT C1 host={os.uname().nodename} rank={rank}: {words}") and "; fix: " in line
    assert fault_of((run / "logs" / "node-0001.log").read_text()) == line
    assert not processes_of(run)
    assert f"failed: {line}" in command(*TRAINER, "status", str(run))[1]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_rank_that_leaves_early_with_0_is_the_culprit(nodes: int, folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.format(what="sys.exit(0)", rank=1))
    (folder / "run.yaml").write_text(
        f"name: early\nentrypoint: train.py\nresources: {{nodes: {nodes}, ranks_per_node: {2 // nodes}}}\n"
    )
    code, output = command(*TRAINER, "run", "run.yaml", overrides(folder / "run"), cwd=folder)
    assert code == ExitCode.RANK_FAILED
    assert fault_of(output).startswith(f"FAULT D5 host={os.uname().nodename} rank=1: left early with exit code 0"), output


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (1, 2)])
def test_a_stopped_rank_is_the_culprit_not_the_one_that_waits(ranks: int, nodes: int, folder: Path) -> None:
    (folder / "train.py").write_text(SCRIPT.format(what="os.kill(os.getpid(), signal.SIGSTOP)", rank=nodes - 1))
    (folder / "run.yaml").write_text(
        f"name: frozen\nentrypoint: train.py\nresources: {{nodes: {nodes}, ranks_per_node: {ranks}}}\n"
    )
    code, output = command(*TRAINER, "run", "run.yaml", overrides(folder / "run"), "watch.stall_seconds=5", cwd=folder)
    assert code == ExitCode.STALLED, output
    assert fault_of(output).startswith(f"FAULT C2 host={os.uname().nodename} rank={nodes - 1}: stopped by a signal"), output
    assert not processes_of(folder / "run")


def test_all_nodes_leave_together(folder: Path) -> None:
    """Rank 0 has more to do at the end, such as a last checkpoint: its node must not look like one that is stuck."""
    (folder / "train.py").write_text("import os, time\ntime.sleep(4 if os.environ['RANK'] == '0' else 0)\n")
    (folder / "run.yaml").write_text("name: uneven\nentrypoint: train.py\nresources: {nodes: 3, ranks_per_node: 1}\n")
    code, output = command(*TRAINER, "run", "run.yaml", overrides(folder / "run"), cwd=folder)
    assert code == 0, output
    times = [event["time"] for event in events(folder / "run", "node_end")]
    assert len(times) == 3 and max(times) - min(times) < 2, times


def test_a_verdict_does_not_wait_for_a_paused_console(folder: Path) -> None:
    """`trainer node | less`: nobody reads, and much is printed."""
    (folder / "loud.py").write_text("import sys\nprint('x' * 300_000, flush=True)\nsys.exit(7)\n")
    (folder / "run.yaml").write_text("name: loud\nentrypoint: loud.py\n")
    node = start(*TRAINER, "node", "run.yaml", overrides(folder / "run"), cwd=folder)
    events = folder / "run" / "events.jsonl"
    assert wait_until(lambda: events.exists() and "node_end" in events.read_text(), 30), "the run waited for the console"
    code, output = finish(node)
    assert code == ExitCode.RANK_FAILED and fault_of(output).startswith("FAULT C1")


def test_a_run_folder_in_use_is_refused(folder: Path) -> None:
    run = folder / "run"
    first = start(*TRAINER, "node", *slow(run, 0.05))
    assert at_step(run, 2)
    code, output = command(*TRAINER, "node", str(run / "config.yaml"))
    assert code == ExitCode.REFUSED
    assert f"FAULT G7 host={os.uname().nodename} node_rank=0: the run folder {run} is in use by pid {first.pid} on " in fault_of(
        output
    )
    first.terminate()
    assert finish(first)[0] == ExitCode.STOPPED


@pytest.mark.parametrize("node_rank", [0, 1])
def test_a_stop_ends_the_wait_for_other_nodes_at_once(node_rank: int, folder: Path) -> None:
    pet = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    two = [*slow(folder / "run"), "resources.nodes=2", "resources.ranks_per_node=1", "watch.join_seconds=80"]
    node = start(*TRAINER, "node", *two, **pet, PET_NODE_RANK=str(node_rank))
    with pytest.raises(subprocess.TimeoutExpired):
        node.wait(8)  # torch is loaded by then
    node.terminate()
    code, output = finish(node, 10)
    assert code == ExitCode.STOPPED and "SIGTERM before the ranks were started" in output


def test_submissions_at_once_get_folders_of_their_own(folder: Path) -> None:
    (folder / "quick.py").write_text("print('done')\n")
    (folder / "run.yaml").write_text("name: quick\nentrypoint: quick.py\n")
    submissions = [start(*TRAINER, "submit", "run.yaml", cwd=folder) for _ in range(4)]
    for submission in submissions:
        code, output = finish(submission)
        assert code == 0, output
    runs = sorted((folder / "runs").iterdir())
    assert len(runs) == 4
    for run in runs:
        assert wait_until(lambda run=run: ": done: " in command(*TRAINER, "status", str(run))[1]), logs(run)
        assert len(list(run.glob("logs/attempt-*"))) == 1


def test_nohup_is_respected(folder: Path) -> None:
    run = folder / "run"
    node = start("nohup", *TRAINER, "node", *slow(run, 0.01), "training.max_steps=20")
    assert at_step(run, 2)
    node.send_signal(signal.SIGHUP)
    code, output = finish(node)
    assert code == 0, output


def test_a_copied_run_folder_does_not_write_into_the_original(folder: Path) -> None:
    assert command(*TRAINER, "run", str(DIGITS), overrides(folder / "run"), "training.max_steps=2")[0] == 0
    shutil.copytree(folder / "run", folder / "copy", symlinks=True)
    code, output = command(*TRAINER, "submit", str(folder / "copy" / "config.yaml"))
    assert code == ExitCode.CONFIG and "lies in another run's folder now" in output


def test_a_missing_node_is_named_within_the_deadline(folder: Path) -> None:
    pet = {"PET_NNODES": "2", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    two = [*slow(folder / "run"), "resources.nodes=2", "resources.ranks_per_node=1", "watch.join_seconds=2"]
    code, output = command(*TRAINER, "node", *two, **pet, PET_NODE_RANK="0")
    assert code == ExitCode.JOIN
    assert "node_rank=1: 1 of 2 nodes joined in 2 s; missing: node rank 1" in fault_of(output)
    code, output = command(*TRAINER, "node", *two, **pet, PET_NODE_RANK="1")
    assert code == ExitCode.JOIN
    assert f"nothing listens on 127.0.0.1:{pet['PET_MASTER_PORT']}, connection refused" in fault_of(output)


def test_two_claimants_of_a_node_rank_are_both_named(folder: Path) -> None:
    pet = {"PET_NNODES": "3", "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(free_port())}
    three = [
        *slow(folder / "run"),
        "resources.nodes=3",
        "resources.ranks_per_node=1",
        "training.batch_size=9",
        "watch.join_seconds=20",
    ]
    nodes = [start(*TRAINER, "node", *three, **pet, PET_NODE_RANK=rank) for rank in ("0", "1", "1")]
    lines = []
    for node in nodes:
        code, output = finish(node)
        assert code == ExitCode.REFUSED, output
        lines.append(fault_of(output))
    assert len(set(lines)) == 1
    assert all(f"(pid {node.pid})" in lines[0] for node in nodes[1:])


def test_a_typo_that_only_the_node_can_see_starts_no_rank(folder: Path) -> None:
    code, output = command(*TRAINER, "node", str(DIGITS), overrides(folder / "run"), "optimizer.target=torch.optim:SDG")
    assert code == ExitCode.CONFIG
    assert output.splitlines()[-1].startswith("error: optimizer.target=torch.optim:SDG: ")
    assert not list((folder / "run").glob("logs/*/*"))


def test_arguments_that_do_not_fit_are_the_configs_fault(folder: Path) -> None:
    code, output = command(*TRAINER, "node", str(DIGITS), overrides(folder / "run"), "optimizer.args.momentun=1")
    assert code == ExitCode.CONFIG
    assert "FAULT CONFIG" in fault_of(output) and "optimizer.args" in output.splitlines()[-1]


def test_a_script_that_ignores_the_stop_signal_is_killed_in_the_end(folder: Path) -> None:
    (folder / "stubborn.py").write_text(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(60)\n"
    )
    (folder / "run.yaml").write_text("name: stubborn\nentrypoint: stubborn.py\nwatch: {stop_seconds: 1}\n")
    node = start(*TRAINER, "node", "run.yaml", cwd=folder)
    assert wait_until(lambda: "deaf" in logs(folder))
    node.terminate()
    code, output = finish(node, 20)
    assert code == ExitCode.STALLED
    assert "did not stop within 1 s of SIGTERM; killed" in fault_of(output)


def test_a_script_without_handlers_stops_by_the_signal_itself(folder: Path) -> None:
    (folder / "plain.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    (folder / "run.yaml").write_text("name: plain\nentrypoint: plain.py\n")
    node = start(*TRAINER, "node", "run.yaml", cwd=folder)
    assert wait_until(lambda: "here" in logs(folder))
    node.send_signal(signal.SIGINT)
    code, output = finish(node, 20)
    assert code == ExitCode.STOPPED and "FAULT" not in output, output


def test_a_rank_that_cannot_be_forked_is_spawned(folder: Path) -> None:
    """A thread that a library starts at import makes forking unsafe; the run goes on by the slower way and says so."""
    (folder / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True, name='busy').start()\n"
        "from trainer.train.models import lenet\n"
    )
    short = [str(DIGITS), overrides(folder / "run"), "model.target=threads:lenet", "training.max_steps=3"]
    short.append("model.args={channels: 1, image_size: 8}")
    code, output = command(*TRAINER, "node", *short, cwd=folder)
    assert code == 0, output
    assert "starting ranks as fresh processes" in output and "the thread 'busy' is running" in output


def test_the_output_of_a_run_goes_nowhere_and_the_run_goes_on(folder: Path) -> None:
    """`trainer node | head`: the reader leaves."""
    shell = f"{sys.executable} -m trainer node {DIGITS} 'training.max_steps=20' '{overrides(folder / 'r')}' | head -1".replace(
        "it's", "it'\\''s"
    )
    code, _ = command("bash", "-c", shell)
    assert code == 0 and wait_until(lambda: (folder / "r" / "checkpoints" / "latest").exists(), 30)


def test_a_bar_on_a_terminal(folder: Path) -> None:
    short = [*TRAINER, "run", str(DIGITS), "training.epochs=3", f"run_dir={folder.parent / 'r'}"]
    code, output = command("script", "-qec", subprocess.list2cmdline(short), "/dev/null")
    assert code == 0, output
    assert "epoch 3/3: 100%" in output and "images/s" in output and "evaluation loss" in output
