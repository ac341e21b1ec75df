"""Endless orders: which prompt stands at place 0, 1, 2, ... Any place can be asked for, so a resumed run needs nothing but its step."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import torch

SEED_OFFSET = 1_000_003  # a prime: the passes over one set are not those over the next


class Order(Protocol):
    def __getitem__(self, place: int) -> int: ...


class Passes:
    """Pass after pass over ``n`` things, each in its own order, seeded with seed + pass; without ``shuffle`` all in the given one."""

    def __init__(self, n: int, seed: int, shuffle: bool = True):
        self._n, self._seed, self._shuffle = n, seed, shuffle
        self._pass, self._order = -1, range(n)

    def __getitem__(self, place: int) -> int:
        number, i = divmod(place, self._n)
        if self._shuffle and number != self._pass:
            self._pass = number
            self._order = torch.randperm(
                self._n, generator=torch.Generator().manual_seed(self._seed + number)
            ).tolist()
        return self._order[i]


class WeightedRoundRobin:
    """Whose turn it is at each place, by weight: ``turns[place]`` is (i, k), the k-th turn of the i-th (both from 0).

    Among the first n places each has its share of n, up to less than one turn, for every n; nothing is drawn at random. It is the rule
    of Tijdeman (The chairman assignment problem, 1980): of those that are behind by 1 / (2m - 2) turns or more, m in number, the one that
    would be the first to fall too far behind. (Always taking the one that is furthest behind is off by more than one turn for some weights.)
    With the weights as whole numbers without a common divisor it repeats itself after as many places as their sum.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(repr(weight)) for weight in weights]  # 0.1 is a tenth
        scale = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        self._period = sum(self._weights)
        self._taken = [0] * len(whole)
        self._who, self._turn = array("L"), array("Q")  # of the places so far, at most one period

    @property
    def shares(self) -> list[float]:
        return [weight / self._period for weight in self._weights]

    def __getitem__(self, place: int) -> tuple[int, int]:
        period, i = divmod(place, self._period)
        while len(self._who) <= i:
            self._next()
        who = self._who[i]
        return who, period * self._weights[who] + self._turn[i]

    def _next(self) -> None:
        n, total, m = len(self._who) + 1, self._period, max(2 * len(self._weights) - 2, 1)
        behind = [
            weight * n - total * taken for weight, taken in zip(self._weights, self._taken, strict=True)
        ]  # turns, times the period
        who = min(
            (i for i, late in enumerate(behind) if m * late >= total),
            key=lambda i: (total * (m - 1) - m * behind[i]) / self._weights[i],
        )
        self._who.append(who)
        self._turn.append(self._taken[who])
        self._taken[who] += 1


class Interleaved:
    """Several orders, taken in turns. ``starts``: what stands before each one's own numbers, as if all things stood in one row."""

    def __init__(self, turns: WeightedRoundRobin, orders: Sequence[Order], starts: Sequence[int]):
        self._turns, self._orders, self._starts = turns, orders, starts

    def __getitem__(self, place: int) -> int:
        who, turn = self._turns[place]
        return self._starts[who] + self._orders[who][turn]
