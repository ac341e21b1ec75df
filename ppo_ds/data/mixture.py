"""Several data sets mixed by weight, seen as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

from ppo_ds.data.order import SEED_OFFSET, Interleaved, Order, WeightedRoundRobin
from ppo_ds.data.prompts import PromptSource, padded
from ppo_ds.errors import UserError
from ppo_ds.types import Prompts, Row

T = TypeVar("T")


class MixedSource:
    """The prompts of several sets. A weight is a set's share of the prompts that are drawn, however many it holds.

    Sets take turns by a fixed rule (`Turns`): in any run of steps each has its share, up to less than two prompts, whatever the number of ranks.
    Each set is gone through in passes of its own, so a prompt of a small set with a large share comes up more often, possibly twice in
    one step. One pass over the mixture (an epoch) is as many prompts as the sets hold together, though not each of them once.
    """

    def __init__(self, sources: Sequence[PromptSource], weights: Sequence[float], *, key: str = "data.mix"):
        self.key, self.sources = key, tuple(sources)
        self._turns = WeightedRoundRobin(weights)
        self._starts = [0, *accumulate(len(source) for source in sources)]

    @property
    def shares(self) -> list[float]:
        """Of the prompts drawn; they sum to 1."""
        return self._turns.shares

    @property
    def path(self) -> str:
        """For people: "70% a.jsonl + 30% b.jsonl"."""
        return " + ".join(
            f"{100 * share:.3g}% {source.path}"
            for share, source in zip(self.shares, self.sources, strict=True)
        )

    @property
    def report(self) -> dict[str, int]:
        """The sums of the sets' own."""
        return {name: sum(source.report[name] for source in self.sources) for name in self.sources[0].report}

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(source.longest for source in self.sources)

    def __len__(self) -> int:
        return self._starts[-1]

    def examples(self) -> list[tuple[str, Row]]:
        return [each for source in self.sources for each in source.examples()]

    def expect(self, judged: Callable[[Row], object]) -> None:
        load_all([partial(source.expect, judged) for source in self.sources])

    def order(self, seed: int, shuffle: bool) -> Order:
        orders = [source.order(seed + i * SEED_OFFSET, shuffle) for i, source in enumerate(self.sources)]
        return Interleaved(self._turns, orders, self._starts)

    def batch(self, indices: Sequence[int]) -> Prompts:
        """Prompts at ``indices``, the sets' one after the other, left-padded to their own longest."""
        at = [(bisect_right(self._starts, i) - 1, i) for i in indices]
        return padded([self.sources[k].row(i - self._starts[k]) for k, i in at], self.sources[0].pad_id)


def load_all(makers: Sequence[Callable[[], T]]) -> list[T]:
    """What they make, or all that is wrong with the sets."""
    sources: list[T] = []
    problems: list[str] = []
    for make in makers:
        try:
            sources.append(make())
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return sources
