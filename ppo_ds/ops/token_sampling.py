"""Sampling of the next token of each row, on the device and without host synchronisation.

The cumulative distribution function is inverted at a given uniform random number per row and position. So a
token does not depend on other rows, on the batch size or on the scheduling.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 128  # the vocabulary is searched in two levels: blocks, then tokens of one block
# keeps the target below the total, so that the search finds a token, and never one with probability 0
_BELOW_ONE = 1 - 1e-12


def draw(
    logits: Tensor,
    uniforms: Tensor,
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    barred: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Samples one token per row of logits [n,V]; returns tokens [n] long and their log-probs [n] float32.

    Log-probs are those of the whole distribution at ``temperature``, before ``barred`` and the filters top_k
    and top_p, which work as in transformers. ``uniforms`` is [n] float64 in [0,1). ``top_k`` 0 is off, 1 is
    greedy; ``top_p`` 1.0 is off. ``barred`` is (token ids [k], mask [n] of the rows that must not get them).
    """
    scores = logits.float()
    logprobs = torch.log_softmax(scores if temperature == 1.0 else scores / temperature, dim=-1)
    if barred is not None:
        ids, rows = barred
        masked = scores.index_select(1, ids).masked_fill_(rows[:, None], -torch.inf)
        scores = scores.index_copy(1, ids, masked)
    if top_k == 1:
        tokens = scores.argmax(dim=-1)
    elif barred is None and top_k == 0 and top_p == 1.0:
        tokens = inverse_cdf(logprobs.exp(), uniforms)
    else:
        tokens = inverse_cdf(filter_logits(scores / temperature, top_k, top_p).softmax(dim=-1), uniforms)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def filter_logits(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """Sets scores [n,V] below the ``top_k`` largest, or in the tail of probability 1 - ``top_p``, to -inf.

    Scores equal to the last of the ``top_k`` largest stay, and so does the most likely token.
    """
    if 0 < top_k < scores.shape[1]:
        scores = scores.masked_fill(scores < scores.topk(top_k, dim=-1).values[:, -1:], -torch.inf)
    if top_p < 1.0:
        ascending, order = scores.sort(dim=-1)
        tail = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        tail.select(1, -1).fill_(False)  # the most likely token always stays
        scores = scores.masked_fill(tail.scatter(1, order, tail), -torch.inf)
    return scores


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Returns for each row of weights [n,V] the token at which the running sum exceeds uniform * total, [n].

    Float64 running sums select a block, then a token of the block, because a float32 sum over 150k tokens has
    errors larger than its smallest terms.
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
    # a fraction of the block, since the sum of a block and its last running sum round differently
    fraction = ((target - (running.gather(1, block) - mass)) / mass).clamp_(0.0, _BELOW_ONE)
    inner = blocks.gather(1, block[..., None].expand(-1, -1, _BLOCK))[:, 0].double().cumsum(dim=-1)
    return block[:, 0] * _BLOCK + (inner <= fraction * inner[:, -1:]).sum(dim=-1)
