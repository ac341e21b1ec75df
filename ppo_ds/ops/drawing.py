"""The next token of each row, drawn on the device: no host synchronisation, no random number but one uniform per token.

Tokens are drawn by inverting the distribution function at a given uniform number. So the caller may draw all numbers of a rollout at
its start, one per row and place: which token a row draws then depends on no other row, on no batch width and on no scheduling.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128  # the vocabulary is searched in two levels: blocks, then tokens of one block
_BELOW_ONE = (
    1 - 1e-12
)  # a target below the total: there is always a token to hit, and never one of probability 0


def draw(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    barred: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [n,V], uniforms [n] float64 in [0,1) -> tokens [n] long and their log-probs [n] float32.

    Log-probs are those of the whole distribution at ``temperature``, before ``top_k`` (0 = off, 1 = greedy), ``top_p`` (1.0 = off) and
    ``barred``: token ids [k] that the rows [n] bool may not take. They narrow as transformers' warpers do, in the same order.
    """
    scores = logits.float()
    logprobs = torch.log_softmax(scores if temperature == 1.0 else scores / temperature, dim=-1)
    if barred is not None:
        ids, rows = barred
        scores = scores.index_copy(
            1, ids, scores.index_select(1, ids).masked_fill_(rows[:, None], -torch.inf)
        )
    if top_k == 1:
        tokens = scores.argmax(dim=-1)
    elif barred is None and top_k == 0 and top_p == 1.0:
        tokens = invert(logprobs.exp(), uniforms)
    else:
        tokens = invert(narrowed(scores / temperature, top_k, top_p).softmax(dim=-1), uniforms)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def narrowed(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """scores [n,V] -> the same with -inf where a token is not among the ``top_k`` (ties stay), or in the tail of mass 1 - ``top_p``."""
    if 0 < top_k < scores.shape[1]:
        scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ascending, order = scores.sort(dim=-1)
        tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        tail[:, -1] = False  # the likeliest always stays
        scores = scores.masked_fill(tail.scatter(1, order, tail), -torch.inf)
    return scores


def invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """weights [n,V] >= 0 (of any positive sum), uniforms [n] float64 in [0,1) -> the token [n] at which the running sum passes u x total.

    A float32 running sum over 150k tokens would be off by more than its smallest terms: sums of blocks are added up in float64, then
    the tokens of the block that was hit.
    """
    n, vocabulary = weights.shape
    if vocabulary % _BLOCK:
        weights = torch.nn.functional.pad(weights, (0, -vocabulary % _BLOCK))
    blocks = weights.view(n, -1, _BLOCK)
    sums = blocks.sum(dim=-1).double()
    running = sums.cumsum(dim=-1)
    target = (uniforms * _BELOW_ONE * running[:, -1])[:, None]
    block = (running <= target).sum(dim=-1, keepdim=True)
    mass = sums.gather(1, block)
    share = ((target - (running.gather(1, block) - mass)) / mass).clamp_(
        0.0, _BELOW_ONE
    )  # where in its block: sums round otherwise than terms
    inner = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    return block[:, 0] * _BLOCK + (inner <= share * inner[:, -1:]).sum(dim=-1)
