"""Formats keys and values for messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

_LONGEST = 200  # maximum number of characters of a value in a message


def show(value: Any) -> str:
    """Formats a value on one line, as typed on the command line."""
    text = " ".join(_typed(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def short(value: Any) -> str:
    """Formats a value like ``show``, but a number without trailing zeros."""
    return f"{value:g}" if isinstance(value, float) else show(value)


def _typed(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{_typed(item)}' for name, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_typed(item) or repr(item) for item in value)}]"
    return str(value)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Returns ``; did you mean x?`` with the candidate closest to ``word``, or "".

    Up to three candidates that begin with ``word`` and an underscore come first.
    """
    names = list(candidates)
    close = [name for name in names if name.startswith(f"{word}_")][:3]
    close = close or get_close_matches(word.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""
