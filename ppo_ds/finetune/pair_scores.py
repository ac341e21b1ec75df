"""Scores preference pairs with a reward model, and computes statistics: accuracy, margins, calibration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ppo_ds.compute.batching import plan_share
from ppo_ds.data.preferences import PreferenceSource
from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.finetune.pairwise import pair_accuracy
from ppo_ds.types import Metrics, PreferencePairs

CHUNK = 1024  # pairs that are padded together
BINS = 10  # bins of the calibration curve, between the confidences 0.5 and 1
PERCENTILES = (10, 50, 90)


def pair_plan(pairs: PreferencePairs, token_budget: int, world: World, packed: bool) -> list[Tensor]:
    """Returns the indices of the pairs in each forward over this rank's share of ``pairs``.

    Both texts of a pair are in the same forward, which has at most ``token_budget`` tokens unless a single
    pair has more. Every rank runs the same number of forwards. Not a collective, since every rank holds all
    pairs. Their number must be divisible by the number of ranks.
    """
    # tokens per pair; if both texts are padded to the longer text, half of the tokens and of the budget
    lengths = pairs.lengths.sum(1) if packed else pairs.lengths.max(1).values
    budget = token_budget if packed else max(token_budget // 2, 1)
    return plan_share(lengths, budget, world.rank, world.size, packed)


def score_pairs(scorer: TrainedModel, micro: PreferencePairs) -> Tensor:
    """Returns the scores of the preferred and the rejected texts, [b,2] in fp32."""
    return scorer(micro.ids.flatten(0, 1), micro.mask.flatten(0, 1)).view(-1, 2)


@dataclass(frozen=True)
class PairScores:
    """Scores of N pairs, equal on all ranks. Column 0 is the preferred text, column 1 the rejected text."""

    scores: Tensor  # [N,2] float32
    lengths: Tensor  # [N,2] long: tokens
    subsets: list[str | None]  # N

    @property
    def differences(self) -> Tensor:
        """Score of the preferred minus score of the rejected text, [N] float64."""
        return (self.scores[:, 0] - self.scores[:, 1]).double()

    def mean_and_std(self) -> tuple[float, float]:
        """Returns the mean and the standard deviation of the scores of all texts."""
        return float(self.scores.double().mean()), float(self.scores.double().std(correction=0))

    def calibration(self) -> list[tuple[float, float, int]]:
        """Returns (mean confidence, accuracy, number of pairs) of each non-empty bin.

        The confidence sigmoid(|d|) is the model's probability of its choice (Bradley and Terry 1952). It
        equals the accuracy if the model is calibrated.
        """
        confidence, correct = self.differences.abs().sigmoid(), pair_accuracy(self.differences)
        bins = ((confidence - 0.5) * 2 * BINS).long().clamp(0, BINS - 1)
        masks = (bins == i for i in bins.unique())
        return [
            (float(confidence[mask].mean()), float(correct[mask].mean()), int(mask.sum())) for mask in masks
        ]

    def metrics(self) -> Metrics:
        """Computes eval/*. A tie counts as half a correct pair; eval/margin_* are of ``differences``."""
        d, correct = self.differences, pair_accuracy(self.differences)
        mean, std = self.mean_and_std()
        found = {
            "eval/accuracy": float(correct.mean()),
            "eval/loss": float(-F.logsigmoid(d).mean()),
            "eval/ties": float((d == 0).double().mean()),
            "eval/score_mean": mean,
            "eval/score_std": std,
            "eval/margin_mean": float(d.mean()),
            "eval/margin_std": float(d.std(correction=0)),
        }
        quantiles = d.quantile(torch.tensor(PERCENTILES, dtype=torch.float64) / 100).tolist()
        found |= {f"eval/margin_p{p}": value for p, value in zip(PERCENTILES, quantiles, strict=True)}
        gaps = [abs(confidence - accuracy) * n for confidence, accuracy, n in self.calibration()]
        found["eval/calibration_error"] = sum(gaps) / len(d)
        correlation = torch.stack([self.scores.flatten(), self.lengths.flatten()]).double().corrcoef()[0, 1]
        found["eval/length_corr"] = float(correlation.nan_to_num())  # 0 if either is constant
        for name in sorted({name for name in self.subsets if name}):
            rows = [i for i, subset in enumerate(self.subsets) if subset == name]
            found[f"eval/accuracy/{name}"] = float(correct[rows].mean())
        return found


@torch.no_grad()
def score_source(
    scorer: TrainedModel,
    source: PreferenceSource,
    *,
    most: int | None,
    token_budget: int,
    packed: bool,
    check: Callable[[], None],
) -> PairScores:
    """Scores the first ``most`` pairs of a source (None: all). All ranks must call this.

    ``check`` is a collective that raises Abandoned after a stop request; it is called every CHUNK pairs.
    """
    world, total = scorer.world, len(source) if most is None else min(most, len(source))
    scores, lengths = torch.zeros(total, 2), torch.zeros(total, 2, dtype=torch.long)
    for start in range(0, total, CHUNK):
        rows = range(start, min(start + CHUNK, total))
        pairs = source.batch(rows).filled(world.size)
        lengths[rows.start : rows.stop] = pairs.lengths[: len(rows)]
        found, plan = torch.zeros(len(pairs), 2), pair_plan(pairs, token_budget, world, packed)
        parts = [score_pairs(scorer, pairs.select(part).trimmed()).float() for part in plan]
        found[torch.cat(plan)] = torch.cat(parts).cpu()  # the host waits once, after the last forward
        scores[rows.start : rows.stop] = world.sum(found)[: len(rows)]
        check()
    return PairScores(scores, lengths, source.subsets[:total])
