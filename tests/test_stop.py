import os
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import DIGITS
from tests.forked import on_ranks
from tests.jobs import TRAINER, finish, overrides, start
from trainer.errors import ExitCode
from trainer.train.distributed import World
from trainer.train.stop import SIGNALS, StopSignal


@pytest.mark.parametrize("number", SIGNALS)
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
