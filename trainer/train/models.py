"""Small networks that need nothing but torch. Any other model is a target too, such as torchvision.models:resnet18."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def lenet(channels: int = 3, image_size: int = 32, classes: int = 10) -> nn.Sequential:
    """The small LeNet-like network of the PyTorch tutorials: (N, channels, image_size, image_size) -> (N, classes) logits.

    Images below 32 pixels are padded inside the convolutions, so that 8 x 8 digits fit as well.
    """
    padding = 0 if image_size >= 32 else 2
    side = ((image_size - 4 + 2 * padding) // 2 - 4 + 2 * padding) // 2
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5, padding=padding),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        ),
        nn.Sequential(nn.Linear(16 * side * side, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, classes)),
    )


def linear(features: int, classes: int) -> nn.Sequential:
    """One linear layer on flattened images: (N, ...) -> (N, classes) logits. Nearly no work: for measuring overheads."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))


class SplitSequential(nn.Module):
    """A `Sequential` laid out over several devices in order: its parts are dealt to the devices evenly."""

    def __init__(self, parts: nn.Sequential, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.devices = [devices[index * len(devices) // len(parts)] for index in range(len(parts))]
        self.parts = nn.Sequential(*(part.to(device) for part, device in zip(parts, self.devices, strict=True)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs lie on the last part's device."""
        for part, device in zip(self.parts, self.devices, strict=True):
            inputs = part(inputs.to(device))
        return inputs


def split_lenet(devices: Sequence[torch.device], channels: int = 3, image_size: int = 32, classes: int = 10) -> nn.Module:
    """`lenet` split inside a rank: convolutions on the first of the rank's devices, linear layers on the last."""
    return SplitSequential(lenet(channels, image_size, classes), devices)
