"""Imports and calls a user's reward function, and validates its result.

Worker processes use this module too, so it imports no torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from ppo_ds.background.user_code import load_object
from ppo_ds.background.values import described, is_float32
from ppo_ds.errors import UserError

Score = float | list[float]  # score of one response; a list has one reward for each step
Arguments = tuple[list[str], list[str], list[Any]]  # prompts, responses and rows of one call


class InvalidScore(ValueError):
    """Raised if a returned value is not one score per response."""

    def __init__(self, reason: str, row: int | None = None, remedy: str = ""):
        super().__init__(reason)  # a phrase that follows the name of the function in an error message
        self.row = row  # index of the response; None if the reason is not about a single response
        self.remedy = remedy


def read_scores(result: Any, count: int) -> list[Score]:
    """Converts the result of a reward function for ``count`` responses. Raises InvalidScore.

    The result may be a list or tuple, or an array of numpy, torch or pandas. Each entry is a number, or a
    list of numbers; numbers may be scalars of these libraries too.
    """
    values = _plain(result)
    if not isinstance(values, (list, tuple)):
        raise InvalidScore(f"returned {described(result)}", remedy=f"it must return a list of {count} floats")
    if len(values) != count:
        raise InvalidScore(f"returned {len(values)} scores for {count} responses")
    return [_read_score(value, row) for row, value in enumerate(values)]


def _read_score(value: Any, row: int) -> Score:
    score = _plain(value)
    if not isinstance(score, (list, tuple)):
        if not is_float32(score):
            raise InvalidScore(f"returned {described(value)}", row, "a score must be a finite number")
        return float(score)
    rewards = [_plain(reward) for reward in score]
    for step, reward in enumerate(rewards, start=1):
        if not is_float32(reward):
            reason = f"returned {described(reward)} as the reward of step {step}"
            raise InvalidScore(reason, row, "the reward of a step must be a finite number")
    return [float(reward) for reward in rewards]


def _plain(value: Any) -> Any:
    """Converts arrays and scalars of numpy, torch or pandas to Python lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def call_function(
    function: Callable[..., Any], arguments: Arguments, finish: Callable[[Any], Any] = lambda result: result
) -> list[Score]:
    """Calls a reward function and reads its scores; ``finish`` runs the coroutine of an async function."""
    count = len(arguments[0])  # before the call, since the function may modify the lists
    return read_scores(finish(function(*arguments)), count)


def load_function(
    path: str, key: str = "reward.path", parameters: tuple[str, ...] = ("prompts", "responses", "rows")
) -> Callable[..., Any]:
    """Imports the function at ``path``, which is ``pkg.mod:fn`` or ``file.py:fn``.

    Raises UserError about ``key`` if there is no such function, or if it does not accept ``parameters``.
    """
    function = load_object(path, key, "function")
    if isinstance(function, type) or not callable(function):
        raise UserError(
            f"{key}={path}: {described(function)} is not a function; give one that takes "
            f"({', '.join(parameters)})"
        )
    try:
        inspect.signature(function).bind(*([] for _ in parameters))
    except ValueError:
        pass  # some builtins have no signature
    except TypeError as error:
        raise UserError(
            f"{key}={path}: is called as fn({', '.join(parameters)}), but takes "
            f"{inspect.signature(function)}: {error}"
        ) from None
    return function
