"""For a training script of your own: one line that is optional, `from trainer.train.watch import step`, and `step()` in its loop.

The node process sees such a script's collectives without it. With it, a fault is told with its step, and a script without
collectives is watched too.
"""

from __future__ import annotations

from trainer.pulse import Phase, Pulse

_pulse = Pulse.of()


def step(number: int | None = None) -> None:
    """Say that an optimizer step has ended.

    Args:
        number: how many are done; None: one more than before.
    """
    _pulse.stepped(_pulse.step + 1 if number is None else number, Phase.SCRIPT)
