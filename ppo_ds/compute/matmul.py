"""Multiplies fp32 matrices on a CPU by oneDNN where oneDNN is faster than torch's default library.

PyTorch uses Intel MKL, which does not use AVX-512 on processors of other vendors. On an AMD EPYC of the Zen 5
generation, oneDNN was 1.6 to 2.3 times as fast as MKL; on a Zen 4, about as fast (docs/dev/performance.md).
torch computes all other products.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Library = Literal["torch", "onednn"]
# Products with fewer multiplications are faster with torch: a call of oneDNN takes about 15 microseconds
# longer.
SMALLEST = 2**21
ZEN_5 = 26  # "cpu family" of /proc/cpuinfo


def has_onednn() -> bool:
    """Returns whether this torch contains oneDNN with its operator for linear layers."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def faster_library(cpuinfo: Path = Path("/proc/cpuinfo")) -> Library:
    """Returns the library that multiplies fp32 matrices faster on this processor."""
    if not has_onednn():
        return "torch"
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return "torch"
    fields = {name.strip(): value.split() for name, _, value in (x.partition(":") for x in text.splitlines())}
    amd = fields.get("vendor_id") == ["AuthenticAMD"] and "avx512f" in fields.get("flags", [])
    return "onednn" if amd and int(fields.get("cpu family", ["0"])[0]) >= ZEN_5 else "torch"


_library: Library = faster_library()


def library() -> Library:
    """Returns the library used in this process for products of fp32 matrices on the CPU."""
    return _library


def use(chosen: Library | Literal["auto"]) -> None:
    """Chooses the library for this process; ``auto`` chooses the faster library."""
    global _library
    _library = faster_library() if chosen == "auto" else chosen


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes x weight^T + bias [...,N] of x [...,K], weight [N,K] and bias [N], with derivatives."""
    if not _takes(x, weight, x.numel() * len(weight)):
        return torch.nn.functional.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def mm(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Computes the product [M,N] of a [M,K] and b [K,N], in ``out`` if given. Not differentiable."""
    if not _takes(a, b, a.numel() * b.shape[1]):
        return torch.mm(a, b, out=out)
    product = _onednn(a, b.t())
    return product if out is None else out.copy_(product)


def packs(weight: Tensor) -> bool:
    """Returns whether products with ``weight`` run in oneDNN, where a ``packed`` copy is faster.

    torch multiplies bf16 matrices by oneDNN on all processors with bf16 instructions.
    """
    if weight.device.type != "cpu" or weight.numel() == 0 or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype == torch.float32 and _library == "onednn"


def packed(weight: Tensor) -> Tensor:
    """Returns a copy of the weight in oneDNN's layout, which is fastest for products with few rows."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 32)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes ``linear`` with a ``packed`` weight. Not differentiable."""
    assert not torch.is_grad_enabled()
    return _onednn(x, weight, bias)


def _takes(a: Tensor, b: Tensor, multiplications: int) -> bool:
    """Returns whether to compute the product of a and b, with this number of multiplications, by oneDNN.

    False if a is a vector, and under autocast. oneDNN fails on empty matrices, which are below SMALLEST.
    """
    if _library == "torch" or multiplications < SMALLEST or a.dim() < 2 or torch.is_autocast_enabled("cpu"):
        return False
    return a.dtype == b.dtype == torch.float32 and a.device.type == b.device.type == "cpu"


def _onednn(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """Computes a b^T + bias."""
    return torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """Computes ``linear`` and its gradients by oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # the parameter itself is saved: ZeRO-3 gathers it again for the backward
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            _onednn(grad, weight.t()) if needs_x else None,
            _onednn(rows.t(), x.flatten(0, -2).t()) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )
