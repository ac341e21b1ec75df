"""Tests the device of frozen models.

Three stand-ins take the place of a GPU: a module that records its moves, the device "meta", whose tensors
have no data, so that copying from it is an error, and copies within CPU memory.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ppo_ds.engine.frozen import freeze
from ppo_ds.engine.host_memory import ALIGNMENT

CPU, GPU, META = torch.device("cpu"), torch.device("cuda", 0), torch.device("meta")


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


class Scorer(nn.Module):
    """Has tied weights, bfloat16 weights, odd sizes, and buffers that forwards change and replace."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.norm = nn.LayerNorm(7).bfloat16()
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scalar = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("lengths", torch.ones(3), persistent=False)

    def forward(self, ids):
        self.seen += 1
        self.register_buffer("lengths", self.lengths * 2, persistent=False)  # as RoPE with dynamic lengths
        return self.head(self.norm(self.embed(ids).bfloat16()).float()) * self.scalar


class Uploads(TorchDispatchMode):
    """Counts the bytes that are copied to the device "meta", and whether the copies are asynchronous."""

    def __init__(self):
        super().__init__()
        self.bytes, self.blocking = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and args[0].device == CPU and kwargs["device"] == META:
            self.bytes += args[0].nbytes
            self.blocking += not kwargs.get("non_blocking")
        return func(*args, **kwargs)


def parameters(module):
    return dict(module.named_parameters(remove_duplicate=False))


def test_an_offloaded_replica_is_copied_to_the_device_in_each_block_and_never_back():
    module = Scorer()
    before = {name: p.detach().clone() for name, p in parameters(module).items()}
    # Module.to makes new parameters for this device, tied ones twice; for a GPU, see the next test
    weights = sum(p.nbytes for p in parameters(module).values())
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    model = frozen(module, offload=True, device=META)
    objects = parameters(module)
    pointers = {name: p.data_ptr() for name, p in objects.items()}
    for block in range(3):
        with Uploads() as uploads, model.resident(), model.resident():  # a nested block copies nothing
            assert {p.device for p in module.parameters()} == {META}
            assert model(torch.zeros(2, 3, dtype=torch.int64, device=META)).shape == (2, 3, 13)
        assert uploads.bytes - (buffers if block == 0 else 0) == weights and uploads.blocking == 0
        found = parameters(module)
        assert all(found[name] is objects[name] for name in objects)
        assert {name: p.data_ptr() for name, p in found.items()} == pointers
        assert all(torch.equal(found[name], before[name]) for name in before)
        assert module.head.weight is module.embed.weight
        assert found["norm.weight"].dtype == torch.bfloat16 and not found["scalar"].requires_grad


@contextmanager
def copies_as_moves(monkeypatch):
    """Makes Module.to copy within CPU memory, and yields the copies."""
    moved = []

    def to(module, device, non_blocking=False):
        def copy(tensor):
            if any(tensor.data_ptr() == other.data_ptr() for other in moved):
                return tensor  # it is on the device
            moved.append(tensor.clone())
            return moved[-1]

        return module._apply(copy)

    monkeypatch.setattr(nn.Module, "to", to)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    yield moved
    monkeypatch.undo()


def test_a_replica_computes_with_the_copies_and_changed_buffers_are_kept(monkeypatch):
    ids = torch.arange(6).view(2, 3)
    module, other = Scorer(), Scorer()
    other.load_state_dict(module.state_dict())
    with copies_as_moves(monkeypatch) as moved:
        model = frozen(module, offload=True)
        objects, host = parameters(module), {name: p.data_ptr() for name, p in parameters(module).items()}
        for block in range(2):
            moved[:] = [buffer for _, buffer in module.named_buffers()] if block else []
            with model.resident():
                assert all(p is objects[name] for name, p in parameters(module).items())
                assert not {p.data_ptr() for p in module.parameters()} & set(host.values())
                assert module.head.weight is module.embed.weight
                assert torch.equal(model(ids), other(ids))
            assert {name: p.data_ptr() for name, p in parameters(module).items()} == host
            assert module.seen == block + 1 and module.lengths[0] == 2.0 ** (block + 1)
            weights = sum(p.nbytes for p in module.parameters())  # tied ones once
            assert sum(x.nbytes for x in moved) == weights + sum(x.nbytes for x in module.buffers())


def test_the_weights_of_a_replica_are_in_one_aligned_block():
    module = Scorer()
    frozen(module, offload=True, device=META)
    blocks = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert len(blocks) == 1
    assert all(p.data_ptr() % ALIGNMENT == 0 for p in module.parameters())
    (used,) = {p.untyped_storage().nbytes() for p in module.parameters()}
    assert used == 384 + 64 + 64 + 64  # 13 * 7 * 4 = 364 once, 2 * 7 * 2 = 14 twice, 4


def test_an_offloaded_replica_leaves_the_device_after_an_exception():
    module = Scorer()
    model = frozen(module, offload=True, device=META)
    with pytest.raises(KeyError), model.resident():
        raise KeyError
    assert {p.device for p in module.parameters()} == {CPU}


@pytest.mark.parametrize("error", [0, 2])
def test_the_block_is_page_locked_if_there_is_a_gpu(monkeypatch, caplog, error):
    calls, kernels = [], []
    cudart = SimpleNamespace(cudaHostRegister=lambda *a: calls.append(a) or error)

    def failing(*shape, device):
        kernels.append(device)
        raise RuntimeError("the error that page-locking left")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch, "zeros", failing)
    module = nn.Linear(2, 2)
    frozen(module, offload=True)
    assert calls == [(module.weight.untyped_storage().data_ptr(), 128, 1)]
    assert kernels == ([GPU] if error else [])
    assert ("cannot be page-locked (CUDA error 2)" in caplog.text) == bool(error)


def test_nothing_moves_where_the_device_is_the_cpu():
    module = Moving()
    with frozen(module, offload=True, device=CPU).resident():
        pass
    assert set(module.moves) <= {CPU}
