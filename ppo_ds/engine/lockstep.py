"""Optimizer step of several models that either all ranks take or all ranks skip."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import StepInfo, TrainedModel


@dataclass(frozen=True)
class LockstepResult:
    """The outcome of one optimizer step of all models, the same on every rank."""

    infos: dict[str, StepInfo]  # by name of the model
    nonfinite: tuple[str, ...]  # names such as "loss of the actor"; empty if the step was taken
    # True if all losses are finite, and each model with a non-finite gradient can still lower its loss scale
    overflow_expected: bool
    sums: list[float]  # the numbers ``extra``, summed over ranks


def step_or_skip(
    models: Mapping[str, TrainedModel],
    losses: Mapping[str, Tensor],
    extra: Tensor | None,
    *,
    world: World,
    timer: Callable[[str], AbstractContextManager[None]],
    check: Callable[[list[float]], None] | None = None,
) -> LockstepResult:
    """Steps all ``models`` if every loss and gradient is finite on every rank, else drops their gradients.

    All ranks must call this. The decision needs one collective and one synchronization with the device. If
    only some ranks or models took the step, replicas would diverge and ZeRO-3 would hang.

    Args:
        models: The models by name, with accumulated gradients.
        losses: The 0-dim loss of each model by name, summed over this rank's micro-batches.
        extra: More numbers [n] to sum over ranks in the same collective.
        check: Called with the sums of ``extra`` before any step. If it raises, all gradients are dropped.
    """
    numbers = [number for name in models for number in (losses[name], models[name].local_squared_grad_norm())]
    numbers += [] if extra is None else list(extra)
    sums = world.sum(torch.stack([number.double().to(world.device) for number in numbers])).cpu()
    finite = sums.float().isfinite().tolist()  # in float32, as DeepSpeed computes the norm
    bad_losses = [name for name, good in zip(models, finite[0::2], strict=False) if not good]
    overflows = [name for name, good in zip(models, finite[1::2], strict=False) if not good]
    nonfinite = [f"loss of the {name}" for name in bad_losses]
    nonfinite += [f"gradient of the {name}" for name in overflows]
    extra_sums = [] if extra is None else sums[2 * len(models) :].tolist()
    if check is not None:
        try:
            check(extra_sums)
        except Exception:
            for model in models.values():
                model.skip(overflow=False)
            raise
    infos = {}
    for name, model in models.items():
        with timer(f"update_{name}"):
            infos[name] = model.skip(overflow=name in overflows) if nonfinite else model.step()
    overflow_expected = not bad_losses and all(models[name].loss_scale_can_decrease for name in overflows)
    return LockstepResult(infos, tuple(nonfinite), overflow_expected, extra_sums)
