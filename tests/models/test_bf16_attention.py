"""Tests the backward of bf16 attention on a CPU, which is computed in fp32."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ppo_ds.models import packed_attention
from ppo_ds.models.packed_attention import whole_rows

HEADS, GROUPS, WIDTH, LENGTH = 4, 2, 16, 24
MODULE = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, is_causal=True, training=True)


@pytest.fixture(autouse=True)
def without_amx(monkeypatch):
    monkeypatch.setattr(packed_attention, "_HAS_AMX", False)


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, LENGTH, WIDTH).bfloat16() for heads in (HEADS, GROUPS, GROUPS)]


def left_padding(dtype: torch.dtype) -> Tensor:
    """Returns a causal mask [2,1,t,t] whose second row has five columns of padding."""
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None].repeat(2, 1, 1, 1)
    seen[1, :, 5:, :5] = False
    if dtype == torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)


def gradients(tensors: list[Tensor], mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """Returns the output and the gradients in ``dtype``, for a fixed gradient of the output."""
    leaves = [each.to(dtype).requires_grad_() for each in tensors]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    out = whole_rows(MODULE, *leaves, mask, scaling=WIDTH**-0.5, dropout=0.0)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return out, list(torch.autograd.grad(out, leaves, weights.bfloat16().to(dtype)))


@pytest.mark.parametrize("mask", [None, left_padding(torch.bool), left_padding(torch.bfloat16)])
def test_the_gradients_are_those_of_fp32_rounded_once(mask):
    _, found = gradients(inputs(), mask, torch.bfloat16)
    _, expected = gradients(inputs(), mask, torch.float32)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(found, expected, strict=True))


def test_the_forward_is_that_of_bf16(monkeypatch):
    """Training and scoring compute the same bits, whether gradients are needed or not."""
    out, _ = gradients(inputs(), left_padding(torch.bool), torch.bfloat16)
    with torch.no_grad():
        scored = whole_rows(MODULE, *inputs(), left_padding(torch.bool), scaling=WIDTH**-0.5, dropout=0.0)
    assert torch.equal(out, scored)
    monkeypatch.setattr(packed_attention, "_HAS_AMX", True)
    assert torch.equal(out, gradients(inputs(), left_padding(torch.bool), torch.bfloat16)[0])


def test_dropout_is_left_to_torch():
    """A repeated forward would drop other weights."""
    query, key, value = (each.requires_grad_() for each in inputs())
    out = whole_rows(MODULE, query, key, value, None, scaling=WIDTH**-0.5, dropout=0.5)
    assert "Fp32Backward" not in out.grad_fn.name()
