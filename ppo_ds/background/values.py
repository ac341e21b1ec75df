"""Checks scores, quotes values for error messages, and defines the exception for calls without a result.

Imports no torch, so that worker processes start fast.
"""

from __future__ import annotations

from numbers import Real
from typing import Any, cast

_MAX_SCORE = 3.4028234663852886e38  # the largest float32


class NoResult(Exception):
    """Raised if a call has no result: it exceeded its time limit (``timed_out``), or its process died.

    A reward function may raise it for a response that it cannot score.
    """

    def __init__(self, reason: str, timed_out: bool = False):
        super().__init__(reason)
        self.timed_out = timed_out


def is_float32(value: Any) -> bool:
    """Returns whether ``value`` is a finite number in the range of float32."""
    return isinstance(value, Real) and abs(cast(float, value)) <= _MAX_SCORE  # False for NaN


def quoted(text: str) -> str:
    """Quotes a text for an error message, shortened and on one line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")


def described(value: Any) -> str:
    """Quotes a value for an error message, with its type."""
    return f"{quoted(str(value))} ({type(value).__name__})"
