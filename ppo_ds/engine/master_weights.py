"""Access to the fp32 weights and AdamW moments of a DeepSpeed engine by parameter name, for every ZeRO stage.

ZeRO keeps them in flat partitions whose layout depends on the stage and the number of ranks. This module
returns whole parameters, with one collective per parameter, so that a rank holds at most one whole parameter
in addition to its partition. When it sets a parameter, it sets only the elements in this rank's partition;
``local_range`` returns which elements these are, so that a rank reads no others from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from ppo_ds.engine.adamw_8bit import add_fp32_moments, is_8bit, remove_fp32_moments
from ppo_ds.engine.gradients import dynamic_loss_scaler
from ppo_ds.engine.trained import TrainedModel

WEIGHT = "weight"
PARTS = (WEIGHT, "exp_avg", "exp_avg_sq")  # the moments have the names that torch.optim.Adam uses
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class MasterWeights:
    """Gets and sets the fp32 weights and moments of all trained parameters of ``model``.

    After the last ``set_local``, call ``refresh()``, which updates the module's weights. With an 8-bit
    optimizer, ``get`` and ``set_local`` support moments only inside ``opened_masters``.
    """

    def __init__(self, model: TrainedModel):
        self._model = model
        self._world = model.world
        self._wrapper = model.engine.optimizer
        self._adamw: torch.optim.Optimizer = model.engine.basic_optimizer
        self._stage3 = model.zero_stage == 3
        # a tied parameter appears once
        self.parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        # without ZeRO: the fp32 tensors by parameter name (in fp32, the parameters themselves); else None
        self._whole: dict[str, Tensor] | None = None
        if model.zero_stage == 0 and isinstance(self._wrapper, FP16_UnfusedOptimizer):
            pairs = zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True)
            master = {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}
            self._whole = {name: master[id(parameter)] for name, parameter in self.parameters.items()}
        elif model.zero_stage == 0:
            self._whole = dict(self.parameters)
        # torch creates the moments in the first step that is not skipped, but ``get`` and ``set_local`` may
        # need them earlier
        fused = self._adamw.defaults.get("fused")
        for flat in optimizer_shares(model):
            state = self._adamw.state[flat]
            if not state and not is_8bit(self._adamw):
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device if fused else "cpu")
                state["exp_avg"] = torch.zeros_like(flat, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(flat, requires_grad=False)
        self.link_states()

    def link_states(self) -> None:
        """Links the optimizer states of all parameter groups to the parameters again.

        DeepSpeed links them only once, after the first parameter group's step, and only for this group.
        """
        if hasattr(self._wrapper, "_lazy_init_hp_params_optimizer_state"):
            self._wrapper._hp_optimizer_states_linked = False
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def shape(self, name: str) -> list[int]:
        """Returns the shape of the whole parameter."""
        parameter = self.parameters[name]
        return list(getattr(parameter, "ds_shape", parameter.shape))

    def get(self, name: str, part: str) -> Tensor:
        """Returns ``part``, one of PARTS, of a parameter: whole, in fp32 and on every rank.

        All ranks must call this. Callers must not change the tensor.
        """
        if self._whole is not None:
            return self._whole_part(name, part)
        parameter = self.parameters[name]
        if part == WEIGHT:
            return safe_get_full_fp32_param(parameter)
        return safe_get_full_optimizer_state(parameter, part)

    def local_range(self, name: str) -> slice:
        """Returns the elements of the flattened parameter that this rank keeps: all without ZeRO."""
        return local_range(self.parameters[name], self._model.zero_stage, self._world.rank)

    def set_local(self, name: str, part: str, values: Tensor) -> None:
        """Sets this rank's elements of ``part`` (``local_range``) to 1-dim ``values``. Not a collective."""
        parameter = self.parameters[name]
        if self._whole is not None:
            whole = self._whole_part(name, part)
            whole.copy_(values.view_as(whole))
        elif self._stage3:
            padding = parameter.ds_tensor.numel() - values.numel()
            share = nn.functional.pad(values, (0, padding)) if padding else values
            if part == WEIGHT:
                safe_set_local_fp32_param(parameter, share)
            else:
                safe_set_local_optimizer_state(parameter, share, part)
        elif values.numel():
            # like safe_set_full_fp32_param and safe_set_full_optimizer_state, which need the whole tensor
            fragment = parameter._hp_mapping.get_hp_fragment(None if part == WEIGHT else part)
            fragment.data.copy_(values)

    @torch.no_grad()
    def refresh(self) -> None:
        """Computes the module's weights from the fp32 weights, as a step does. All ranks must call this."""
        if self._whole is not None:
            for name, parameter in self.parameters.items():
                parameter.copy_(self._whole[name])
        elif self._stage3:
            self._wrapper._partition_all_parameters()
            for group in range(len(self._wrapper.fp16_groups)):
                self._wrapper._reassign_or_swap_out_partitioned_parameters(group)
            persistent = self._wrapper.persistent_parameters
            if persistent:
                persistent[0].all_gather(persistent)
            # discards the copies of the weights that a node holds with zero_hpz_partition_size
            self._wrapper.invalidate_secondary_tensor()
        else:
            self._wrapper.update_lp_params()

    def get_steps(self) -> dict[str, int]:
        """Returns AdamW's step counter of each parameter by name.

        Without ZeRO, a parameter's counter counts only steps in which the parameter had a gradient. A ZeRO
        partition has one counter for all its parameters.
        """
        if self._whole is not None:
            return {name: int(self._adamw.state[master]["step"]) for name, master in self._whole.items()}
        steps = max(int(state["step"]) for state in self._adamw.state.values())
        return dict.fromkeys(self.parameters, steps)

    def set_steps(self, steps: dict[str, int]) -> None:
        new = {flat: max(steps.values()) for flat in self._adamw.state}
        if self._whole is not None:
            new = {master: steps[name] for name, master in self._whole.items()}
        for flat, count in new.items():
            state = self._adamw.state[flat]
            state["step"] = count if is_8bit(self._adamw) else state["step"].fill_(count)

    def get_scaler(self) -> dict[str, Any]:
        """Returns the state of fp16's dynamic loss scale, or {} if the loss scale is not dynamic."""
        scaler = dynamic_loss_scaler(self._model.engine)
        return {field: getattr(scaler, field) for field in SCALER_FIELDS if hasattr(scaler, field)}

    def set_scaler(self, state: dict[str, Any]) -> None:
        scaler = dynamic_loss_scaler(self._model.engine)
        for field, value in state.items():
            if hasattr(scaler, field):
                setattr(scaler, field, value)

    def _whole_part(self, name: str, part: str) -> Tensor:
        assert self._whole is not None
        master = self._whole[name]
        return master.detach() if part == WEIGHT else self._adamw.state[master][part]


