"""A model that learns: one DeepSpeed engine, with the loss scale, the learning rate and the accumulation in our hands."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from ppo_ds.distributed.heartbeat import beat
from ppo_ds.distributed.world import World
from ppo_ds.engine.gradients import drop, scale_can_fall, squared_norm


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate over optimizer steps: linear warm-up, then cosine, linear or constant."""

    lr: float
    kind: str  # cosine | linear | constant
    warmup_ratio: float
    min_lr_ratio: float
    total_steps: int

    def at(self, step: int) -> float:
        """The rate of the ``step``-th optimizer step (from 0). Never 0 on the first: a step that moves nothing hides bugs."""
        warmup = math.ceil(self.warmup_ratio * self.total_steps - 1e-9)  # 0.07 * 100 is a little above 7
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        if self.kind == "constant":
            return self.lr
        done = min(1.0, (step - warmup) / max(1, self.total_steps - warmup - 1))
        shape = 0.5 * (1 + math.cos(math.pi * done)) if self.kind == "cosine" else 1 - done
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * shape)


@dataclass(frozen=True)
class StepInfo:
    """What one optimizer step did. ``grad_norm`` is global and before clipping (NaN if skipped), ``lr`` the schedule's rate."""

    grad_norm: float
    lr: float
    skipped: bool
    loss_scale: float


def parameter_groups(
    module: nn.Module, weight_decay: float, lr_factors: Mapping[nn.Parameter, float] | None = None
) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases and other vectors do not. ``lr_factors``: what multiplies the schedule's rate, where that is not 1.

    The rank is read from ``ds_shape`` where ZeRO-3 has already flattened the parameter.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = {}
    for parameter in module.parameters():
        if parameter.requires_grad:
            shape = getattr(parameter, "ds_shape", parameter.shape)
            groups.setdefault((len(shape) > 1, (lr_factors or {}).get(parameter, 1.0)), []).append(parameter)
    return [
        {"params": parameters, "weight_decay": weight_decay if decays else 0.0, "lr_factor": factor}
        for (decays, factor), parameters in sorted(groups.items(), key=lambda item: item[0], reverse=True)
    ]


def parameter_counts(module: nn.Module) -> tuple[int, int]:
    """How many numbers are trained, and how many there are."""
    counts = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in module.parameters()]
    return sum(n for n, trained in counts if trained), sum(n for n, _ in counts)


class TrainedModel:
    """A module under a DeepSpeed engine (ZeRO 0 to 3).

    Losses come already divided by the totals of the whole optimizer step and multiplied by the number of ranks (ops/losses.py):
    DeepSpeed averages over ranks, and its own division by the accumulation steps is off. That gives the exact global mean, whatever
    the number of ranks and micro-batches.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        world: World,
        deepspeed_config: dict[str, Any],
        schedule: LRSchedule,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        lr_factors: Mapping[nn.Parameter, float] | None = None,
        settings: Mapping[str, float] | None = None,
    ):
        """``lr_factors``: see ``parameter_groups``. ``settings``: config keys with values that are part of the model but in none of its tensors."""
        self.settings = dict(settings or {})
        self.world = world
        self.schedule = schedule
        self.steps = 0  # optimizer steps so far; those that were skipped do not count, so that the schedule waits for them
        self.swapped = False  # engine/weight_copy.py: the weights are another set's for now
        self.unsettled: Callable[[], None] | None = (
            None  # what brings the module's weights back, after an exception while they were
        )
        if deepspeed_config["zero_optimization"]["stage"] < 3:
            module.to(world.device)
        module.train()
        groups = parameter_groups(module, weight_decay, lr_factors)
        # one pass over the states; on a CPU too, where torch's default takes four times as long
        optimizer = torch.optim.AdamW(groups, lr=schedule.at(0), betas=betas, eps=eps, fused=True)
        with world.quiet():
            self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=deepspeed_config)

    @property
    def module(self) -> nn.Module:
        return self.engine.module

    @property
    def zero_stage(self) -> int:
        return self.engine.zero_optimization_stage()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.settle()
        beat()
        return self.engine(*args, **kwargs)

    def settle(self) -> None:
        """Before the module's weights are used. A collective where an exception has left them another set's, else nothing."""
        if self.unsettled is not None:
            refresh, self.unsettled = self.unsettled, None
            refresh()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradient of a micro-batch. ``last``: the step follows, so that ZeRO may reduce."""
        assert not self.swapped, "training inside swapped()"
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss, scale_wrt_gas=False)

    def squared_gradient(self) -> Tensor:
        """0-dim float64 on the device: what this rank holds of the squared gradient norm, before clipping; over all ranks, a number that is not
        finite in float32 says that the gradient is not either. Not a collective."""
        return squared_norm(self.engine)

    def step(self) -> StepInfo:
        """Clip and apply what was accumulated. Without ZeRO in fp32 it must be known to be finite."""
        assert not self.swapped, "training inside swapped()"
        lr = self.schedule.at(self.steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        plain_norm = self._plain_grad_norm()
        self.engine.step()
        norm = self.engine.get_global_grad_norm() if plain_norm is None else plain_norm
        skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        self.steps += not skipped
        return StepInfo(
            float(norm) if norm is not None and not skipped else math.nan, lr, skipped, self.loss_scale
        )

    def skip(self, *, overflow: bool) -> StepInfo:
        """Drop what was accumulated: weights, moments, their counters and the schedule stay as they are. A collective.

        ``overflow``: the gradient was not finite, and a dynamic loss scale falls.
        """
        assert not self.swapped, "training inside swapped()"
        drop(self.engine, lower_scale=overflow)
        return self.nothing()

    def nothing(self) -> StepInfo:
        """The step that was not even begun."""
        return StepInfo(math.nan, self.schedule.at(self.steps), True, self.loss_scale)

    @property
    def loss_scale(self) -> float:
        return float(
            getattr(self.engine.optimizer, "cur_scale", getattr(self.engine.optimizer, "loss_scale", 1.0))
        )

    @property
    def finds_its_scale(self) -> bool:
        """Whether a gradient that is not finite may be the loss scale's doing, which falls until none is (fp16)."""
        return scale_can_fall(self.engine)

    def _plain_grad_norm(self) -> float | None:
        """fp32 without ZeRO has no wrapper that reports the norm; its gradients are whole and reduced by now."""
        if self.engine.optimizer is not self.engine.basic_optimizer:
            return None
        return float(
            torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None])
        )
