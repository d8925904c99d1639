"""Targets that a user might bring."""

import time

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
