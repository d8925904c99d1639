import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import DIGITS
from tests.forked import on_ranks
from tests.jobs import SHORT, TRAINER, finish, logs, metrics, overrides, start, wait_until
from trainer.errors import ExitCode
from trainer.process import STOP_SIGNALS, descendants
from trainer.train.distributed import World
from trainer.train.stop import StopSignal
from trainer.train.stored import steps


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_a_request_and_a_second_changes_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignal(World()) as stop:
        assert not stop.agreed(1)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.agreed(2) and stop.caught == number
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("culprit", [0, 2])
def test_all_ranks_stop_at_the_same_step_whichever_got_the_signal(culprit: int) -> None:
    def train(world: World) -> tuple[int, str | None]:
        with StopSignal(world) as stop:
            for step in range(1, 2000):
                if world.rank == culprit and step == 37:
                    os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.001 * (world.rank + 1))  # no rank is in step with another
                if stop.agreed(step):
                    return step, stop.caught.name if stop.caught else None
        raise AssertionError("never stopped")

    found = on_ranks(3, train)
    steps = {step for step, _ in found}
    assert len(steps) == 1 and 37 <= steps.pop() <= 37 + 64
    assert [name for _, name in found] == ["SIGUSR1" if rank == culprit else None for rank in range(3)]


def test_a_stop_while_the_libraries_are_loaded_is_a_stop(folder: Path) -> None:
    process = start(*TRAINER, "node", str(DIGITS), overrides(folder / "run"))
    time.sleep(1.5)
    process.send_signal(signal.SIGUSR1)
    code, output = finish(process)
    assert code == ExitCode.STOPPED and "SIGUSR1 before the ranks were started" in output, output


def test_the_file_and_the_end_of_the_time_are_requests_too(folder: Path) -> None:
    with StopSignal(World(), folder / "stop") as stop:
        assert stop.reason is None
        (folder / "stop").touch()
        assert stop.reason == f"the file {folder}/stop"
    for left, saves, wanted in ((100, 20, None), (100, 40, "the end of its time"), (20, 0, "the end of its time")):
        assert StopSignal(World(), None, time.time() + left, lambda saves=saves: saves).reason == wanted  # type: ignore[misc]


@pytest.mark.parametrize(("last", "wanted"), [(100_000, ExitCode.STOPPED), (20, ExitCode.DONE)])
def test_a_storm_of_signals_until_the_last_process_is_gone_changes_no_end(last: int, wanted: ExitCode, folder: Path) -> None:
    """From a stop on, and from the last step on: to the node and to all that it has started, as Slurm does."""
    how = [f"training.max_steps={last}", "training.epochs=100000", "resources.ranks_per_node=2"]
    process = start(*TRAINER, "node", *SHORT, overrides(folder / "run"), *how)
    assert wait_until(lambda: len(metrics(folder / "run")) >= 20, 60)
    while process.poll() is None:
        for pid in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
        time.sleep(0.002)
    code, output = finish(process)
    assert code == wanted and "FAULT" not in output and "SIGUSR1, for which" not in logs(folder / "run"), (code, output)
    assert (wanted == ExitCode.STOPPED) == ("stopped by SIGUSR1" in output), output


def test_a_run_with_a_stop_file_saves_ends_and_starts_again_when_it_is_gone(folder: Path) -> None:
    run, setting = folder / "run", "training.epochs=100000"
    process = start(*TRAINER, "run", str(DIGITS), overrides(run), setting)
    assert wait_until(lambda: len(metrics(run)) > 1, 60)
    (run / "stop").touch()
    code, output = finish(process)
    step = int(output.rpartition("at step ")[2].partition(" ")[0])
    assert code == ExitCode.STOPPED and f"stopped by the file {run}/stop" in output and steps(run / "checkpoints")[-1] == step, (
        output
    )
    code, output = finish(start(*TRAINER, "run", str(DIGITS), overrides(run), setting))
    assert code == ExitCode.CONFIG and f"error: {run}/stop: the run is stopped while this file is there; remove it" in output
    (run / "stop").unlink()
    end = str(time.time() + 45)
    code, output = finish(start(*TRAINER, "run", str(DIGITS), overrides(run), setting, TRAINER_END_TIME=end))
    assert code == ExitCode.STOPPED and f"resuming at step {step}" in logs(run) and "stopped by the end of its time" in output
