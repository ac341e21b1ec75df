"""What an engine has accumulated when its step is due, whatever the ZeRO stage: how large it is, and how DeepSpeed comes to drop it.

DeepSpeed 0.19 drops a step by itself where it sees that gradients are not finite: on ZeRO 1 to 3 and in 16 bits, not in fp32 without ZeRO. It cannot
be told to drop a sound one, so those are made to look unsound. What its own clean-up forgets is done here: with offloaded optimizers of ZeRO 1
and 2 in 16 bits the buffers that gradients are added up in keep their NaN, and every later step would be dropped too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def held(engine: Any) -> list[Tensor]:
    """This rank's share of the gradients; where the optimizer is offloaded, their norms, which is what DeepSpeed goes by."""
    wrapper = engine.optimizer
    if hasattr(wrapper, "norm_for_param_grads"):
        return list(wrapper.norm_for_param_grads.values())
    if hasattr(wrapper, "fp32_groups_gradients_flat"):  # BF16_Optimizer: whole on every rank
        return list(wrapper.fp32_groups_gradients_flat)
    if hasattr(wrapper, "averaged_gradients"):
        return [
            gradient
            for group in wrapper.averaged_gradients.values()
            if group is not None
            for gradient in group
        ]
    return [
        parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None
    ]  # whole on every rank


@torch.no_grad()
def squared_norm(engine: Any) -> Tensor:
    """0-dim float64 on the engine's device: the sum of squares of what is ``held``. No collective, no waiting for the device."""
    norms = [_norm(gradient).to(engine.device) for gradient in held(engine)]
    return (
        torch.stack(norms).square().sum()
        if norms
        else torch.zeros((), dtype=torch.float64, device=engine.device)
    )


def _norm(gradient: Tensor) -> Tensor:
    return torch.linalg.vector_norm(gradient.to(torch.promote_types(gradient.dtype, torch.float32))).double()


@torch.no_grad()
def drop(engine: Any, *, lower_scale: bool) -> None:
    """Go on without the step that is due: no weight, moment or counter of the optimizer changes. A collective, as the step would be.

    ``lower_scale``: a dynamic loss scale falls, as after an overflow; at its lowest it stays there.
    """
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        engine.zero_grad()
        return
    spoiled = held(engine)
    for tensor in spoiled:
        tensor.fill_(math.nan)
    if hasattr(wrapper, "local_overflow"):
        wrapper.local_overflow = True  # ZeRO 1 and 2, offloaded in 16 bits
    if hasattr(wrapper, "check_grad_overflow"):
        wrapper.check_grad_overflow = True  # can be switched off for bf16, where NaN would then be applied
    scaler = scaler_of(engine)
    before = dict(vars(scaler)) if scaler is not None else {}
    if "raise_error_at_min_scale" in before:
        scaler.raise_error_at_min_scale = False
    engine.step()
    if scaler is not None and not lower_scale:
        vars(scaler).update(before)
    for tensor in spoiled:
        tensor.zero_()  # views of buffers that stay; DeepSpeed writes over them, but not where a parameter has no gradient
    for name in ("averaged_gradients", "all_grad_tensors"):
        sums = getattr(wrapper, name, {})
        for group in list(sums):
            sums[group] = None


def scaler_of(engine: Any) -> Any:
    """What holds the loss scale; None where there is none."""
    wrapper = engine.optimizer
    return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)


def scale_can_fall(engine: Any) -> bool:
    """Whether the loss scale is dynamic and above its lowest: then an overflow is how it finds its level, and no sign of bad numbers."""
    scaler = scaler_of(engine)
    dynamic = getattr(scaler, "dynamic", False) or getattr(scaler, "dynamic_loss_scale", False)
    return bool(dynamic) and scaler.cur_scale > getattr(
        scaler, "min_scale", getattr(scaler, "min_loss_scale", 1.0)
    )
