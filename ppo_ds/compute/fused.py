"""RMSNorm and rotary position embeddings with fewer kernels and saved tensors than autograd needs.

Results and gradients are bit-identical to those of transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes x / sqrt(mean(x^2) + eps) in fp32, rounded to the dtype of ``weight``, times weight [H]."""
    if not torch.is_grad_enabled():
        states = x.float()
        return _normalized(states, _inverse_rms(states, eps), weight)
    return _RMSNorm.apply(x, x if x.dtype == torch.float32 else None, weight, eps)


def _inverse_rms(states: Tensor, eps: float) -> Tensor:
    return states.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _normalized(states: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    return (states * inverse).to(weight.dtype).mul_(weight)


class _RMSNorm(torch.autograd.Function):
    """RMSNorm whose backward recomputes the normalized input.

    The gradient of x has two terms, one through the numerator and one through the mean. In fp32, autograd
    adds both to the gradient of the residual stream, one after the other. To keep that order, x is passed
    twice, and each term is returned as the gradient of one of the two arguments. In other dtypes, autograd
    rounds the sum of the terms.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        states = x.float()
        inverse = _inverse_rms(states, eps)
        # the parameter itself is saved: ZeRO-3 gathers it again for the backward
        ctx.save_for_backward(x, weight, inverse)
        return _normalized(states, inverse, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, inverse = ctx.saved_tensors
        states, d_weight = x.float(), None
        if ctx.needs_input_grad[2]:
            normalized = (states * inverse).to(weight.dtype)
            # not in place: the order of the sum depends on the strides of the product
            d_weight = (grad * normalized).sum(tuple(range(x.dim() - 1)))
        if not ctx.needs_input_grad[0]:
            return None, None, d_weight, None
        d_normalized = (grad * weight).float()
        product = d_normalized * states
        # derivative of the inverse root, divided by the number of columns of the mean
        slope = (product.sum(-1, keepdim=True) * -0.5 * inverse.pow(3)).div_(x.shape[-1])
        # 2x is computed first, as in autograd: if 2x overflows, the result is not finite even if x is
        by_mean = torch.mul(states, 2, out=product).mul_(slope)
        by_numerator = d_normalized.mul_(inverse)
        if x.dtype == torch.float32:
            return by_numerator, by_mean, d_weight, None
        return by_numerator.add_(by_mean).to(x.dtype), None, d_weight, None


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Applies rotary position embeddings (Su et al. 2021) to queries and keys.

    q and k are [b,heads,t,d], or [b,t,heads,d] with ``unsqueeze_dim=2``. cos and sin are [b,t,d]. Each pair
    of coordinates i and i + d/2 is rotated.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    if not torch.is_grad_enabled():
        return _rotated(q, cos, sin), _rotated(k, cos, sin)
    return _Rotary.apply(q, cos, sin), _Rotary.apply(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False) -> Tensor:
    """Rotates x, or applies the transposed rotation, which is the derivative."""
    out = x * cos
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    if inverse:
        out[..., :half].add_(second * sin[..., half:])
        out[..., half:].sub_(first * sin[..., :half])
    else:
        out[..., :half].sub_(second * sin[..., :half])
        out[..., half:].add_(first * sin[..., half:])
    return out


class _Rotary(torch.autograd.Function):
    """Rotation whose backward is also a rotation, so that only cosines and sines are saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, inverse=True), None, None
