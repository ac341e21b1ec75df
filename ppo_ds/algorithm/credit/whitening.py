"""Whitening of advantages, `algo.advantage.whiten`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_ds.ops.masked import Reduce, masked_mean, masked_whiten
from ppo_ds.ops.sequences import broadcast_sequence


@dataclass(frozen=True)
class Whitening:
    """Scales advantages to mean 0 and variance 1, over all tokens or, at ``level`` "sequence", responses."""

    over: str  # batch | none | group | minibatch
    unbiased: bool
    level: str  # token | sequence

    def whiten(self, advantages: Tensor, mask: Tensor, reduce: Reduce | None = None) -> Tensor:
        """Whitens all rows together: [B,R] -> [B,R]. If ``reduce`` is a collective, all ranks must call this.

        The variance has a floor of 1e-8 (OpenRLHF, NeMo-Aligner).
        """
        options = {"unbiased": self.unbiased, "eps": 0.0, "min_var": 1e-8, "reduce": reduce}
        if self.level == "token":
            return masked_whiten(advantages, mask, **options)
        per_response = masked_mean(advantages, mask, dim=1)[:, None]
        whole = masked_whiten(per_response, mask.any(dim=1, keepdim=True), **options)
        return broadcast_sequence(whole[:, 0], mask)

    def whiten_rollout(self, advantages: Tensor, mask: Tensor, group_size: int, reduce: Reduce) -> Tensor:
        """Whitens the advantages of a rollout as ``over`` says. All ranks must call this.

        "batch" whitens over all rows and ranks, "group" separately over each ``group_size`` consecutive rows;
        other values return ``advantages`` unchanged.
        """
        if self.over == "batch":
            return self.whiten(advantages, mask, reduce)
        if self.over == "group":
            groups = zip(advantages.split(group_size), mask.split(group_size), strict=True)
            return torch.cat([self.whiten(*group) for group in groups])
        return advantages
