"""The same step as in `bench.loop` in other people's trainers, which live in an environment of their own (`make bench` makes it).

Lightning drives its own loop: it runs in a thread, and whoever measures lets it go on for so many steps at a time.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from trainer.train.batches import TensorImages
from trainer.train.models import linear


class Stream(IterableDataset[Any]):
    """Single images for ever, normalised, as batches of one."""

    def __init__(self, data: TensorImages, order: list[int]) -> None:
        self.data, self.order = data, order

    def __iter__(self) -> Iterator[Any]:
        at = 0
        while True:
            yield self.data.batch(torch.as_tensor([self.order[at % len(self.order)]]))
            at += 1


class Accelerated:
    """Hugging Face Accelerate."""

    def __init__(self, stream: Stream, shape: tuple[int, int], rate: float, steps: int) -> None:
        self.accelerator = importlib.import_module("accelerate").Accelerator(cpu=True)
        model = linear(*shape)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
        loader = DataLoader(stream, batch_size=None)
        self.model, self.optimizer, loader = self.accelerator.prepare(model, optimizer, loader)
        self.loss, self.batches, self.steps = nn.CrossEntropyLoss(), iter(loader), steps

    def __call__(self) -> None:
        for _ in range(self.steps):
            inputs, targets = next(self.batches)
            loss = self.loss(self.model(inputs), targets)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()


class Lightning:
    """PyTorch Lightning, with its logger, bar and checkpoints off."""

    def __init__(self, stream: Stream, shape: tuple[int, int], rate: float, steps: int) -> None:
        self.steps, self._go, self._there = steps, threading.Semaphore(0), threading.Semaphore(0)
        lightning: Any = importlib.import_module("lightning.pytorch")

        class Module(lightning.LightningModule):  # type: ignore[misc]
            def __init__(self) -> None:
                super().__init__()
                self.model, self.loss = linear(*shape), nn.CrossEntropyLoss()

            def training_step(self, batch: Any, number: int) -> torch.Tensor:
                return self.loss(self.model(batch[0]), batch[1])

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.SGD(self.parameters(), lr=rate, momentum=0.9)

        off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(accelerator="cpu", devices=1, strategy="ddp", max_epochs=-1, max_steps=10**9, **off)
        loader = DataLoader(_Paced(stream, self), batch_size=None)
        threading.Thread(target=trainer.fit, args=(Module(), loader), daemon=True).start()
        self._there.acquire()

    def __call__(self) -> None:
        self._go.release()
        self._there.acquire()

    def wait(self) -> None:
        """In its thread: until it may go on."""
        self._there.release()
        self._go.acquire()


class _Paced(IterableDataset[Any]):
    def __init__(self, stream: Stream, driver: Lightning) -> None:
        self.stream, self.driver = stream, driver

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.stream):
            if number % self.driver.steps == 0:
                self.driver.wait()
            yield batch
