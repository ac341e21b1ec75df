"""Mixes several data sets by weight into one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

from ppo_ds.data.fingerprint import Fingerprint
from ppo_ds.data.order import SEED_OFFSET, Interleaved, Order, WeightedRoundRobin
from ppo_ds.data.prompts import PromptSource, collate_prompts
from ppo_ds.errors import UserError
from ppo_ds.types import Prompts, Row

T = TypeVar("T")


class MixedSource:
    """Mixes the prompts of several data sets in proportion to their weights, independently of their sizes.

    The sets take turns (``WeightedRoundRobin``), and each set is repeated in separate passes, so a prompt of
    a small set with a large weight occurs more often. One epoch has as many prompts as all sets together.
    """

    unit = "prompts"
    max_tokens_key = "data.max_prompt_tokens"

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float], *, key: str = "data.mix"):
        self.key, self.sources = key, tuple(sources)
        self._turns = WeightedRoundRobin(weights)
        self._starts = [0, *accumulate(len(source) for source in sources)]

    @property
    def shares(self) -> list[float]:
        """The share of each set; the shares sum to 1."""
        return self._turns.shares

    @property
    def path(self) -> str:
        """A description for messages: "70% a.jsonl + 30% b.jsonl"."""
        return " + ".join(
            f"{100 * share:.3g}% {source.path}"
            for share, source in zip(self.shares, self.sources, strict=True)
        )

    @property
    def report(self) -> dict[str, int]:
        return {name: sum(source.report[name] for source in self.sources) for name in self.sources[0].report}

    @property
    def fingerprints(self) -> list[Fingerprint]:
        return [fingerprint for source in self.sources for fingerprint in source.fingerprints]

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt."""
        return max(source.longest for source in self.sources)

    def __len__(self) -> int:
        return self._starts[-1]

    def examples(self) -> list[tuple[str, Row]]:
        return [each for source in self.sources for each in source.examples()]

    def check_rows(self, check: Callable[[Row], object]) -> None:
        collect_user_errors([partial(source.check_rows, check) for source in self.sources])

    def order(self, seed: int, shuffle: bool) -> Order:
        orders = [source.order(seed + i * SEED_OFFSET, shuffle) for i, source in enumerate(self.sources)]
        return Interleaved(self._turns, orders, self._starts)

    def batch(self, indices: Sequence[int]) -> Prompts:
        """Returns the prompts at ``indices``, left-padded; the sets are indexed as if concatenated."""
        members = [(bisect_right(self._starts, i) - 1, i) for i in indices]
        return collate_prompts(
            [self.sources[k].row(i - self._starts[k]) for k, i in members], self.sources[0].pad_id
        )


def collect_user_errors(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Runs all calls and returns the results, or raises one UserError with the problems of all calls."""
    results: list[T] = []
    problems: list[str] = []
    for call in calls:
        try:
            results.append(call())
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return results
