"""Judges pairs of responses with a Python function, in both orders."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from ppo_ds.background.user_code import TRIAL_RESPONSE, is_async, where_raised
from ppo_ds.background.values import quoted
from ppo_ds.config.text import show
from ppo_ds.errors import UserError
from ppo_ds.rewards.function import LISTED_KEYS
from ppo_ds.rewards.user_function import InvalidScore, load_function, read_scores
from ppo_ds.types import Row

PARAMETERS = ("prompts", "responses_a", "responses_b", "rows")
REMEDY = "it must return a list with one number from 0 to 1 for each pair, 1 if response a is better"


def verdict(in_order: float, swapped: float) -> dict[str, Any]:
    """Combines the preferences for one response of a pair, first as response a and then as response b.

    ``preference`` is their mean. ``position_bias`` is the mean preference for the response in position a,
    minus 0.5. ``disagrees`` is true if the two orders prefer different responses, or if only one order
    prefers a response.
    """
    return {
        "preference": (in_order + swapped) / 2,
        "position_bias": (in_order - swapped) / 2,
        "disagrees": (in_order > 0.5) != (swapped > 0.5) or (in_order < 0.5) != (swapped < 0.5),
    }


class PairwiseJudge:
    """Compares pairs with the function ``fn(prompts, responses_a, responses_b, rows)`` at ``path``.

    The arguments are lists of equal length, which the function may modify: prompts and responses as text, and
    the rows of the data set. The function returns, for each pair, the probability from 0 to 1 that response a
    is better. It may be a coroutine function. Each pair is compared in both orders, and the two preferences
    are averaged, so that a judge that always prefers response a gives 0.5 for each pair.
    """

    def __init__(self, path: str):
        """Imports the function; ``path`` is ``pkg.mod:fn`` or ``file.py:fn``."""
        self.path = path
        self._function = load_function(path, "--judge", PARAMETERS)

    def __call__(
        self, prompts: Sequence[str], responses: Sequence[str], others: Sequence[str], rows: Sequence[Row]
    ) -> list[dict[str, Any]]:
        """Returns a verdict for each pair; preference 1 means that ``responses`` has the better response."""
        if not prompts:
            return []
        in_order = self._preferences(prompts, responses, others, rows)
        swapped = [1 - value for value in self._preferences(prompts, others, responses, rows)]
        return list(map(verdict, in_order, swapped))

    def try_on(self, row: Row) -> None:
        """Calls the function with trial responses to one prompt; raises UserError if it fails."""
        try:
            self([row["prompt_text"]], [TRIAL_RESPONSE], [""], [row])
        except UserError as error:
            keys = ", ".join(list(row)[:LISTED_KEYS])
            raise UserError(
                f"{error.problems[0]}; this was a call before the start with the trial responses "
                f"{TRIAL_RESPONSE!r} and '' (keys of the row: {keys})"
            ) from None

    def _preferences(self, *arguments: Sequence[Any]) -> list[float]:
        """Calls the function once and checks what it returns; raises UserError for invalid preferences."""
        call = partial(self._function, *(deepcopy(list(argument)) for argument in arguments))
        prompts = arguments[0]
        try:
            found = read_scores(asyncio.run(call()) if is_async(self._function) else call(), len(prompts))
        except InvalidScore as error:
            where = "" if error.row is None else f" for the prompt {quoted(prompts[error.row])}"
            raise UserError(f"--judge={self.path}: {error}{where}; {REMEDY}") from None
        except (Exception, SystemExit) as error:
            line = " ".join(traceback.format_exception_only(error)[-1].split())
            place = where_raised(error, self._function)
            raise UserError(f"--judge={self.path}: raised {line} at {place}; correct the function") from error
        for prompt, value in zip(prompts, found, strict=True):
            if isinstance(value, list) or not 0 <= value <= 1:
                raise UserError(
                    f"--judge={self.path}: returned {show(value)} for the prompt {quoted(prompt)}; {REMEDY}"
                )
        return [value for value in found if isinstance(value, float)]
