"""The pinned image: what stands in image.yaml, and how each container runtime wants an image to be named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer import __version__, yaml12

TABLE = Path(__file__).with_name("image.yaml")


@dataclass(frozen=True)
class Image:
    """What image.yaml says."""

    kit: str  # name of the image with the kit in it
    base: str
    tag: str
    digest: str
    cuda: str  # major.minor, as torch.version.cuda
    torch: str
    nccl: str
    python: str
    driver: str  # the oldest that will do: a major version

    @property
    def name(self) -> str:
        """The image to pull, by its tag."""
        return f"{self.base}:{self.tag}"

    @property
    def built(self) -> str:
        """The image that `make image` builds on it, with the kit in it."""
        return f"{self.kit}:{__version__}-{self.tag}"


def pinned() -> Image:
    """The image that this version of the kit is made for."""
    return Image(**yaml12.load(TABLE.read_text(encoding="utf-8")))
