"""A kit that takes a PyTorch training job from one process to many nodes, from one YAML file."""

import importlib
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError, KitError

if TYPE_CHECKING:
    from trainer.config import Config
    from trainer.settings import load_config

__version__ = "0.1.0"
__all__ = ["Config", "ConfigError", "KitError", "__version__", "load_config", "submit"]

_LAZY = {"Config": "trainer.config", "load_config": "trainer.settings", "submit": "trainer.launch.job"}


def __getattr__(name: str) -> Any:
    """Loaded when they are asked for: nodes and ranks import this package too, and know nothing of submission; a rank's writer
    knows nothing of the config."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
