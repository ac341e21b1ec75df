"""Tests skipped steps and step counters on stand-ins for DeepSpeed's optimizer, without a process group."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import nn

from ppo_ds.engine.gradients import skip_step
from ppo_ds.engine.master_weights import MasterWeights


def test_a_skipped_step_fills_gradients_with_nan_and_zeroes_them_afterwards() -> None:
    gradients = [torch.ones(3), torch.ones(2)]
    during = []
    wrapper = SimpleNamespace(averaged_gradients={0: gradients, 1: None}, check_grad_overflow=False)
    engine = SimpleNamespace(
        optimizer=wrapper,
        basic_optimizer=None,
        step=lambda: during.extend(gradient.clone() for gradient in gradients),
    )
    skip_step(engine, lower_scale=False)
    assert all(math.isnan(value) for gradient in during for value in gradient)
    assert [gradient.tolist() for gradient in gradients] == [[0, 0, 0], [0, 0]]
    assert wrapper.averaged_gradients == {0: None, 1: None}
    assert wrapper.check_grad_overflow


def test_all_parameters_of_a_partition_continue_at_the_highest_step() -> None:
    """A checkpoint without ZeRO counts the steps of each parameter; a ZeRO partition has one counter."""
    module = nn.Linear(2, 2)
    adamw = torch.optim.AdamW(module.parameters())
    engine = SimpleNamespace(optimizer=SimpleNamespace(), basic_optimizer=adamw)
    masters = MasterWeights(SimpleNamespace(module=module, engine=engine, world=None, zero_stage=2))
    masters.set_steps({"weight": 7, "bias": 3})
    assert masters.get_steps() == {"weight": 7, "bias": 7}
    adamw.state[module.bias]["step"].fill_(2)
    assert masters.get_steps() == {"weight": 7, "bias": 7}
