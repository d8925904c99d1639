"""The run from its first step to its last: what happens between optimizer steps, and when."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from trainer.pulse import Phase
from trainer.train.agree import SameParameters
from trainer.train.batches import GlobalOrder, Loading, batches
from trainer.train.checkpoint import Checkpointer
from trainer.train.distributed import World
from trainer.train.loop import Loop
from trainer.train.metrics import Metrics, Progress
from trainer.train.random_state import random_state
from trainer.train.stop import StopSignal
from trainer.train.timing import TimeSplit, Trace
from trainer.train.utilisation import Utilisation

logger = logging.getLogger(__name__)

_AS_IT_IS = nullcontext()
_SAMPLED_EVERY = 10  # steps, of which one tells where the time of all goes
TERMINAL = "TRAINER_TERMINAL_FD"  # set by the node process: a descriptor for the progress bar


@dataclass(frozen=True)
class Cadence:
    """When something happens between steps."""

    log_every_steps: int
    evaluate_every_epochs: int
    save_every_steps: int
    compare_every_steps: int | None = None  # the parameters of all ranks


class Run:
    """Drives a `Loop` to the end: logs, evaluates, saves, stops. Every rank has one and all do the same at the same step."""

    def __init__(
        self,
        world: World,
        order: GlobalOrder,
        total_steps: int,
        loop: Loop,
        saver: Checkpointer,
        training: Dataset[Any],
        evaluation: Dataset[Any] | None,
        cadence: Cadence,
        loading: Loading,
    ) -> None:
        self.world, self.order, self.total, self.loop, self.saver = world, order, total_steps, loop, saver
        self.evaluation, self.cadence, self._loading = evaluation, cadence, loading
        self.epochs = -(-total_steps // order.steps_per_epoch)
        self._evaluate_every = cadence.evaluate_every_epochs * order.steps_per_epoch
        self._micro_batches = batches(training, order.micro_batches(loop.step, total_steps), order.seed, loading)
        self.trace, self.utilisation = Trace(None, 0, Path()), Utilisation(world, loop.options.precision)
        self._report: _Reporter | None = None
        loop.before_update = saver.join
        loop.finite.samples = self._samples
        loop.split = TimeSplit(world.device, min(_SAMPLED_EVERY, cadence.log_every_steps))
        self._same = SameParameters(world, list(loop.bare.parameters()), loop.step)

    def go(self, stop: StopSignal, folder: Path, tensorboard: bool = False) -> bool:
        """Train to the end or to a stop; returns whether it was stopped before the end."""
        stopped = False
        with self.reporting(folder, tensorboard):
            while self.loop.step < self.total and not stopped:
                stopped = self.advance(stop)
            self.trace.stop()  # of a run that ends sooner
            self.loop.pulse.enter(Phase.SAVE)
            saved = self.saver.finish()
        if stopped and self.world.rank == 0:
            name = stop.reason or "a signal to another rank"
            how = "saved" if saved else "not saved"
            logger.warning("stopped by %s at step %d of %d, %s; start again to go on", name, self.loop.step, self.total, how)
        return stopped

    @contextmanager
    def reporting(self, folder: Path, tensorboard: bool = False) -> Iterator[None]:
        """Inside, rank 0 writes metrics into `folder` and shows progress."""
        self._report = _Reporter(self, folder, tensorboard) if self.world.rank == 0 else None
        try:
            yield
        finally:
            if self._report:
                self._report.close()

    def advance(self, stop: StopSignal) -> bool:
        """One optimizer step and what is due after it; returns whether the run was saved because it is to stop."""
        self.trace.at(self.loop.step)
        with self.utilisation.counting() if self.utilisation.pending else _AS_IT_IS:
            self.loop.take_step(self._micro_batches)
        step, cadence = self.loop.step, self.cadence
        if self.trace.at(step):
            logger.info("trace of %d steps: %s", self.trace.steps, self.trace.file)
        ended = step == self.total
        if ended or step % cadence.log_every_steps == 0:
            self._log()
        if self.evaluation is not None and (ended or step % self._evaluate_every == 0):
            with self.loop.split.spent_on("evaluation"):
                self._evaluate(self.evaluation)
        stopping = not ended and stop.agreed(step)
        saving = ended or stopping or step % cadence.save_every_steps == 0
        if cadence.compare_every_steps and (saving or step % cadence.compare_every_steps == 0):
            self._same.check(step)
        if saving:
            with self.loop.split.spent_on("save"):
                self._save()
        return stopping

    def _samples(self) -> list[int]:
        """This rank's samples in the step under way."""
        step = self.loop.step
        return [index for _, indices in self.order.micro_batches(step, step + 1) for index in indices.tolist()]

    def _log(self) -> None:
        values = {**self.loop.training_values(), **self.loop.split.close()}
        values |= self.utilisation.of(values["samples_per_second"] / self.order.batch_size)
        if self._report:
            self._report.training(values)

    def _evaluate(self, dataset: Dataset[Any]) -> None:
        values = self.loop.evaluate(dataset, self.order.micro_batch_size, self._loading)
        if self._report:
            self._report.evaluation(values)

    def _save(self) -> None:
        self.loop.pulse.enter(Phase.SAVE)
        step, order = self.loop.step, self.order
        position = {
            "position": step * order.batch_size,
            "samples": order.samples,
            "batch_size": order.batch_size,
            "seed": order.seed,
            "shuffle_block_size": order.block_size,
        }
        own = {**self.loop.own_state(), "random": random_state()}
        self.saver.save(step, {**position, **self.loop.state()}, own, behind=True)


class _Reporter:
    """Rank 0's part of a report: the other ranks took part in the sums and are silent."""

    def __init__(self, run: Run, folder: Path, tensorboard: bool) -> None:
        self.run = run
        self.metrics = Metrics(folder, run.loop.step, tensorboard)
        self.progress = Progress(run.loop.step, run.total, _terminal())

    @property
    def epoch(self) -> int:
        return (self.run.loop.step - 1) // self.run.order.steps_per_epoch + 1

    def training(self, values: dict[str, float]) -> None:
        self.metrics.write("train", self.run.loop.step, epoch=self.epoch, **values)
        self.progress.show(self.run.loop.step, self.epoch, self.run.epochs, values)

    def evaluation(self, values: dict[str, float]) -> None:
        self.metrics.write("eval", self.run.loop.step, epoch=self.epoch, **values)
        accuracy = f" accuracy {values['eval_accuracy']:.2%}" if "eval_accuracy" in values else ""
        samples = int(values["eval_samples"])
        self.progress.say(f"epoch {self.epoch} evaluation loss {values['eval_loss']:.4f}{accuracy} ({samples} samples)")

    def close(self) -> None:
        self.metrics.close()
        self.progress.close()


def _terminal() -> int | None:
    """Where a progress bar can be drawn, or None."""
    given = os.environ.get(TERMINAL)
    if given:
        return int(given)
    return sys.stderr.fileno() if sys.stderr.isatty() else None
