"""Which rows go where: micro-batches within a token budget, and rows to ranks. Deterministic; indices are on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def plan_microbatches(prompt_lengths: Tensor, response_lengths: Tensor, token_budget: int, at_least: int = 1) -> list[Tensor]:
    """Lengths [B] -> groups of row indices (LongTensor each) that together cover every row once.

    A group costs rows * (its longest prompt + its longest response), the places of its padded [b,P+T] tensors, and stays within
    ``token_budget`` unless it is a single row that alone exceeds it. Rows are taken by total length, the longest first, so that
    lengths within a group are alike and running out of memory shows in the first group. The costliest groups are halved until there
    are ``at_least``, at most B: every rank must run the same number of forwards.
    """
    prompts, responses = prompt_lengths.tolist(), response_lengths.tolist()
    assert 1 <= at_least <= len(prompts), f"{at_least} groups of {len(prompts)} rows"
    groups: list[list[int]] = []
    longest_prompt = longest_response = 0
    for row in sorted(range(len(prompts)), key=lambda i: -(prompts[i] + responses[i])):
        longest_prompt, longest_response = max(longest_prompt, prompts[row]), max(longest_response, responses[row])
        if groups and (len(groups[-1]) + 1) * (longest_prompt + longest_response) <= token_budget:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest_prompt, longest_response = prompts[row], responses[row]

    def cost(rows: list[int]) -> int:
        return len(rows) * (max(prompts[i] for i in rows) + max(responses[i] for i in rows))

    while len(groups) < at_least:
        k = max((k for k, rows in enumerate(groups) if len(rows) > 1), key=lambda k: cost(groups[k]))
        half = (len(groups[k]) + 1) // 2
        groups[k : k + 1] = [groups[k][:half], groups[k][half:]]
    return [torch.tensor(rows) for rows in groups]


def deal(lengths: Tensor, ranks: int) -> list[Tensor]:
    """Lengths [B], B divisible by ``ranks`` -> the row indices (LongTensor [B/ranks]) of each rank.

    Sorted by length, the longest first and equal ones in their order, then dealt in snake order (0 1 2 2 1 0 0 1 2 ...), so that
    every rank has as many rows and about as many tokens as the others.
    """
    assert len(lengths) % ranks == 0, f"{len(lengths)} rows over {ranks} ranks"
    rounds = torch.argsort(lengths.cpu(), descending=True, stable=True).view(-1, ranks).clone()
    rounds[1::2] = rounds[1::2].flip(1)
    return list(rounds.t().contiguous().unbind())
