"""Log-probabilities and entropy from logits, in float32 or wider, without a full-size float32 copy of the logits.

bf16 log_softmax over a vocabulary of 150k is off by up to 0.065 per token, so rows are upcast; [B,T,V] in float32 is tens of
gigabytes, so they are upcast ``chunk_size`` rows at a time, in the backward pass too (softmax is recomputed there). What is added
to the logits' own memory is a few [chunk_size, V] float32 tensors and, after the backward, the gradient in the logits' own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_ds.ops.masked import masked_sum, widen

_FLOOR = -1e4  # exp(-1e4) is 0 even in float64: keeps 0 * log 0 from being NaN where a logit is -inf


def logprobs_from_logits(
    logits: Tensor, labels: Tensor, temperature: float = 1.0, chunk_size: int | None = 1024
) -> Tensor:
    """log softmax(logits / temperature)[label]: [...,V], [...] -> [...], in nats, float32 (float64 if given float64)."""
    return _RowStatistics.apply(_as_3d(logits), labels, temperature, chunk_size, False)[0].view(labels.shape)


def entropy_from_logits(logits: Tensor, temperature: float = 1.0, chunk_size: int | None = 1024) -> Tensor:
    """Entropy of softmax(logits / temperature): [...,V] -> [...], in nats, float32 (float64 if given float64); differentiable."""
    return _RowStatistics.apply(_as_3d(logits), None, temperature, chunk_size, True)[1].view(
        logits.shape[:-1]
    )


def logprobs_and_entropy_from_logits(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = 1024,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Both of the above in one pass over the logits; the entropy is None if it is not asked for."""
    logprobs, entropy = _RowStatistics.apply(_as_3d(logits), labels, temperature, chunk_size, with_entropy)
    return logprobs.view(labels.shape), entropy.view(labels.shape) if with_entropy else None


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi(y|x) of whole answers: [B,T] -> [B]."""
    return masked_sum(logprobs, mask, dim=1)


def _as_3d(logits: Tensor) -> Tensor:
    """[...,V] -> [B,T,V], a view in every usual case: the slice of a bigger tensor must not be copied."""
    if logits.dim() > 3:
        return logits.flatten(0, -3)
    return logits if logits.dim() == 3 else logits.reshape(-1, 1, logits.shape[-1])


def _blocks(rows: int, width: int, chunk_size: int | None) -> Iterator[tuple[slice, slice]]:
    """Slices that cover [rows, width] in blocks of at most ``chunk_size`` places."""
    size = chunk_size or max(rows * width, 1)
    step = max(size // max(width, 1), 1)
    for b in range(0, rows, step):
        for t in range(0, width, size):
            yield slice(b, b + step), slice(t, t + size)


def _shifted(block: Tensor, temperature: float) -> Tensor:
    """block / temperature less its row's maximum: a new float32 (or float64) tensor, never a view of the logits."""
    x = widen(block)
    if temperature != 1.0:
        x = x / temperature
    return x - x.amax(dim=-1, keepdim=True)


class _RowStatistics(torch.autograd.Function):
    """logits [B,T,V], labels [B,T] (or None) -> log-probs [B,T] (or None), entropy [B,T] (or None)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor | None,
        temperature: float,
        chunk_size: int | None,
        with_entropy: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        shape = logits.shape[:2]
        labels = None if labels is None else labels.reshape(shape)
        log_norm = torch.empty(shape, dtype=widen(logits[:0]).dtype, device=logits.device)
        logprobs = None if labels is None else torch.empty_like(log_norm)
        entropy = torch.empty_like(log_norm) if with_entropy else None
        for block in _blocks(*shape, chunk_size):
            z = _shifted(logits[block], temperature)
            exp = z.exp()
            norm = exp.sum(dim=-1)
            log_norm[block] = norm.log()
            if labels is not None:
                logprobs[block] = z.gather(-1, labels[block].unsqueeze(-1)).squeeze(-1) - log_norm[block]
            if entropy is not None:
                entropy[block] = log_norm[block] - exp.mul_(z.clamp_(min=_FLOOR)).sum(dim=-1) / norm
        ctx.save_for_backward(logits, labels, log_norm, entropy)
        ctx.temperature, ctx.chunk_size = temperature, chunk_size
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, None, None, None, None]:
        """d log p_y / d z_j = [j = y] - p_j;  d H / d z_j = -p_j (log p_j + H);  z = logits / temperature."""
        logits, labels, log_norm, entropy = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        grad = torch.empty_like(logits)
        for block in _blocks(*logits.shape[:2], ctx.chunk_size):
            log_p = _shifted(logits[block], ctx.temperature).sub_(log_norm[block].unsqueeze(-1))
            p = log_p.exp()
            d = (
                log_p.zero_()
                if grad_entropy is None
                else _entropy_factor(log_p, entropy[block], grad_entropy[block])
            )
            idle = torch.ones_like(log_norm[block], dtype=torch.bool)
            if grad_logprobs is not None:
                g = grad_logprobs[block].unsqueeze(-1)
                d = d.sub_(g).mul_(p).scatter_add_(-1, labels[block].unsqueeze(-1), g)
                idle &= grad_logprobs[block] == 0
            else:
                d = d.mul_(p)
            if grad_entropy is not None:
                idle &= grad_entropy[block] == 0
            # rows that nothing is asked of (padding) may hold NaN: 0 * NaN must not reach the model
            grad[block] = d.div_(ctx.temperature).masked_fill_(idle.unsqueeze(-1), 0.0)
        return grad, None, None, None, None


def _entropy_factor(log_p: Tensor, entropy: Tensor, grad_entropy: Tensor) -> Tensor:
    """-(log p + H) * dL/dH, in place of log_p."""
    return log_p.clamp_(min=_FLOOR).add_(entropy.unsqueeze(-1)).mul_(-grad_entropy.unsqueeze(-1))
