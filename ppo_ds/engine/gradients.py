"""Gradient norm and skipped optimizer steps of a DeepSpeed engine, for every ZeRO stage.

DeepSpeed 0.19 itself skips steps with non-finite gradients, except in fp32 without ZeRO. It has no function
to skip a step with finite gradients, so ``skip_step`` fills the gradients with NaN. ``skip_step`` also clears
the accumulation buffers. With ZeRO 1 or 2, 16 bits and an offloaded optimizer, DeepSpeed would leave the NaN
in these buffers and skip every later step too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def local_gradients(engine: Any) -> list[Tensor]:
    """Returns this rank's share of the gradients; with an offloaded optimizer, only each gradient's norm."""
    wrapper = engine.optimizer
    if hasattr(wrapper, "norm_for_param_grads"):
        return list(wrapper.norm_for_param_grads.values())
    if hasattr(wrapper, "fp32_groups_gradients_flat"):  # BF16_Optimizer: every rank has all gradients
        return list(wrapper.fp32_groups_gradients_flat)
    if hasattr(wrapper, "averaged_gradients"):
        groups = wrapper.averaged_gradients.values()
        return [gradient for group in groups if group is not None for gradient in group]
    # fp32 without ZeRO: every rank has all gradients
    return [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]


@torch.no_grad()
def local_squared_norm(engine: Any) -> Tensor:
    """Computes the sum of squares of ``local_gradients``: 0-dim, float64, on the engine's device.

    Not a collective. Does not wait for the device.
    """
    gradients = local_gradients(engine)
    wide = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in gradients)  # one at a time
    norms = [torch.linalg.vector_norm(each).double().to(engine.device) for each in wide]
    if not norms:
        return torch.zeros((), dtype=torch.float64, device=engine.device)
    return torch.stack(norms).square().sum()


@torch.no_grad()
def skip_step(engine: Any, *, lower_scale: bool) -> None:
    """Discards the accumulated gradients: no weight, moment or counter of the optimizer changes.

    All ranks must call this. ``lower_scale`` lowers a dynamic loss scale as an overflow does.
    """
    wrapper = engine.optimizer
    if wrapper is engine.basic_optimizer:
        engine.zero_grad()
        return
    gradients = local_gradients(engine)
    for gradient in gradients:
        gradient.fill_(math.nan)
    if hasattr(wrapper, "local_overflow"):
        wrapper.local_overflow = True  # ZeRO 1 and 2 in 16 bits with an offloaded optimizer
    if hasattr(wrapper, "check_grad_overflow"):
        # if the user's JSON has it off (bf16), the step would write NaN into the weights
        wrapper.check_grad_overflow = True
    scaler = dynamic_loss_scaler(engine)
    scaler_state = dict(vars(scaler)) if scaler is not None else {}
    if "raise_error_at_min_scale" in scaler_state:
        scaler.raise_error_at_min_scale = False
    engine.step()
    if scaler is not None and not lower_scale:
        vars(scaler).update(scaler_state)
    # The gradients are views of buffers that DeepSpeed reuses. DeepSpeed does not overwrite the part of a
    # parameter that gets no gradient.
    for gradient in gradients:
        gradient.zero_()
    for name in ("averaged_gradients", "all_grad_tensors"):
        groups = getattr(wrapper, name, {})
        for group in list(groups):
            groups[group] = None


def dynamic_loss_scaler(engine: Any) -> Any:
    """Returns DeepSpeed's object that holds fp16's dynamic loss scale, or None."""
    for attribute, dynamic in (("loss_scaler", "dynamic"), ("loss_scale_config", "dynamic_loss_scale")):
        scaler = getattr(engine.optimizer, attribute, None)
        if getattr(scaler, dynamic, False):
            return scaler
    return None
