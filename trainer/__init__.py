"""A kit that takes a PyTorch training job from one process to many nodes, from one YAML file."""

from trainer.config import Config
from trainer.errors import ConfigError, KitError
from trainer.settings import load_config

__version__ = "0.1.0"
__all__ = ["Config", "ConfigError", "KitError", "__version__", "load_config"]
