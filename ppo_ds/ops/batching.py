"""Assignment of rows to micro-batches within a token budget, and to ranks.

All functions are deterministic; indices are on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FORWARD = 64  # fixed cost of one more forward pass, in tokens


def plan_forwards(
    lengths: Tensor, token_budget: int, at_least: int = 1, packed: bool = False
) -> list[Tensor]:
    """Groups rows of ``lengths`` [B] into forward passes, each row in one group.

    Rows are sorted by length, longest first, so that lengths within a group are similar and an out-of-memory
    error occurs in the first group. A group stays within ``token_budget``, unless it is a single row that
    exceeds it.

    Args:
        at_least: Minimum number of groups, at most B; the most expensive groups are halved until it is
            reached. Every rank must run the same number of forward passes.
        packed: Rows are concatenated without padding, and a group costs the sum of its lengths. Otherwise
            rows are padded to the longest of the group, which costs rows * longest, and the grouping has the
            smallest total cost, where each group adds ``FORWARD`` to the cost.

    Returns:
        Row indices of each group (LongTensor).
    """
    sizes = lengths.tolist()
    assert 1 <= at_least <= len(sizes), f"{at_least} groups of {len(sizes)} rows"
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    descending = [sizes[i] for i in order]
    ends = fill_groups(descending, token_budget) if packed else cheapest_groups(descending, token_budget)
    groups = [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def cost(rows: list[int]) -> int:
        return sum(sizes[i] for i in rows) if packed else len(rows) * sizes[rows[0]]

    return _split(groups, at_least, cost)


def plan_microbatches(
    prompt_lengths: Tensor, limits: Tensor, token_budget: int, at_least: int = 1
) -> list[Tensor]:
    """Groups rows before generation, when only the limit of each response is known; see plan_forwards.

    ``limits`` [B] is the maximum number of new tokens of each row. A group costs rows * (its longest prompt +
    its largest limit).
    """
    prompts, responses = prompt_lengths.tolist(), limits.tolist()
    assert 1 <= at_least <= len(prompts), f"{at_least} groups of {len(prompts)} rows"
    groups: list[list[int]] = []
    longest_prompt = longest_response = 0
    for row in sorted(range(len(prompts)), key=lambda i: -(prompts[i] + responses[i])):
        longest_prompt = max(longest_prompt, prompts[row])
        longest_response = max(longest_response, responses[row])
        if groups and (len(groups[-1]) + 1) * (longest_prompt + longest_response) <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest_prompt, longest_response = prompts[row], responses[row]
    return _split(
        groups,
        at_least,
        lambda rows: len(rows) * (max(prompts[i] for i in rows) + max(responses[i] for i in rows)),
    )


def _split(groups: list[list[int]], at_least: int, cost: Callable[[list[int]], int]) -> list[Tensor]:
    while len(groups) < at_least:
        k = max((k for k, rows in enumerate(groups) if len(rows) > 1), key=lambda k: cost(groups[k]))
        half = (len(groups[k]) + 1) // 2
        groups[k : k + 1] = [groups[k][:half], groups[k][half:]]
    return [torch.tensor(rows) for rows in groups]


def padded_tokens(lengths: Tensor, packed: bool) -> int:
    """Counts the tokens of a forward pass over rows of ``lengths`` [b], padding included."""
    return int(lengths.sum()) if packed else len(lengths) * int(lengths.max())


def fill_groups(descending: list[int], token_budget: int) -> list[int]:
    """Returns the ends of consecutive groups, each filled up to the budget."""
    ends, tokens = [], 0
    for i, size in enumerate(descending):
        if i and tokens + size > token_budget:
            ends.append(i)
            tokens = 0
        tokens += size
    return [*ends, len(descending)]


def cheapest_groups(descending: list[int], token_budget: int) -> list[int]:
    """Returns the ends of the padded groups with the smallest total cost, by dynamic programming.

    The cheapest grouping of the first ``end`` rows consists of a last group and the cheapest grouping of the
    rows before it.
    """
    groupings: list[tuple[int, list[int]]] = [(0, [])]  # (cost, ends) for the first 0, 1, 2, ... rows
    for end in range(1, len(descending) + 1):
        best: tuple[int, int] | None = None  # cost, start of the last group
        for start in range(end - 1, -1, -1):
            tokens = (end - start) * descending[start]
            if tokens > token_budget and end - start > 1:
                break
            cost = groupings[start][0] + tokens + FORWARD
            if best is None or cost < best[0]:
                best = cost, start
        groupings.append((best[0], [*groupings[best[1]][1], end]))
    return groupings[-1][1]


def balance_ranks(lengths: Tensor, ranks: int) -> list[Tensor]:
    """Assigns rows of ``lengths`` [B] to ranks, B divisible by ``ranks``.

    Rows are sorted by length, longest first (a stable sort), and assigned in snake order (0 1 2 2 1 0 0 1 2
    ...). Every rank gets the same number of rows and about the same number of tokens.

    Returns:
        Row indices of each rank (LongTensor [B/ranks]).
    """
    assert len(lengths) % ranks == 0, f"{len(lengths)} rows over {ranks} ranks"
    rounds = torch.argsort(lengths.cpu(), descending=True, stable=True).view(-1, ranks).clone()
    rounds[1::2] = rounds[1::2].flip(1)
    return list(rounds.t().contiguous().unbind())
