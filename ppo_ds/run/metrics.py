"""Metrics over all ranks: each rank adds its own values, and ``reduced`` combines them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import StepInfo
from ppo_ds.ops.moments import explained_variance
from ppo_ds.types import Metrics, to_device

_SQUARES = "_of_squares"


class MetricSums:
    """Accumulates masked means and maxima that are exact over ranks and micro-batches.

    Sums and counts are added; means are never averaged. A metric is added as a tensor (a part), whose shape
    determines its reduction (algorithm/loss/aggregation.py): [2] is a (sum, count), [5] are moments of an
    explained variance, and 0-dim is a maximum. Every rank must add the same names in the same order. All
    ranks must call ``reduced``.
    """

    def __init__(self) -> None:
        self._parts: dict[str, Tensor] = {}  # float64

    def add_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Adds metrics given as parts (see above), as a loss function returns them beside the loss."""
        for name, part in parts.items():
            part = part.detach().double()
            if name in self._parts:
                part = torch.maximum(self._parts[name], part) if part.dim() == 0 else self._parts[name] + part
            self._parts[name] = part

    def add_mean(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds the mean of ``values`` where ``mask`` is set. Other values are ignored, even NaN."""
        mask = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        total = values.detach().double().masked_fill(~mask, 0.0).sum()
        self.add_parts({name: torch.stack([total, mask.sum()])})

    def add_mean_and_std(self, name: str, values: Tensor, mask: Tensor | None = None) -> None:
        """Adds mean and population std: "a" gives a/mean and a/std, "a/b" gives a/b_mean and a/b_std."""
        separator = "_" if "/" in name else "/"
        self.add_mean(f"{name}{separator}mean", values, mask)
        self.add_mean(f"{name}{separator}mean{_SQUARES}", values.double() ** 2, mask)

    def add_max(self, name: str, value: Tensor) -> None:
        self.add_parts({name: value})

    def reduced(self, world: World) -> Metrics:
        sums = {name: part for name, part in self._parts.items() if part.dim() == 1}
        maxima = {name: part for name, part in self._parts.items() if part.dim() == 0}
        out: Metrics = {}
        if sums:
            total = world.sum(_joined(sums, torch.cat, world)).cpu()
            pieces = total.split([len(part) for part in sums.values()])
            out |= {name: as_number(piece) for name, piece in zip(sums, pieces, strict=True)}
        if maxima:
            out |= dict(zip(maxima, world.max(_joined(maxima, torch.stack, world)).tolist(), strict=True))
        for name in [n for n in out if n.endswith(_SQUARES)]:
            mean = name.removesuffix(_SQUARES)
            variance = out.pop(name) - out[mean] ** 2
            std = math.nan if math.isnan(variance) else max(0.0, variance) ** 0.5
            out[mean.removesuffix("mean") + "std"] = std
        return out


def _joined(parts: dict[str, Tensor], join: Callable[[list[Tensor]], Tensor], world: World) -> Tensor:
    """Joins parts on this rank's device: losses may be on the GPU and counts on the CPU."""
    return join([to_device(part, world.device) for part in parts.values()])


def as_number(piece: Tensor) -> float:
    """Returns the mean (0 without values) or explained variance of reduced sums; NaN if not finite."""
    if not piece.isfinite().all():
        return math.nan
    if len(piece) == 5:
        return explained_variance(piece)
    total, count = piece.tolist()
    return total / count if count else 0.0


def step_metrics(steps: Mapping[str, list[StepInfo]]) -> Metrics:
    """Computes each model's gradient norm and learning rate, the count of skipped steps, the loss scale.

    ``steps`` maps metric prefixes to optimizer steps. Norms are measured before clipping and averaged (NaN if
    a step was skipped); learning rates are those of the last step.
    """
    numbers: Metrics = {}
    for role, infos in steps.items():
        if infos:
            numbers[f"{role}/grad_norm"] = sum(info.grad_norm for info in infos) / len(infos)
            numbers[f"{role}/lr"] = infos[-1].lr
    # all models skip together
    skipped = max(sum(info.skipped for info in infos) for infos in steps.values())
    numbers["health/skipped_steps"] = float(skipped)
    numbers["health/loss_scale"] = next(infos[-1].loss_scale for infos in steps.values() if infos)
    return numbers
