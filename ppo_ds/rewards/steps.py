"""Splits responses into steps, for rewards that score each step of a solution (process rewards).

A response is cut at each separator; the non-blank pieces are its steps. A separator belongs to the preceding
step. This module imports no torch, so that reward functions can use it in worker processes.
"""

from __future__ import annotations

BLANK_LINE = "\n\n"


def split_steps(response: str, separator: str = BLANK_LINE) -> list[str]:
    """Returns the steps of a response without their separators; blank pieces are not steps."""
    return [piece for piece in response.split(separator) if piece.strip()]


def step_ends(response: str, separator: str = BLANK_LINE) -> list[int]:
    """Returns the offset at which each step ends, after its separator; the last step ends with the text."""
    ends, position = [], 0
    for piece in response.split(separator):
        position += len(piece) + len(separator)
        if piece.strip():
            ends.append(position)
    return [*ends[:-1], len(response)] if ends else []
