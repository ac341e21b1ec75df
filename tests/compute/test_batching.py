"""Compares the plans of forwards with slow references, and the shares of ranks with numbers by hand."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_ds.compute.batching import (
    FORWARD,
    balance_ranks,
    padded_tokens,
    plan_forwards,
    plan_microbatches,
    plan_share,
)

budgets = st.sampled_from([1, 7, 50, 200, 1000, 5000, 10**6])
sizes = st.sampled_from([1, 2, 5, 20, 100, 1000]).flatmap(
    lambda longest: st.lists(st.integers(0, longest), min_size=1, max_size=40)
)


def halved(groups: list[list[int]], at_least: int, cost: Callable[[list[int]], int]) -> list[list[int]]:
    """Halves the first of the most expensive groups until there are ``at_least``."""
    while len(groups) < at_least:
        k = max((k for k, rows in enumerate(groups) if len(rows) > 1), key=lambda k: cost(groups[k]))
        half = (len(groups[k]) + 1) // 2
        groups[k : k + 1] = [groups[k][:half], groups[k][half:]]
    return groups


def forwards(lengths: list[int], budget: int, at_least: int, packed: bool) -> list[list[int]]:
    """Plans forwards by comparing all groupings row by row, in quadratic time."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if packed:
        groups: list[list[int]] = []
        for row in order:
            if groups and sum(lengths[i] for i in groups[-1]) + lengths[row] <= budget:
                groups[-1].append(row)
            else:
                groups.append([row])
        return halved(groups, at_least, lambda rows: sum(lengths[i] for i in rows))
    best: list[tuple[int, list[list[int]]]] = [(0, [])]  # cost and groups of the first 0, 1, 2, ... rows
    for end in range(1, len(order) + 1):
        found = []
        for start in range(end - 1, -1, -1):
            tokens = (end - start) * lengths[order[start]]
            if tokens <= budget or end - start == 1:
                found.append((best[start][0] + tokens + FORWARD, [*best[start][1], order[start:end]]))
        best.append(min(found, key=lambda grouping: grouping[0]))  # the first of equals has the latest start
    return halved(best[-1][1], at_least, lambda rows: len(rows) * lengths[rows[0]])


def microbatches(prompts: list[int], limits: list[int], budget: int, at_least: int) -> list[list[int]]:
    def cost(rows: list[int]) -> int:
        return len(rows) * (max(prompts[i] for i in rows) + max(limits[i] for i in rows))

    groups: list[list[int]] = []
    for row in sorted(range(len(prompts)), key=lambda i: -(prompts[i] + limits[i])):
        if groups and cost([*groups[-1], row]) <= budget:
            groups[-1].append(row)
        else:
            groups.append([row])
    return halved(groups, at_least, cost)


def lists(plan: list[Tensor]) -> list[list[int]]:
    return [rows.tolist() for rows in plan]


@settings(max_examples=300, deadline=None)
@given(lengths=sizes, budget=budgets, packed=st.booleans(), more=st.integers(0, 39))
@example(lengths=[5, 5, 5, 5, 5, 5], budget=10, packed=True, more=3)  # the first of equals is halved
@example(lengths=[5, 5, 5, 5, 5, 5], budget=10, packed=False, more=3)
@example(lengths=[5, 5, 5], budget=10, packed=False, more=0)  # of equals, the later start
def test_forwards_are_those_of_the_reference(lengths, budget, packed, more):
    at_least = 1 + more % len(lengths)
    plan = plan_forwards(torch.tensor(lengths), budget, at_least, packed)
    assert lists(plan) == forwards(lengths, budget, at_least, packed)


@settings(max_examples=150, deadline=None)
@given(prompts=sizes, budget=budgets, data=st.data())
def test_microbatches_are_those_of_the_reference(prompts, budget, data):
    limits = data.draw(st.lists(st.integers(0, 300), min_size=len(prompts), max_size=len(prompts)))
    at_least = data.draw(st.integers(1, len(prompts)))
    plan = plan_microbatches(torch.tensor(prompts), torch.tensor(limits), budget, at_least)
    assert lists(plan) == microbatches(prompts, limits, budget, at_least)


@settings(max_examples=100, deadline=None)
@given(lengths=sizes, ranks=st.sampled_from([1, 2, 3, 8]), budget=budgets, packed=st.booleans())
def test_shares_are_those_of_the_reference(lengths, ranks, budget, packed):
    total = torch.tensor(lengths * ranks)
    shares = [rows.tolist() for rows in balance_ranks(total, ranks)]
    counts = [len(forwards([int(total[i]) for i in rows], budget, 1, packed)) for rows in shares]
    for rank, rows in enumerate(shares):
        plan = forwards([int(total[i]) for i in rows], budget, max(counts), packed)
        assert lists(plan_share(total, budget, rank, ranks, packed)) == [
            [rows[i] for i in part] for part in plan
        ]


def test_padded_tokens_worked_by_hand():
    assert (
        padded_tokens(torch.tensor([6, 2, 4]), packed=False) == 18
        and padded_tokens(torch.tensor([6, 2, 4]), packed=True) == 12
    )


@pytest.mark.parametrize("packed", [False, True])
def test_forwards_are_no_more_than_rows(packed):
    with pytest.raises(AssertionError):
        plan_forwards(torch.tensor([3, 4]), 100, 3, packed)


def test_balanced_ranks_worked_by_hand():
    assert [hand.tolist() for hand in balance_ranks(torch.tensor([1, 2, 3, 4, 5, 6]), 3)] == [
        [5, 0],
        [4, 1],
        [3, 2],
    ]
    # rows of equal length keep their order
    assert [hand.tolist() for hand in balance_ranks(torch.tensor([7, 7, 7, 7, 7, 7, 7, 7]), 2)] == [
        [0, 3, 4, 7],
        [1, 2, 5, 6],
    ]
    assert balance_ranks(torch.full((400,), 7), 2)[0].tolist() == [i for i in range(400) if i % 4 in (0, 3)]
    with pytest.raises(AssertionError):
        balance_ranks(torch.tensor([1, 2, 3]), 2)
