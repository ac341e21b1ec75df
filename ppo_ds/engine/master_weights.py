"""The fp32 weights and AdamW moments of a DeepSpeed engine, by parameter name and whole, for every ZeRO stage.

ZeRO keeps them in flat partitions whose layout depends on the stage and the number of ranks. Reached one whole parameter at a time,
they fit any other layout. Each collective below is one per parameter: no rank ever holds more than one beside its own partition.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from ppo_ds.engine.trained import TrainedModel

WEIGHT = "weight"
PARTS = (WEIGHT, "exp_avg", "exp_avg_sq")  # the moments under torch's own names
SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class MasterWeights:
    """Get and set by name. After the last ``set`` call ``refresh()``, which makes the low-precision weights follow.

    Frozen parameters are not here: they come from where the model came from.
    """

    def __init__(self, model: TrainedModel):
        self._model = model
        self._world = model.world
        self._wrapper = model.engine.optimizer
        self._adamw: torch.optim.Optimizer = model.engine.basic_optimizer
        self._stage3 = model.zero_stage == 3
        self.parameters = {
            name: p for name, p in model.module.named_parameters() if p.requires_grad
        }  # a tied one once
        self._whole = self._whole_masters() if model.zero_stage == 0 else None
        self._create_moments()

    def shape(self, name: str) -> list[int]:
        parameter = self.parameters[name]
        return list(getattr(parameter, "ds_shape", parameter.shape))

    def get(self, name: str, part: str) -> Tensor:
        """Collective: the whole fp32 tensor of one parameter, the same on every rank. Not to be written to."""
        if self._whole is not None:
            return self._whole_part(name, part)
        parameter = self.parameters[name]
        return (
            safe_get_full_fp32_param(parameter)
            if part == WEIGHT
            else safe_get_full_optimizer_state(parameter, part)
        )

    def set(self, name: str, part: str, value: Tensor) -> None:
        """Take this rank's share of ``value``, the whole tensor. Not a collective."""
        parameter = self.parameters[name]
        if self._whole is not None:
            self._whole_part(name, part).copy_(value)
        elif self._stage3:
            share = self._share(value, parameter.ds_tensor.numel())
            safe_set_local_fp32_param(parameter, share) if part == WEIGHT else safe_set_local_optimizer_state(
                parameter, share, part
            )
        else:
            safe_set_full_fp32_param(parameter, value) if part == WEIGHT else safe_set_full_optimizer_state(
                parameter, value, part
            )

    @torch.no_grad()
    def refresh(self) -> None:
        """Collective: compute the weights of the module from the fp32 ones, as a step of the optimizer does at its end."""
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
            self._wrapper.invalidate_secondary_tensor()  # copies within a node, with zero_hpz_partition_size
        else:
            self._wrapper.update_lp_params()

    def get_steps(self) -> dict[str, int]:
        """AdamW's own counter, by parameter. Without ZeRO it lags where a parameter had no gradient; a partition has one for all."""
        if self._whole is not None:
            return {name: int(self._adamw.state[master]["step"]) for name, master in self._whole.items()}
        steps = max(int(state["step"]) for state in self._adamw.state.values())
        return dict.fromkeys(self.parameters, steps)

    def set_steps(self, steps: dict[str, int]) -> None:
        if self._whole is not None:
            for name, master in self._whole.items():
                self._adamw.state[master]["step"].fill_(steps[name])
        else:
            for state in self._adamw.state.values():
                state["step"].fill_(max(steps.values()))

    def get_scaler(self) -> dict[str, Any]:
        """The state of fp16's dynamic loss scale; {} where there is none."""
        scaler = self._scaler()
        return {field: getattr(scaler, field) for field in SCALER_FIELDS if hasattr(scaler, field)}

    def set_scaler(self, state: dict[str, Any]) -> None:
        scaler = self._scaler()
        for field, value in state.items():
            if hasattr(scaler, field):
                setattr(scaler, field, value)

    def _scaler(self) -> Any:
        for attribute, dynamic in (("loss_scaler", "dynamic"), ("loss_scale_config", "dynamic_loss_scale")):
            scaler = getattr(self._wrapper, attribute, None)
            if getattr(scaler, dynamic, False):
                return scaler
        return None

    def _whole_masters(self) -> dict[str, Tensor]:
        """Without ZeRO: fp32 parameters are their own masters, low-precision ones have a copy each in DeepSpeed's wrapper."""
        if not isinstance(self._wrapper, FP16_UnfusedOptimizer):
            return dict(self.parameters)
        pairs = zip(self._wrapper.fp16_groups, self._wrapper.fp32_groups, strict=True)
        master = {id(low): high for lows, highs in pairs for low, high in zip(lows, highs, strict=True)}
        return {name: master[id(parameter)] for name, parameter in self.parameters.items()}

    def _whole_part(self, name: str, part: str) -> Tensor:
        assert self._whole is not None
        master = self._whole[name]
        return master.detach() if part == WEIGHT else self._adamw.state[master][part]

    def _share(self, value: Tensor, numel: int) -> Tensor:
        """ZeRO-3 cuts each parameter in equal shares; the last is filled up with zeros."""
        flat = value.flatten()
        padded = nn.functional.pad(flat, (0, numel * self._world.size - flat.numel()))
        return padded.narrow(0, numel * self._world.rank, numel)

    def _create_moments(self) -> None:
        """torch creates them in the first step, so a new engine has none; neither has one whose steps were all skipped."""
        fused = self._adamw.defaults["fused"]
        for flat in self.held_by_optimizer():
            state = self._adamw.state[flat]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=flat.device if fused else "cpu")
                state["exp_avg"] = torch.zeros_like(flat, requires_grad=False)
                state["exp_avg_sq"] = torch.zeros_like(flat, requires_grad=False)
        if hasattr(self._wrapper, "_lazy_init_hp_params_optimizer_state"):
            # DeepSpeed does this once, after the first parameter group was stepped, and so never reaches the moments of the others
            self._wrapper._hp_optimizer_states_linked = False
            self._wrapper._lazy_init_hp_params_optimizer_state()

    def held_by_optimizer(self) -> list[Tensor]:
        """This rank's share of the fp32 weights."""
        return optimizer_shares(self._model)


def optimizer_shares(model: TrainedModel) -> list[Tensor]:
    """This rank's share of the fp32 weights, as the optimizer steps it: flat partitions, padding included, or whole parameters without ZeRO."""
    if model.zero_stage == 3:  # it lends them to torch's optimizer for the length of a step
        return list(model.engine.optimizer.fp32_partitioned_groups_flat)
    return [flat for group in model.engine.basic_optimizer.param_groups for flat in group["params"]]
