"""Assigns rows to micro-batches within a token budget, and to ranks.

All functions are deterministic; indices are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise

import torch
from torch import Tensor

FORWARD = 64  # fixed cost of one more forward pass, in tokens


def plan_forwards(
    lengths: Tensor, token_budget: int, at_least: int = 1, packed: bool = False
) -> list[Tensor]:
    """Groups rows of ``lengths`` [B] into forward passes within ``token_budget``; returns their row indices.

    The longest rows come first, so that an out-of-memory error occurs in the first group. A group of packed
    rows costs the sum of their lengths. A group of padded rows costs rows * longest + ``FORWARD``, and padded
    rows are grouped for the smallest total cost. The most expensive groups are halved until there are
    ``at_least`` groups, since all ranks must run equally many. A row above the budget is a separate group.
    """
    assert 1 <= at_least <= len(lengths), f"{at_least} groups of {len(lengths)} rows"
    order = torch.argsort(lengths.cpu(), descending=True, stable=True)
    descending = lengths.cpu()[order].tolist()
    if packed:
        tokens = [0, *accumulate(descending)]
        ends = fill_groups(descending, token_budget)
        ends = split_groups(ends, at_least, lambda start, end: tokens[end] - tokens[start])
    else:
        ends = cheapest_groups(descending, token_budget)
        ends = split_groups(ends, at_least, lambda start, end: (end - start) * descending[start])
    return _groups(order, ends)


def plan_microbatches(
    prompt_lengths: Tensor, limits: Tensor, token_budget: int, at_least: int = 1
) -> list[Tensor]:
    """Groups rows for generation within ``token_budget``; returns the row indices of each group.

    A group costs rows * (longest prompt + largest limit of new tokens). ``at_least``: see ``plan_forwards``.
    """
    assert 1 <= at_least <= len(limits), f"{at_least} groups of {len(limits)} rows"
    order = torch.argsort((prompt_lengths + limits).cpu(), descending=True, stable=True)
    prompts, responses = prompt_lengths.cpu()[order].tolist(), limits.cpu()[order].tolist()
    ends: list[int] = []
    first = longest_prompt = longest_response = 0  # of the current group
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        longest_prompt, longest_response = max(longest_prompt, prompt), max(longest_response, response)
        if row > first and (row - first + 1) * (longest_prompt + longest_response) > token_budget:
            ends.append(row)
            first, longest_prompt, longest_response = row, prompt, response

    def cost(start: int, end: int) -> int:
        return (end - start) * (max(prompts[start:end]) + max(responses[start:end]))

    return _groups(order, split_groups([*ends, len(order)], at_least, cost))


def _groups(order: Tensor, ends: list[int]) -> list[Tensor]:
    return list(order.split([end - start for start, end in pairwise([0, *ends])]))


def split_groups(ends: list[int], at_least: int, cost: Callable[[int, int], int]) -> list[int]:
    """Halves the most expensive group until there are ``at_least`` groups; returns the end index of each.

    Of equally expensive groups, the first is halved. ``cost(start, end)`` is the cost of one group.
    """
    if len(ends) >= at_least:
        return ends
    ends = list(ends)
    heap = [(-cost(start, end), start, end) for start, end in pairwise([0, *ends]) if end - start > 1]
    heapify(heap)
    while len(ends) < at_least:
        _, start, end = heappop(heap)
        middle = start + (end - start + 1) // 2
        ends.append(middle)
        for half in ((start, middle), (middle, end)):
            if half[1] - half[0] > 1:
                heappush(heap, (-cost(*half), *half))
    return sorted(ends)


def padded_tokens(lengths: Tensor, packed: bool) -> int:
    """Returns the number of tokens of a forward pass over rows of ``lengths`` [b], padding included."""
    return int(lengths.sum()) if packed else len(lengths) * int(lengths.max())


def fill_groups(descending: list[int], token_budget: int) -> list[int]:
    """Returns the ends of consecutive groups of ``descending`` lengths, each filled up to the budget."""
    ends, tokens = [], 0
    for i, size in enumerate(descending):
        if i and tokens + size > token_budget:
            ends.append(i)
            tokens = 0
        tokens += size
    return [*ends, len(descending)]


def cheapest_groups(descending: list[int], token_budget: int) -> list[int]:
    """Returns the ends of the groups of padded rows with the smallest total cost, by dynamic programming.

    If two groupings have equal costs, returns the one whose last group starts later.
    """
    sizes, count = torch.tensor(descending), len(descending)
    costs = torch.zeros(count + 1).long()  # cost of the cheapest grouping of the first 0, 1, 2, ... rows
    starts = [0] * (count + 1)  # start of its last group
    earliest = 0  # start of the longest group that fits; it increases with the end, since rows get shorter
    for end in range(1, count + 1):
        while earliest < end - 1 and (end - earliest) * descending[earliest] > token_budget:
            earliest += 1
        tokens = torch.arange(end - earliest, 0, -1) * sizes[earliest:end]
        least, rows_before = (costs[earliest:end] + tokens).flip(0).min(0)  # the first, if equal
        starts[end] = end - 1 - int(rows_before)
        costs[end] = least + FORWARD
    ends = [count]
    while starts[ends[-1]]:
        ends.append(starts[ends[-1]])
    return ends[::-1]


def balance_ranks(lengths: Tensor, ranks: int) -> list[Tensor]:
    """Assigns the same number of rows of ``lengths`` [B] to each rank; returns each rank's row indices.

    Rows sorted by length are dealt in snake order (0 1 2 2 1 0 0 1 2 ...) for similar numbers of tokens.
    """
    assert len(lengths) % ranks == 0, f"{len(lengths)} rows over {ranks} ranks"
    rounds = torch.argsort(lengths.cpu(), descending=True, stable=True).view(-1, ranks).clone()
    rounds[1::2] = rounds[1::2].flip(1)
    return list(rounds.t().contiguous().unbind())


def plan_share(lengths: Tensor, token_budget: int, rank: int, ranks: int, packed: bool) -> list[Tensor]:
    """Groups the rows that ``balance_ranks`` assigns to ``rank`` into forwards; returns their row indices.

    The number of forwards is the same on all ranks.
    """
    shares = balance_ranks(lengths, ranks)
    plans = [plan_forwards(lengths[rows], token_budget, packed=packed) for rows in shares]
    plan, count = plans[rank], max(len(plan) for plan in plans)
    if len(plan) < count:
        plan = plan_forwards(lengths[shares[rank]], token_budget, count, packed)
    return [shares[rank][rows] for rows in plan]
