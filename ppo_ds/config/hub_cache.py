"""Finds models in the local Hub cache without importing huggingface_hub, which is slow."""

from __future__ import annotations

import os
from pathlib import Path


def hub_cache() -> Path:
    """Returns the folder of huggingface_hub's cache; see its constants.py."""
    cache_home = os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")
    home = os.environ.get("HF_HOME") or os.path.join(cache_home, "huggingface")
    folder = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expandvars(os.path.expanduser(folder or os.path.join(home, "hub"))))


def in_hub_cache(name: str) -> bool:
    return (hub_cache() / f"models--{name.replace('/', '--')}").is_dir()
