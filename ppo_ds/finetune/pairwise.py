"""Pairwise loss of a reward model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ppo_ds.algorithm.loss.aggregation import mean_parts


def pairwise_loss(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margins: Tensor | None = None,
    centering: float = 0.0,
    label_smoothing: float = 0.0,
    pairs: float | None = None,
    dp_size: int = 1,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Computes the pairwise logistic loss of a reward model (Bradley and Terry 1952; Ouyang et al. 2022).

    With d = chosen - rejected - margin, the loss of a pair is

        -(1 - label_smoothing) log sigmoid(d) - label_smoothing log sigmoid(-d) + centering (c + r)^2

    Args:
        chosen, rejected: Scores c and r of the two texts of each pair, [b].
        margins: [b]; None: no margins (Touvron et al. 2023).
        centering: Keeps the mean of the scores near 0, which the other terms do not determine (Eisenstein et
            al. 2023).
        label_smoothing: Assumed share of pairs whose label is wrong.
        pairs: Number of pairs of the whole optimizer step, over all ranks and micro-batches. None: these b
            pairs are all. The result is this micro-batch's share of the mean, times ``dp_size``, see
            ``aggregate``.

    Returns:
        The loss, 0-dim, and its metrics, each (sum, count) over pairs: rm/loss, rm/accuracy (a tie counts as
        half a correct pair) and rm/margin_mean (of c - r).
    """
    difference = chosen - rejected
    d = difference if margins is None else difference - margins
    loss = -F.logsigmoid(d)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-d)
    if centering:
        loss = loss + centering * (chosen + rejected).square()
    every = torch.ones_like(d, dtype=torch.bool)
    metrics = {
        "rm/loss": mean_parts(loss, every),
        "rm/accuracy": mean_parts(pair_accuracy(difference.detach()), every),
        "rm/margin_mean": mean_parts(difference, every),
    }
    return loss.sum() * (dp_size / (len(d) if pairs is None else pairs)), metrics


def pair_accuracy(differences: Tensor) -> Tensor:
    """Returns 1 for each pair whose preferred text has the higher score, 0.5 for a tie, and 0 otherwise."""
    return (differences > 0).double() + 0.5 * (differences == 0)
