"""Estimators that compare the responses to a prompt. All tokens of a response have the same advantage.

A group has all responses to one prompt. A "reward" is the total of a response (``Responses.totals``).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from ppo_ds.algorithm.credit.responses import CreditOptions, Estimate, Responses
from ppo_ds.ops.masked import Reduce, masked_mean_var

EPS = 1e-6  # added to a standard deviation; lower limit of a mean in a divisor


class Groups:
    """Statistics of groups of numbers ``x`` [B]. Numbers with equal entries in ``groups`` [B] form one group.

    All are float64: if the scores of a group are equal, a float32 rounding error in score - mean, divided by
    EPS, would become an advantage.
    """

    def __init__(self, x: Tensor, groups: Tensor):
        self.x = x.double()
        _, self.group = torch.unique(groups, return_inverse=True)

    def sum(self, x: Tensor) -> Tensor:
        """Returns, for each number, the sum of ``x`` over its group, [B]."""
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
        """Differences from the group's mean, divided by the group's unbiased standard deviation, [B]."""
        return self.centred / ((self.sum(self.centred.square()) / self.others).sqrt() + EPS)


def grpo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates (reward - group mean) / unbiased group standard deviation (Shao et al. 2024)."""
    return responses.of_responses(Groups(responses.totals, responses.groups).normalized)


def rloo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates reward - mean reward of the other responses in the group (Ahmadian et al. 2024)."""
    group = Groups(responses.totals, responses.groups)
    return responses.of_responses(group.centred * group.count / group.others)


def dr_grpo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates reward - group mean (Liu et al. 2025)."""
    return responses.of_responses(Groups(responses.totals, responses.groups).centred)


def lite_ppo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates (reward - group mean) / standard deviation of the rewards of all ranks (arXiv 2508.08221)."""
    group = Groups(responses.totals, responses.groups)
    _, std = mean_and_std(group.x, options.reduce)
    return responses.of_responses(group.centred / (std + EPS))


def maxrl(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates (reward - group mean) / group mean, or 0 if the mean is not positive (Tajwar et al. 2026)."""
    group = Groups(responses.totals, responses.groups)
    quotient = group.centred / group.mean.clamp(min=EPS)
    return responses.of_responses(torch.where(group.mean > 0, quotient, 0.0))


def opo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates reward - group mean, where a response's weight is its number of actions (Hao et al. 2025)."""
    group, weights = Groups(responses.totals, responses.groups), responses.mask.sum(1).double()
    baseline = group.sum(weights * group.x) / group.sum(weights).clamp(min=1)
    return responses.of_responses(group.x - baseline)


def gdpo(responses: Responses, options: CreditOptions) -> Estimate:
    """Estimates GDPO advantages (arXiv 2601.05242) from the part scores of reward=weighted; ignores the KL.

    Each part is normalised within its group as in GRPO. The weighted sum of the parts is then normalised with
    its mean and unbiased standard deviation over the responses of all ranks.
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
