"""Tests the block of CPU memory for optimizer states; test_hybrid_switch.py tests the rest with engines."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from ppo_ds.engine.optimizer_offload import OptimizerOffload


def test_states_share_one_page_locked_block_without_rounding(monkeypatch):
    """A block that is too small is unlocked before it is freed, and no other one is made."""
    calls = []
    cudart = SimpleNamespace(
        cudaHostRegister=lambda pointer, size, flags: calls.append(("lock", pointer, size)) or 0,
        cudaHostUnregister=lambda pointer: calls.append(("unlock", pointer)) or 0,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    gpu = SimpleNamespace(zero_stage=2, world=SimpleNamespace(device=torch.device("cuda", 0)))
    offload, states = OptimizerOffload(gpu), [torch.arange(25.0), torch.arange(7.0)]
    monkeypatch.setattr(offload, "_states", lambda: [state.untyped_storage() for state in states])
    for phase in range(3):
        if phase == 1:  # after the first optimizer step
            states.insert(1, torch.arange(75.0))
        with offload.offloaded() as copied:
            assert all(state.untyped_storage().nbytes() == 0 for state in states)
        assert copied == 4 * sum(map(len, states))
        assert all(torch.equal(state, torch.arange(float(len(state)))) for state in states)
    (_, first, size), unlocked, (_, _, larger) = calls
    # 100 and 28 bytes in multiples of 64; then 300 more. As powers of two they would take 160 and 672.
    assert (size, larger) == (128 + 64, 128 + 64 + 320) and unlocked == ("unlock", first)
