"""Infinite sequences of indices: ``order[i]`` is the index of the item at position i = 0, 1, 2, ...

Positions can be read in any order, so a resumed run needs only its step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import torch

# difference between the seeds of mixed sets; a prime, so that the seeds of their passes differ
SEED_OFFSET = 1_000_003


class Order(Protocol):
    def __getitem__(self, position: int) -> int: ...


class Passes:
    """Repeats passes over ``n`` items, each shuffled with ``seed`` + number of the pass, or unshuffled."""

    def __init__(self, n: int, seed: int, shuffle: bool = True):
        self._n, self._seed, self._shuffle = n, seed, shuffle
        self._pass, self._order = -1, range(n)

    def __getitem__(self, position: int) -> int:
        number, i = divmod(position, self._n)
        if self._shuffle and number != self._pass:
            generator = torch.Generator().manual_seed(self._seed + number)
            self._pass, self._order = number, torch.randperm(self._n, generator=generator).tolist()
        return self._order[i]


class WeightedRoundRobin:
    """Assigns positions to members in proportion to their weights, without randomness.

    ``turns[position]`` is (i, k): turn k of member i, both counted from 0. For every n, the number of each
    member's turns among the first n positions differs from its share of n by less than 1. The rule is
    Tijdeman's (The chairman assignment problem, 1980): among the members that are at least 1 / (2m - 2) turns
    behind (m members), the next turn goes to the member that would be the first to fall too far behind.
    """

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(repr(weight)) for weight in weights]  # 0.1 becomes 1/10
        scale = math.lcm(*(weight.denominator for weight in exact))
        integers = [int(weight * scale) for weight in exact]
        self._weights = [weight // math.gcd(*integers) for weight in integers]
        self._period = sum(self._weights)
        self._taken = [0] * len(integers)
        # members and turns at the positions computed so far, at most one period
        self._members, self._turns = array("L"), array("Q")

    @property
    def shares(self) -> list[float]:
        return [weight / self._period for weight in self._weights]

    def __getitem__(self, position: int) -> tuple[int, int]:
        period, i = divmod(position, self._period)
        total, m = self._period, max(2 * len(self._weights) - 2, 1)
        for n in range(len(self._members) + 1, i + 2):
            # how far each member is behind after n positions, in turns multiplied by the period
            behind = [
                weight * n - total * taken for weight, taken in zip(self._weights, self._taken, strict=True)
            ]
            late = [k for k, turns in enumerate(behind) if m * turns >= total]
            member = min(late, key=lambda k: (total * (m - 1) - m * behind[k]) / self._weights[k])
            self._members.append(member)
            self._turns.append(self._taken[member])
            self._taken[member] += 1
        member = self._members[i]
        return member, period * self._weights[member] + self._turns[i]


class Interleaved:
    """Interleaves several orders; the indices of member i are shifted by ``starts[i]``."""

    def __init__(self, turns: WeightedRoundRobin, orders: Sequence[Order], starts: Sequence[int]):
        self._turns, self._orders, self._starts = turns, orders, starts

    def __getitem__(self, position: int) -> int:
        member, turn = self._turns[position]
        return self._starts[member] + self._orders[member][turn]
