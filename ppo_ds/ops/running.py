"""Mean and variance of everything seen so far, over all ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppo_ds.ops.masked import Reduce, widen


class RunningMoments:
    """Batches are merged exactly (Chan et al. 1979), in float64, so that it does not matter how the numbers were batched or split over ranks."""

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0  # summed squared differences from the mean

    @torch.no_grad()
    def update(self, x: Tensor, reduce: Reduce | None = None) -> None:
        """Add this rank's x [B]; nothing where any rank's is not finite. A collective where ``reduce`` is one."""
        total = reduce or (lambda t: t)
        x = x.detach().double()
        count, summed = total(
            torch.stack([torch.tensor(float(len(x)), dtype=x.dtype, device=x.device), x.sum()])
        ).tolist()
        if count == 0 or not math.isfinite(summed):  # one NaN in a running mean is there for ever
            return
        mean = summed / count
        squares = total((x - mean).square().sum().reshape(1)).item()
        both = self.count + count
        step = mean - self.mean
        self.squares += squares + step**2 * self.count * count / both
        self.mean += step * count / both
        self.count = both

    @property
    def std(self) -> float:
        """Population standard deviation; 1 where there is none to divide by yet."""
        return (self.squares / self.count) ** 0.5 if self.count > 1 and self.squares > 0 else 1.0

    def normalize(self, x: Tensor, with_std: bool = True) -> Tensor:
        """(x - mean) / std, or x - mean; x [B] in float32 or wider."""
        centred = widen(x) - self.mean
        return centred / self.std if with_std else centred

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.mean, self.squares = state["count"], state["mean"], state["squares"]
