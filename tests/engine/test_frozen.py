"""Tests on which device frozen models are, with a module that records its moves instead of a GPU."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppo_ds.engine.frozen import freeze

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Moving(nn.Linear):
    """Records each move instead of moving, and fails to compute unless its recorded device is the GPU."""

    def __init__(self):
        super().__init__(2, 2)
        self.device, self.moves = CPU, []

    def to(self, device):
        self.device = torch.device(device)
        self.moves.append(self.device)
        return self

    def forward(self, x):
        assert self.device == GPU, "a forward without the weights"
        return super().forward(x)


def frozen(module, *, offload, device=GPU):
    return freeze(module, world=SimpleNamespace(device=device), offload=offload, deepspeed_config=None)


def test_a_replica_stays_on_the_device():
    module = Moving()
    model = frozen(module, offload=False)
    assert module.moves == [GPU]
    with model.resident():
        model(torch.ones(1, 2))
    assert module.moves == [GPU]


def test_a_frozen_model_is_in_evaluation_mode_without_gradients():
    module = frozen(Moving().train(), offload=False).module
    assert not module.training and not any(parameter.requires_grad for parameter in module.parameters())


def test_an_offloaded_replica_is_on_the_device_while_it_is_used():
    module = Moving()
    model = frozen(module, offload=True)
    assert module.moves == []
    for _ in range(2):
        with model.resident(), model.resident():  # a nested block moves nothing
            assert not model(torch.ones(1, 2)).requires_grad
            assert module.device == GPU
        assert module.device == CPU
    assert module.moves == [GPU, CPU] * 2


def test_an_offloaded_replica_leaves_the_device_after_an_exception():
    module = Moving()
    model = frozen(module, offload=True)
    with pytest.raises(KeyError), model.resident():
        raise KeyError
    assert module.device == CPU


def test_nothing_moves_where_the_device_is_the_cpu():
    module = Moving()
    with frozen(module, offload=True, device=CPU).resident():
        pass
    assert set(module.moves) <= {CPU}
