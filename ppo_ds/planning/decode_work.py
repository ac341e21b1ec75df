"""Lengths of responses before a run, and the work of decoding them in a batch of limited size."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class DecodeWork:
    """Work of decoding a number of rows on one rank."""

    steps: int  # decode steps, each of which reads all weights
    row_steps: int  # generated tokens: rows of a step, summed over the steps
    contexts: int  # cached positions that are read, summed over steps and rows


def response_lengths(count: int, limit: int, mean: float | None) -> list[int]:
    """Returns ``count`` response lengths, longest first.

    Without ``mean`` all of them are ``limit``. Otherwise a response ends after each token with the same
    probability, and all lengths above ``limit`` are cut: the lengths are equally spaced quantiles of this
    geometric distribution, whose mean before the cut is ``mean``.
    """
    if mean is None:
        return [limit] * count
    if mean <= 1:
        return [1] * count
    survival = math.log1p(-1 / mean)  # of one more token
    quantiles = ((i + 0.5) / count for i in range(count))
    return [min(limit, max(1, math.ceil(math.log(share) / survival))) for share in quantiles]


def decode_work(prompts: Sequence[int], responses: Sequence[int], slots: int) -> DecodeWork:
    """Counts the work of decoding rows in ``slots`` slots; a free slot takes the next row.

    As in rollout/continuous_batch.py, all rows of a decode step read as many cached positions as the longest
    of them has.
    """
    waiting = [(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
    waiting.reverse()  # the next row is the last of the list
    live: list[tuple[int, int]] = []  # (the step at which the row ends, cached positions at step 0)
    now = row_steps = contexts = 0
    while waiting or live:
        while waiting and len(live) < slots:
            prompt, response = waiting.pop()
            heapq.heappush(live, (now + response, prompt - now))
        steps, width = live[0][0] - now, len(live)
        longest = max(offset for _, offset in live) + now
        row_steps += steps * width
        contexts += width * (steps * longest + steps * (steps - 1) // 2)
        now = live[0][0]
        while live and live[0][0] == now:
            heapq.heappop(live)
    return DecodeWork(now, row_steps, contexts)
