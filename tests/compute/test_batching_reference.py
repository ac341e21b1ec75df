"""Compares the plans of forwards with slow references, and counts the operations of planning."""

import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppo_ds.compute.batching import FORWARD, balance_ranks, plan_forwards, plan_microbatches, plan_share

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


def lines_of(run: Callable[[], object]) -> int:
    """Counts the lines of Python that ``run`` executes."""
    count, tracer = 0, sys.gettrace()

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(tracer)
    return count


@pytest.mark.parametrize("budget", [8192, 10**6])
@pytest.mark.parametrize("at_least", ["no split", "all split"])
def test_planning_takes_a_constant_number_of_operations_per_row(budget, at_least):
    def planned(rows: int) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(8, 129, (rows,), generator=generator)
        limits = torch.empty(rows).geometric_(1 / 48, generator=generator).long().clamp(max=256)
        groups = rows if at_least == "all split" else 1
        return [
            lines_of(lambda: plan_forwards(prompts + limits, budget, groups)),
            lines_of(lambda: plan_forwards(prompts + limits, budget, groups, packed=True)),
            lines_of(lambda: plan_microbatches(prompts, limits, budget, groups)),
            lines_of(lambda: plan_share(prompts + limits, budget, 0, 8, packed=False)),
        ]

    for few, many in zip(planned(512), planned(2048), strict=True):
        assert many < 4.5 * few and many < 50 * 2048
