"""A kit that takes a PyTorch training job from one process to many nodes, from one YAML file."""

import importlib
from typing import Any

from trainer.config import Config
from trainer.errors import ConfigError, KitError
from trainer.settings import load_config

__version__ = "0.1.0"
__all__ = ["Config", "ConfigError", "KitError", "__version__", "load_config", "submit"]


def __getattr__(name: str) -> Any:
    """`submit` is loaded when it is asked for: nodes and ranks import this package too, and know nothing of submission."""
    if name == "submit":
        return importlib.import_module("trainer.launch.job").submit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
