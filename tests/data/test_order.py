"""Tests orders: passes over one set, and weighted round-robin between several sets."""

from collections import Counter
from fractions import Fraction

import pytest

from ppo_ds.data.order import Interleaved, Passes, WeightedRoundRobin

WEIGHTS = [
    [1],
    [1, 1],
    [7, 2, 1],
    [0.7, 0.3],
    [0.1, 0.2, 0.3],
    [5, 1, 1, 1, 1, 1],
    [1, 1000],
    [23, 1, 1, 1, 1, 1, 1, 23, 23, 1, 1, 1, 1, 1, 1],
]


def first(order, n):
    return [order[place] for place in range(n)]


def test_every_pass_has_every_index_once_in_its_own_order():
    seen = first(Passes(9, seed=4), 27)
    passes = [seen[i : i + 9] for i in (0, 9, 18)]
    assert all(sorted(each) == list(range(9)) for each in passes) and len(set(map(tuple, passes))) == 3
    assert first(Passes(9, seed=5), 9) == passes[1]  # each pass is seeded with seed + pass
    assert first(Passes(3, seed=4, shuffle=False), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_any_position_of_any_pass_can_be_queried():
    passes = Passes(5, seed=1)
    seen = first(passes, 20)
    fresh = Passes(5, seed=1)
    assert [fresh[place] for place in (17, 3, 19, 0, 8)] == [seen[place] for place in (17, 3, 19, 0, 8)]


def test_turns_by_hand():
    """Computes the turns for the shares 1/2, 1/4 and 1/4 by hand.

    With m = 3, a member is eligible if it is behind by 1/4 or more; the lowest (3/4 - behind) / share wins.

    place 0: behind by 1/2, 1/4, 1/4; (1/4) / (1/2) = 1/2 against 2 and 2: the first wins
    place 1: behind by 0, 1/2, 1/2; 1 against 1: the second wins, which precedes the third
    place 2: behind by 1/2, -1/4, 3/4; 1/2 against 0: the third wins
    place 3: behind by 1, 0, 0: the first wins
    """
    turns = WeightedRoundRobin([2, 1, 1])
    assert first(turns, 8) == [(0, 0), (1, 0), (2, 0), (0, 1), (0, 2), (1, 1), (2, 1), (0, 3)]
    assert turns.shares == [0.5, 0.25, 0.25]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shares_are_exact_to_less_than_one_turn_at_every_position(weights):
    turns, taken = WeightedRoundRobin(weights), Counter()
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    for n in range(1, 2500):
        who, turn = turns[n - 1]
        assert turn == taken[who]
        taken[who] += 1
        assert all(abs(taken[i] - n * share) < 1 for i, share in enumerate(shares)), n
    assert turns.shares == pytest.approx([float(share) for share in shares])


def test_any_window_has_the_shares():
    turns, shares = WeightedRoundRobin([0.6, 0.3, 0.1]), [0.6, 0.3, 0.1]
    who = [i for i, _ in first(turns, 200)]
    for start in range(0, 100):
        for length in (1, 7, 10, 64):
            count = Counter(who[start : start + length])
            assert all(abs(count[i] - length * share) < 2 for i, share in enumerate(shares))
    # windows of a whole period have exact shares
    assert all(Counter(who[start : start + 10]) == {0: 6, 1: 3, 2: 1} for start in range(0, 190, 10))


@pytest.mark.parametrize("weights", [[7, 2, 1], [0.25, 0.5], [0.123, 0.5]])
def test_any_turn_can_be_queried(weights):
    turns = first(WeightedRoundRobin(weights), 3000)
    assert [WeightedRoundRobin(weights)[place] for place in (2999, 1234, 40, 0)] == [
        turns[place] for place in (2999, 1234, 40, 0)
    ]


def test_turns_have_no_seed_and_equal_weights_no_scale():
    assert (
        first(WeightedRoundRobin([1, 3]), 100)
        == first(WeightedRoundRobin([0.25, 0.75]), 100)
        == first(WeightedRoundRobin([5, 15]), 100)
    )


def test_interleaved_orders_advance_one_by_one():
    """Weights 2 and 1 give ABA ABA ...; A has 3 items with indices 0 to 2, B has 2 with indices 3 and 4."""
    order = Interleaved(
        WeightedRoundRobin([2, 1]), [Passes(3, 0, shuffle=False), Passes(2, 0, shuffle=False)], [0, 3]
    )
    assert first(order, 12) == [0, 3, 1, 2, 4, 0, 1, 3, 2, 0, 4, 1]
