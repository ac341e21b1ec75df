"""Trained model: a DeepSpeed engine with a learning rate schedule and explicit gradient accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from ppo_ds.distributed.heartbeat import beat
from ppo_ds.distributed.world import World
from ppo_ds.engine.adamw_8bit import make_adamw_8bit
from ppo_ds.engine.gradients import dynamic_loss_scaler, local_squared_norm, skip_step
from ppo_ds.models.quantized import whole_numel


@dataclass(frozen=True)
class LRSchedule:
    """Learning rate of each optimizer step: linear warm-up, then cosine decay, linear decay or constant.

    ``cosine`` and ``linear`` reach the minimum in the last step, ``cosine_annealing`` one step later (torch).
    """

    lr: float
    kind: str  # cosine | cosine_annealing | linear | constant
    warmup_ratio: float
    min_lr_ratio: float
    total_steps: int
    warmup_steps: int | None = None  # None: warmup_ratio x total_steps, rounded up

    def at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0.

        The first step's rate is not 0, since a step without effect would hide bugs.
        """
        warmup = self.warmup_steps
        if warmup is None:
            warmup = math.ceil(self.warmup_ratio * self.total_steps - 1e-9)  # 0.07 * 100 is slightly above 7
        if step < warmup:
            return self.lr * (step + 1) / (warmup + 1)
        if self.kind == "constant":
            return self.lr
        decay_steps = self.total_steps - warmup - (self.kind != "cosine_annealing")
        done = min(1.0, (step - warmup) / max(1, decay_steps))
        shape = 1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.min_lr_ratio + (1 - self.min_lr_ratio) * shape)


@dataclass(frozen=True)
class StepInfo:
    """Result of one optimizer step."""

    grad_norm: float  # global norm before clipping; NaN if the step is skipped
    lr: float  # rate of the schedule, without lr_factors
    skipped: bool
    loss_scale: float


def parameter_groups(
    module: nn.Module, weight_decay: float, lr_factors: Mapping[nn.Parameter, float] | None = None
) -> list[dict[str, Any]]:
    """Groups the trained parameters by weight decay and learning rate.

    Weight decay applies to matrices, and not to norms, biases and other vectors. ``lr_factors`` multiply the
    schedule's rate (default: 1). ZeRO-3 flattens parameters and keeps their shapes in ``ds_shape``.
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
    """Returns the number of elements of the trained parameters and of all parameters."""
    counts = [(whole_numel(p), p.requires_grad) for p in module.parameters()]
    return sum(n for n, trained in counts if trained), sum(n for n, _ in counts)


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Makes torch use deterministic algorithms inside the block if ``enabled``.

    On a GPU, the backward passes of attention and of embeddings add with atomic operations, whose order
    differs from run to run. Operations without a deterministic algorithm raise RuntimeError with their name.

    Only backward passes may run in such a block: on a GPU, torch (2.13) would reject the cumulative sums of
    top_p sampling, although sums over rows are deterministic (``use_deterministic_algorithms``).
    """
    if not enabled:
        yield
        return
    fills = torch.utils.deterministic.fill_uninitialized_memory
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # filling with NaN is slow
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warns_only)
        torch.utils.deterministic.fill_uninitialized_memory = fills