@contextmanager
def opened_masters(model: TrainedModel, *, store: bool = False) -> Iterator[MasterWeights]:
    """Yields MasterWeights with moments in fp32, even if the optimizer keeps them in 8 bits.

    Changes of the moments of an 8-bit optimizer are kept only with ``store``, and not after an exception.
    """
    optimizer = model.engine.basic_optimizer
    if is_8bit(optimizer):
        add_fp32_moments(optimizer, optimizer_shares(model))
    masters, completed = MasterWeights(model), False
    try:
        yield masters
        completed = True
    finally:
        if is_8bit(optimizer):
            remove_fp32_moments(optimizer, store=store and completed)
            masters.link_states()  # the links would keep the fp32 moments in memory


def optimizer_shares(model: TrainedModel) -> list[Tensor]:
    """Returns this rank's share of the fp32 weights: the tensors that the optimizer updates.

    With ZeRO these are flat partitions, including padding; without ZeRO they are whole parameters.
    """
    if model.zero_stage == 3:  # torch's optimizer holds them only during a step
        return list(model.engine.optimizer.fp32_partitioned_groups_flat)
    return [flat for group in model.engine.basic_optimizer.param_groups for flat in group["params"]]


def local_range(parameter: nn.Parameter, zero_stage: int, rank: int) -> slice:
    """Returns the elements of the flattened ``parameter`` that are in the partition of ``rank``.

    For ZeRO 1 and 2, ``rank`` must be this process's rank, whose range DeepSpeed has stored in the parameter.
    """
    if zero_stage == 0:
        return slice(0, parameter.numel())
    if zero_stage == 3:
        # equal shares, the last one padded; the last ranks have no share of a small parameter
        share, numel = parameter.ds_tensor.numel(), parameter.ds_numel
        return slice(min(share * rank, numel), min(share * (rank + 1), numel))
    mapping = parameter._hp_mapping  # None if the whole parameter is on other ranks
    if mapping is None:
        return slice(0, 0)
    address = mapping.lp_fragment_address
    return slice(address.start, address.start + address.numel)
