"""Estimators that compare responses to the same prompt. All tokens of a response share its advantage."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ppo_ds.algorithm.credit.responses import CreditOptions, Estimate, Responses
from ppo_ds.ops.masked import Reduce, masked_mean_var

EPS = 1e-6  # added to a standard deviation, and the least mean that a score is divided by


class Groups:
    """Statistics of the groups of numbers ``x`` [B]: of all numbers with the same entry of ``groups`` [B].

    They are in float64: equal scores must differ from their mean by 0, not by rounding divided by EPS.
    """

    def __init__(self, x: Tensor, groups: Tensor):
        self.x = x.double()
        _, self.group = torch.unique(groups, return_inverse=True)

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over the group of each number, [B]."""
        return torch.zeros_like(self.x).index_add_(0, self.group, x)[self.group]

    @cached_property
    def count(self) -> Tensor:
        return self.sum(torch.ones_like(self.x))

    @cached_property
    def mean(self) -> Tensor:
        return self.sum(self.x) / self.count

    @cached_property
    def others(self) -> Tensor:
        return (self.count - 1).clamp(min=1)

    @cached_property
    def centred(self) -> Tensor:
        return self.x - self.mean

    @cached_property
    def normalized(self) -> Tensor:
        """Differences from the mean, divided by the unbiased standard deviation of the group."""
        return self.centred / ((self.sum(self.centred.square()) / self.others).sqrt() + EPS)


def grpo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates (value - mean) / standard deviation of the group, unbiased (Shao et al. 2024)."""
    return responses.of_responses(Groups(responses.totals, responses.groups).normalized)


def rloo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates value - mean of the other values (Ahmadian et al. 2024)."""
    group = Groups(responses.totals, responses.groups)
    return responses.of_responses(group.centred * group.count / group.others)


def dr_grpo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates value - mean (Liu et al. 2025)."""
    return responses.of_responses(Groups(responses.totals, responses.groups).centred)


def lite_ppo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates (value - mean) / standard deviation of all values of all ranks (arXiv 2508.08221)."""
    group = Groups(responses.totals, responses.groups)
    _, std = mean_and_std(group.x, options.reduce)
    return responses.of_responses(group.centred / (std + EPS))


def maxrl(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates (value - mean) / mean, and 0 if the mean is not positive (Tajwar et al. 2026)."""
    group = Groups(responses.totals, responses.groups)
    quotient = group.centred / group.mean.clamp(min=EPS)
    return responses.of_responses(torch.where(group.mean > 0, quotient, 0.0))


def opo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates value - mean weighted by the number of actions of a response (Hao et al. 2025)."""
    group, weights = Groups(responses.totals, responses.groups), responses.mask.sum(1).double()
    baseline = group.sum(weights * group.x) / group.sum(weights).clamp(min=1)
    return responses.of_responses(group.x - baseline)


def gdpo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates GDPO advantages (arXiv 2601.05242) from the parts of the score; the KL is not used.

    Each part is normalised within its group as in GRPO; the weighted sum over the parts is shifted and
    divided by its mean and its unbiased standard deviation over all responses of all ranks.
    """
    names, weights = list(options.part_weights), torch.tensor(list(options.part_weights.values()))
    parts = torch.tensor([[row[name] for name in names] for row in responses.components])
    columns = [Groups(part, responses.groups).normalized.to(parts.dtype) for part in parts.T]
    total = (torch.stack(columns, dim=1).double() * weights.double()).sum(1)
    mean, std = mean_and_std(total, options.reduce)
    return responses.of_responses((total - mean) / (std + EPS))


def mean_and_std(x: Tensor, reduce: Reduce | None) -> tuple[Tensor, Tensor]:
    """Returns the mean and the unbiased standard deviation of ``x`` [B] over all ranks."""
    mean, variance, _ = masked_mean_var(x, torch.ones_like(x), reduce=reduce)
    return mean, variance.sqrt()