class TrainedModel:
    """Wraps a module in a DeepSpeed engine (ZeRO 0 to 3).

    The caller must divide losses by the totals of the whole optimizer step and multiply them by the number of
    ranks (algorithm/loss/aggregation.py). DeepSpeed averages gradients over ranks; its division by
    accumulation steps is off. The result is the exact gradient of the global mean for any division of rows.
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
        eight_bit: bool = False,
        lr_factors: Mapping[nn.Parameter, float] | None = None,
        settings: Mapping[str, float] | None = None,
    ):
        """Wraps ``module`` in an engine with AdamW, whose moments have 8 bits if ``eight_bit``.

        ``lr_factors``: see ``parameter_groups``. ``settings`` are config values that checkpoints store.
        """
        self.settings = dict(settings or {})
        self.world = world
        self.schedule = schedule
        self.steps = 0  # optimizer steps so far; a skipped step does not advance the schedule
        self._weights_replaced = False
        self._refresh_weights: Callable[[], None] | None = None  # called before the next use
        if deepspeed_config["zero_optimization"]["stage"] < 3:
            module.to(world.device)
        module.train()
        groups = parameter_groups(module, weight_decay, lr_factors)
        # fused: one pass over the optimizer states; on a CPU torch's default takes four times as long
        make = make_adamw_8bit if eight_bit else partial(torch.optim.AdamW, fused=True)
        optimizer = make(groups, lr=schedule.at(0), betas=betas, eps=eps)
        with world.quiet():
            self.engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=deepspeed_config)

    @property
    def module(self) -> nn.Module:
        return self.engine.module

    @property
    def zero_stage(self) -> int:
        return self.engine.zero_optimization_stage()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.restore_weights()
        beat()
        return self.engine(*args, **kwargs)

    @contextmanager
    def replaced_weights(self, refresh: Callable[[], None]) -> Iterator[None]:
        """Forbids training inside the block, where the module has other weights (engine/weight_copy.py).

        If an exception leaves the block, ``refresh`` runs before the next use of the module. It does not run
        at once, because ``refresh`` is a collective and the exception may have occurred on one rank only.
        """
        assert not self._weights_replaced, (
            "weights are replaced already: WeightCopy.swapped() inside swapped()"
        )
        self.restore_weights()
        self._weights_replaced = True
        try:
            yield
        except BaseException:
            self._refresh_weights = refresh
            raise
        finally:
            self._weights_replaced = False

    def restore_weights(self) -> None:
        """Restores the trained weights if an exception has left the block of ``replaced_weights``.

        All ranks must call this after such an exception; otherwise it does nothing.
        """
        if self._refresh_weights is not None:
            refresh, self._refresh_weights = self._refresh_weights, None
            refresh()

    def backward(self, loss: Tensor, last: bool) -> None:
        """Accumulates the gradient of a micro-batch; ``last`` marks the last one of the optimizer step."""
        assert not self._weights_replaced, "training inside WeightCopy.swapped()"
        self.engine.set_gradient_accumulation_boundary(last)
        with deterministic_algorithms(self.world.deterministic):
            self.engine.backward(loss, scale_wrt_gas=False)

    def local_squared_grad_norm(self) -> Tensor:
        """Returns this rank's part of the squared norm of the loss-scaled gradient: 0-dim, float64.

        Not a collective. The caller sums the parts over ranks and skips the step if the sum is not finite in
        float32, in which DeepSpeed computes the norm.
        """
        return local_squared_norm(self.engine)

    def step(self) -> StepInfo:
        """Clips and applies the accumulated gradient.

        DeepSpeed skips the step if the gradient is not finite, except in fp32 without ZeRO. There, the caller
        must call ``skip`` instead.
        """
        assert not self._weights_replaced, "training inside WeightCopy.swapped()"
        lr = self.schedule.at(self.steps)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]
        plain = self.engine.optimizer is self.engine.basic_optimizer
        # In fp32 without ZeRO, no wrapper reports the norm; the gradients are whole and already reduced.
        if plain:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            norm = float(torch.nn.utils.get_total_norm(gradients))
        self.engine.step()
        if not plain:
            norm = self.engine.get_global_grad_norm()
        skipped = bool(getattr(self.engine.optimizer, "overflow", False))
        self.steps += not skipped
        grad_norm = float(norm) if norm is not None and not skipped else math.nan
        return StepInfo(grad_norm, lr, skipped, self.loss_scale)

    def skip(self, *, overflow: bool) -> StepInfo:
        """Discards the accumulated gradient; weights, moments, their counters and the schedule do not change.

        All ranks must call this. With ``overflow``, a dynamic loss scale is lowered.
        """
        assert not self._weights_replaced, "training inside WeightCopy.swapped()"
        skip_step(self.engine, lower_scale=overflow)
        return self.skipped_step()

    def skipped_step(self) -> StepInfo:
        return StepInfo(math.nan, self.schedule.at(self.steps), True, self.loss_scale)

    @property
    def loss_scale(self) -> float:
        """The current loss scale, or 1 without loss scaling."""
        wrapper = self.engine.optimizer
        return float(getattr(wrapper, "cur_scale", getattr(wrapper, "loss_scale", 1.0)))

    @property
    def loss_scale_can_decrease(self) -> bool:
        """True if the loss scale is dynamic (fp16) and above its minimum, so that overflows lower it.

        Overflows are then expected while the scale adapts, and do not indicate a numerical error.
        """
        scaler = dynamic_loss_scaler(self.engine)
        if scaler is None:
            return False
        return scaler.cur_scale > getattr(scaler, "min_scale", getattr(scaler, "min_loss_scale", 1.0))
