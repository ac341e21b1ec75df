"""Running mean and variance over all ranks, and explained variance from sums that can be added over ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_ds.ops.masked import Reduce, keep, widen


def explained_variance_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Returns [5]: the count, then the sums of returns, returns^2, errors (returns - values) and errors^2."""
    count, returns = mask.bool().sum().double(), returns.double()
    errors = keep(returns - values, mask)
    return torch.stack([count, returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()])


def explained_variance(moments: Tensor) -> float:
    """Computes 1 - Var(returns - values) / Var(returns) from summed moments; 0 for constant returns."""
    count, returns, returns_squared, errors, errors_squared = moments.tolist()
    variance = count * returns_squared - returns**2  # variance times count^2, as for the errors below
    return 1 - (count * errors_squared - errors**2) / variance if variance > 0 else 0.0


class RunningMoments:
    """Running mean and variance over batches and ranks, merged exactly in float64 (Chan et al. 1979)."""

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0  # sum of squared differences from the mean

    @torch.no_grad()
    def update(self, x: Tensor, reduce: Reduce | None = None) -> None:
        """Adds ``x`` [B] of all ranks, or nothing if any value on any rank is not finite.

        If ``reduce`` is a collective, all ranks must call this.
        """
        all_reduce = reduce or (lambda t: t)
        x = x.detach().double()
        count, summed = all_reduce(
            torch.stack([torch.full((), float(len(x)), dtype=x.dtype, device=x.device), x.sum()])
        ).tolist()
        if count == 0 or not math.isfinite(summed):  # a NaN would remain in the running mean
            return
        mean = summed / count
        squares = all_reduce((x - mean).square().sum().reshape(1)).item()
        total = self.count + count
        delta = mean - self.mean
        self.squares += squares + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def std(self) -> float:
        """Population standard deviation; 1 while it is undefined or zero."""
        return (self.squares / self.count) ** 0.5 if self.count > 1 and self.squares > 0 else 1.0

    def normalize(self, x: Tensor, with_std: bool = True) -> Tensor:
        """Returns (x - mean) / std, or x - mean, for ``x`` [B] in float32 or wider."""
        centred = widen(x) - self.mean
        return centred / self.std if with_std else centred

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
