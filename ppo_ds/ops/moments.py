"""Explained variance from sums that add up over micro-batches and ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_ds.ops.masked import keep


def explained_variance_moments(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Returns the count, and sums of returns, squared returns, errors and squared errors, [5].

    Errors are returns - values.
    """
    count, returns = mask.bool().sum().double(), returns.double()
    errors = keep(returns - values, mask)
    return torch.stack([count, returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum()])


def explained_variance(moments: Tensor) -> float:
    """Computes 1 - Var(returns - values) / Var(returns) from summed "value/explained_var" moments.

    The result is 0 if the returns are constant.
    """
    count, returns, returns_squared, errors, errors_squared = moments.tolist()
    variance = count * returns_squared - returns**2  # times count^2, like the variance of the errors
    return 1 - (count * errors_squared - errors**2) / variance if variance > 0 else 0.0
