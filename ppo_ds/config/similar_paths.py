"""Suggests an existing file or folder for a path that does not exist."""

from __future__ import annotations

import os
from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

MODEL_FILES = ("config.json", "adapter_config.json")
MOST_ENTRIES = 10_000  # comparing all names in a larger folder would take seconds
_CUTOFF = 0.6  # least similarity of two names, as in config/text.py


def is_model_folder(path: Path) -> bool:
    return any(os.path.isfile(path / name) for name in MODEL_FILES)


def did_you_mean_path(path: str) -> str:
    """Returns ``; did you mean x?`` with the existing path most similar to ``path``, or "".

    Every part of the path may be misspelled. The suggestion is relative if ``path`` is relative.
    """
    found = similar_path(Path(path).expanduser())
    return f"; did you mean {found}?" if found else ""


def did_you_mean_model(path: str) -> str:
    """Returns ``; did you mean x?`` or "". x is the most similar folder, or the model inside this folder."""
    found = similar_path(Path(path).expanduser())
    if found is None or os.path.isfile(found):
        return ""
    return f"; did you mean {found if is_model_folder(found) else model_inside(found) or found}?"


def model_inside(folder: Path) -> Path | None:
    """Returns ``folder``/model if it holds a model, else the only model folder in ``folder``, else None."""
    inside = [found for found in _entries(folder) if is_model_folder(found)]
    exported = folder / "model"
    return exported if exported in inside else inside[0] if len(inside) == 1 else None


def similar_path(path: Path) -> Path | None:
    """Returns the existing path whose names are most similar to those of ``path``, or None."""
    found = Path(path.anchor)
    for name in path.relative_to(path.anchor).parts:
        if os.path.exists(found / name):  # unlike Path.exists, False if the folder cannot be searched
            found = found / name
            continue
        names = [entry.name for entry in _entries(found)]
        close = get_close_matches(name, names, n=1, cutoff=_CUTOFF)
        if not close:
            return None
        found = found / close[0]
    return found


def model_sibling(path: str) -> Path | None:
    """Returns the model folder next to ``path`` with the most similar name, or None."""
    parent, name = Path(path).parent, Path(path).name
    siblings = {entry.name: entry for entry in _entries(parent) if is_model_folder(entry)}
    close = get_close_matches(name, siblings, n=1, cutoff=_CUTOFF)
    return siblings[close[0]] if close else None


def _entries(folder: Path) -> Iterable[Path]:
    """Returns the entries of a folder except hidden ones; none if it cannot be read."""
    try:
        return sorted(e for e in islice(folder.iterdir(), MOST_ENTRIES) if not e.name.startswith("."))
    except OSError:
        return []
