"""Targets that a user might bring."""

import os
import signal  # noqa: F401 (for the statements of a test)
import sys  # noqa: F401
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from trainer.train.data import digits


class Augmented(Dataset):  # type: ignore[type-arg]
    """The digits with random noise and a little time for each sample: augmentation, and steps that can be hit by a signal."""

    def __init__(self, seconds: float, log: str | None) -> None:
        self.images, self.seconds, self.log = digits()[0], seconds, log

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self.seconds)
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{index}\n")
        image, label = self.images[index]
        return image + 0.1 * torch.randn(image.shape), label


def augmented(seconds: float = 0.0, log: str | None = None) -> tuple[Augmented, None]:
    return Augmented(seconds, log), None


def dropout() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 10))


def _go_wrong(counted: int, rank: int, number: int, what: str, **names: object) -> None:
    if counted == number and os.environ.get("RANK", "0") == str(rank):
        exec(what, {**globals(), **names})


class FaultyData(Dataset):  # type: ignore[type-arg]
    """The digits, slowly; on one rank (or in its workers) a statement comes before the sample that is asked for as number N."""

    def __init__(self, rank: int, number: int, what: str, seconds: float) -> None:
        self.images, self.seconds, self.counted = digits()[0], seconds, 0
        self.faulty = (rank, number, what)

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.counted += 1
        time.sleep(self.seconds)
        _go_wrong(self.counted, *self.faulty, data=self)
        image, label = self.images[index]
        return image, label


LOCK = threading.Lock()  # held for ever: as if a thread had held it when the workers were forked
LOCK.acquire()


def faulty_data(rank: int = -1, number: int = 0, what: str = "", seconds: float = 0.001) -> tuple[FaultyData, FaultyData]:
    return FaultyData(rank, number, what, seconds), FaultyData(-1, 0, "", seconds)


class FaultyModel(nn.Module):
    """A linear model; on one rank a statement comes before its forward pass number N."""

    def __init__(self, rank: int, number: int, what: str) -> None:
        super().__init__()
        self.layer, self.counted, self.faulty = nn.Linear(64, 10), 0, (rank, number, what)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.counted += 1
        _go_wrong(self.counted, *self.faulty, model=self, images=images)
        return self.layer(images.flatten(1))


def faulty_model(rank: int = -1, number: int = 0, what: str = "") -> FaultyModel:
    return FaultyModel(rank, number, what)


class OneShort(FaultyData):
    def __len__(self) -> int:
        return 399


def uneven_data(rank: int) -> tuple[FaultyData, None]:
    """One sample less on one rank."""
    return (OneShort if os.environ.get("RANK", "0") == str(rank) else FaultyData)(-1, 0, "", 0.001), None


class Skipping(nn.Module):
    """A linear model that leaves a layer out on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.inner, self.extra = nn.Linear(64, 10), nn.Linear(64, 10)
        self.skips = os.environ.get("RANK", "0") == str(rank)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        flat = images.flatten(1)
        outputs: torch.Tensor = self.inner(flat) if self.skips else self.inner(flat) + self.extra(flat)
        return outputs


class Unlucky:
    """A fault for each attempt of a run, [rank, where, statement]: it comes once this attempt has saved something of its own."""

    def __init__(self, where: str, faults: list[list[Any]], checkpoints: str) -> None:
        rank, place, what = faults[int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))]
        here = place == where and os.environ.get("RANK", "0") == str(rank)
        self.what, self.checkpoints = what if here else "", Path(checkpoints)
        self.first = self._saved()

    def _saved(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("step-*[0-9]"))[-1:]

    def strike(self, **names: object) -> None:
        if self.what and self._saved() != self.first:
            exec(self.what, {**globals(), **names})


class UnluckyData(FaultyData):
    def __init__(self, unlucky: Unlucky) -> None:
        super().__init__(-1, 0, "", 0.001)
        self.unlucky = unlucky

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.unlucky.strike(data=self)
        return super().__getitem__(index)


class UnluckyModel(FaultyModel):
    def __init__(self, unlucky: Unlucky) -> None:
        super().__init__(-1, 0, "")
        self.unlucky = unlucky

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.unlucky.strike(model=self, images=images)
        return super().forward(images)


def unlucky_data(faults: list[list[Any]], checkpoints: str) -> tuple[UnluckyData, None]:
    return UnluckyData(Unlucky("data", faults, checkpoints)), None


def unlucky_model(faults: list[list[Any]], checkpoints: str) -> UnluckyModel:
    return UnluckyModel(Unlucky("model", faults, checkpoints))


class Leisurely(nn.Module):
    """A linear model that takes its time: at its making, in its first step and at the beginning of an evaluation on one rank, then in
    steps on one rank after the other, each second one in a tenth of the time, and in all of an evaluation. All in seconds."""

    def __init__(self, rank: int, start: float, first: float, step: float, evaluation: float) -> None:
        super().__init__()
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.layer, self.counted, self.slow = nn.Linear(64, 10), 0, rank
        self.first, self.step, self.evaluation, self.evaluated = first, step, evaluation, False
        if self.rank == rank:
            time.sleep(start)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.counted += self.training
        turn = self.slow if self.counted == 1 else self.counted % self.ranks
        if not self.training:
            time.sleep(self.first if self.rank == self.slow and not self.evaluated else self.evaluation)
        elif self.rank == turn:
            time.sleep(self.first if self.counted == 1 else self.step / (1 if self.counted % 2 else 10))
        self.evaluated = not self.training
        return self.layer(images.flatten(1))


def leisurely(rank: int, start: float, first: float, step: float, evaluation: float) -> Leisurely:
    return Leisurely(rank, start, first, step, evaluation)
