"""RLHF for language models on DeepSpeed, from Python: ``train``, ``evaluate`` and ``register``."""

import sys
from importlib import import_module
from typing import Any

__all__ = ["evaluate", "register", "train"]


def __getattr__(name: str) -> Any:
    """Imports the functions of launch/python.py at their first use, so that importing ppo_ds stays cheap."""
    if name not in __all__:
        raise AttributeError(f"module 'ppo_ds' has no attribute {name!r}")
    from ppo_ds.commands.entry_points import LAUNCH

    if str(LAUNCH.parent) not in sys.path:
        sys.path.insert(0, str(LAUNCH.parent))
    return getattr(import_module("launch.python"), name)
