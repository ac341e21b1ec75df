"""Transforms of an optimizer step: (its rows, from all ranks, a generator) -> rows of the same number.

The learner applies them in the order of its list, before it divides the rows among ranks and micro-batches.
The generator has the same state on every rank. It draws selected tokens, never the order of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ppo_ds.algorithm.credit.whitening import Whitening
from ppo_ds.algorithm.policy.selection import top_entropy_tokens
from ppo_ds.types import Experience

Transform = Callable[[Experience, torch.Generator], Experience]


def whitened(rows: Experience, _: torch.Generator, *, whitening: Whitening) -> Experience:
    """Whitens the advantages (`algo.advantage.whiten=minibatch`)."""
    return replace(rows, advantages=whitening.whiten(rows.advantages, rows.response_mask))


def without_truncated(rows: Experience, _: torch.Generator) -> Experience:
    """Removes the responses that did not end with a stop from the masks of the losses (Yu et al. 2025).

    The rows stay, so that the size of a minibatch does not change. Models still attend to their tokens.
    """
    ended = rows.finished[:, None]
    states = None if rows.value_mask is None else rows.value_mask & ended
    return replace(rows, response_mask=rows.response_mask & ended, value_mask=states)


def with_top_entropy(rows: Experience, _: torch.Generator, *, share: float) -> Experience:
    """Limits the policy loss to the ``share`` of the tokens with the highest entropy (Wang et al. 2025).

    The other tokens still count in the divisor of the mean. Rows without entropies stay as they are.
    """
    if rows.entropy is None:
        return rows
    kept = top_entropy_tokens(rows.entropy, rows.response_mask, share)
    return replace(rows, weights=rows.weights.masked_fill(~kept, 0.0))


def with_selected(
    rows: Experience, generator: torch.Generator, *, selection: Callable[..., Tensor]
) -> Experience:
    """Adds the column ``selected`` of a policy loss (PolicyConfig.selection) to rows that have log-probs."""
    if rows.logprobs is None:
        return rows
    selected = selection(rows.logprobs, rows.advantages, rows.response_mask, generator)
    return replace(rows, selected=selected)
