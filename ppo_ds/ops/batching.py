"""Which rows go where: micro-batches within a token budget, and rows to ranks. Deterministic; indices are on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

FORWARD = 64  # tokens that pass through a model in the time that one more forward costs by itself


def plan_forwards(
    lengths: Tensor, token_budget: int, at_least: int = 1, packed: bool = False
) -> list[Tensor]:
    """Lengths [B] of whole rows -> groups of row indices (LongTensor each) that together cover every row once.

    ``packed``: rows share a line without padding, and a group costs the sum of its lengths. Otherwise every row is padded to the group's
    longest, and it costs rows * longest; then rows are grouped so that the cost of all groups, each with ``FORWARD`` more, is the least there is.

    A group stays within ``token_budget`` unless it is a single row that alone exceeds it. Rows are taken by length, the longest first, so that
    lengths within a group are alike and running out of memory shows in the first group. The costliest groups are halved until there
    are ``at_least``, at most B: every rank must run the same number of forwards.
    """
    sizes = lengths.tolist()
    assert 1 <= at_least <= len(sizes), f"{at_least} groups of {len(sizes)} rows"
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    falling = [sizes[i] for i in order]
    ends = _filled(falling, token_budget) if packed else _cheapest(falling, token_budget)
    groups = [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def cost(rows: list[int]) -> int:
        return sum(sizes[i] for i in rows) if packed else len(rows) * sizes[rows[0]]

    return _split(groups, at_least, cost)


def plan_microbatches(
    prompt_lengths: Tensor, limits: Tensor, token_budget: int, at_least: int = 1
) -> list[Tensor]:
    """The same of rows that are yet to be answered: a group costs rows * (its longest prompt + the most tokens that one of its answers may have)."""
    prompts, answers = prompt_lengths.tolist(), limits.tolist()
    assert 1 <= at_least <= len(prompts), f"{at_least} groups of {len(prompts)} rows"
    groups: list[list[int]] = []
    longest_prompt = longest_answer = 0
    for row in sorted(range(len(prompts)), key=lambda i: -(prompts[i] + answers[i])):
        longest_prompt, longest_answer = max(longest_prompt, prompts[row]), max(longest_answer, answers[row])
        if groups and (len(groups[-1]) + 1) * (longest_prompt + longest_answer) <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest_prompt, longest_answer = prompts[row], answers[row]
    return _split(
        groups,
        at_least,
        lambda rows: len(rows) * (max(prompts[i] for i in rows) + max(answers[i] for i in rows)),
    )


def _split(groups: list[list[int]], at_least: int, cost: Callable[[list[int]], int]) -> list[Tensor]:
    while len(groups) < at_least:
        k = max((k for k, rows in enumerate(groups) if len(rows) > 1), key=lambda k: cost(groups[k]))
        half = (len(groups[k]) + 1) // 2
        groups[k : k + 1] = [groups[k][:half], groups[k][half:]]
    return [torch.tensor(rows) for rows in groups]


def places(lengths: Tensor, packed: bool) -> int:
    """Of the forward of rows of these lengths [b], padding counted."""
    return int(lengths.sum()) if packed else len(lengths) * int(lengths.max())


def _filled(falling: list[int], token_budget: int) -> list[int]:
    """Where groups end that are filled one after the other."""
    ends, tokens = [], 0
    for i, size in enumerate(falling):
        if i and tokens + size > token_budget:
            ends.append(i)
            tokens = 0
        tokens += size
    return [*ends, len(falling)]


def _cheapest(falling: list[int], token_budget: int) -> list[int]:
    """Where the groups end that cost least: the cheapest way to the first ``end`` rows has a last group, and the cheapest way to what precedes it."""
    ways: list[tuple[int, list[int]]] = [(0, [])]  # to the first 0, 1, 2, ... rows: cost, ends
    for end in range(1, len(falling) + 1):
        best: tuple[int, int] | None = None  # cost, start of the last group
        for start in range(end - 1, -1, -1):
            places = (end - start) * falling[start]
            if places > token_budget and end - start > 1:
                break
            whole = ways[start][0] + places + FORWARD
            if best is None or whole < best[0]:
                best = whole, start
        ways.append((best[0], [*ways[best[1]][1], end]))
    return ways[-1][1]


def balance_ranks(lengths: Tensor, ranks: int) -> list[Tensor]:
    """Lengths [B], B divisible by ``ranks`` -> the row indices (LongTensor [B/ranks]) of each rank.

    Sorted by length, the longest first and equal ones in their order, then dealt in snake order (0 1 2 2 1 0 0 1 2 ...), so that
    every rank has as many rows and about as many tokens as the others.
    """
    assert len(lengths) % ranks == 0, f"{len(lengths)} rows over {ranks} ranks"
    rounds = torch.argsort(lengths.cpu(), descending=True, stable=True).view(-1, ranks).clone()
    rounds[1::2] = rounds[1::2].flip(1)
    return list(rounds.t().contiguous().unbind())
