"""Tests run.deterministic: torch's deterministic algorithms are enabled in backward passes only."""

from contextlib import nullcontext
from types import SimpleNamespace

import deepspeed
import pytest
import torch
from torch import nn

from ppo_ds.engine.trained import LRSchedule, TrainedModel, deterministic_algorithms


def settings():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


class Engine:
    """Stands in for DeepSpeed's engine; records the settings of backwards; the second fails."""

    def __init__(self, module):
        self.module, self.seen = module, []

    def set_gradient_accumulation_boundary(self, last):
        pass

    def backward(self, loss, scale_wrt_gas):
        self.seen.append(settings())
        if len(self.seen) == 2:
            raise RuntimeError("no deterministic implementation")
        loss.backward()


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(deepspeed, "initialize", lambda model, **_: (Engine(model), None))

    def build(deterministic):
        world = SimpleNamespace(device=torch.device("cpu"), quiet=nullcontext, deterministic=deterministic)
        return TrainedModel(
            nn.Linear(2, 1),
            world=world,
            deepspeed_config={"zero_optimization": {"stage": 0}},
            schedule=LRSchedule(0.1, "constant", 0.0, 0.1, 1),
            betas=(0.9, 0.95),
            eps=1e-8,
            weight_decay=0.0,
        )

    return build


def test_backward_passes_are_deterministic_and_the_settings_are_restored(make):
    outside, model = settings(), make(True)
    model.backward(model.module(torch.ones(1, 2)).sum(), last=True)
    assert model.module.weight.grad.tolist() == [[1, 1]]
    assert model.engine.seen == [(True, False, False)]  # an error instead of a warning; no filling of memory
    assert settings() == outside
    with pytest.raises(RuntimeError, match="no deterministic implementation"):
        model.backward(torch.zeros(()), last=True)
    assert settings() == outside


def test_nothing_changes_without_the_switch(make):
    outside, model = settings(), make(False)
    model.backward(model.module(torch.ones(1, 2)).sum(), last=True)
    assert model.engine.seen == [outside] and not outside[0]


def test_settings_of_the_caller_are_restored():
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_algorithms(True):
            assert settings() == (True, False, False)
        assert settings() == (True, True, True)
    finally:
        torch.use_deterministic_algorithms(False)
