"""Log-probabilities and entropy from logits, in float32 or wider, without a float32 copy of all logits.

In bf16, log_softmax over a vocabulary of 150k has errors up to 0.065 per token. Therefore the logits are
upcast, ``chunk_size`` positions at a time; the backward pass recomputes the softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_ds.ops.masked import masked_sum, widen

_FLOOR = -1e4  # exp(-1e4) is 0 even in float64; avoids 0 * log 0 = NaN where a logit is -inf


def logprobs_and_entropy_from_logits(
    logits: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk_size: int | None = 1024,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes log softmax(logits / temperature)[label] and the entropy in nats: [...,V], [...] -> [...].

    The results are float32 (float64 for float64 logits) and differentiable. Without ``with_entropy``, the
    entropy is None.
    """
    if logits.dim() > 3:  # to [B,T,V] without a copy in all usual cases, slices of a larger tensor included
        logits = logits.flatten(0, -3)
    elif logits.dim() < 3:
        logits = logits.reshape(-1, 1, logits.shape[-1])
    logprobs, entropy = _RowStatistics.apply(logits, labels, temperature, chunk_size, with_entropy)
    return logprobs.view(labels.shape), entropy.view(labels.shape) if with_entropy else None


def mean_logprobs_from_logits(
    logits: Tensor, labels: Tensor, logprobs: Tensor, temperature: float = 1.0
) -> Tensor:
    """Computes the mean of log softmax(logits / temperature) over the vocabulary: [...,V] -> [...].

    Computed as ``logprobs`` (of ``labels``) + (mean of the logits - label's logit) / temperature.
    """
    chosen = widen(logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1))
    return logprobs + (logits.mean(dim=-1, dtype=chosen.dtype) - chosen) / temperature


def sequence_logprobs(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Sums token log-probs over each response, which gives log pi(y|x): [B,T] -> [B]."""
    return masked_sum(logprobs, mask, dim=1)


def _blocks(shape: torch.Size, chunk_size: int | None) -> Iterator[tuple[slice, slice]]:
    """Yields slices that cover [B,T] in blocks of at most ``chunk_size`` positions."""
    rows, width = shape
    size = chunk_size or max(rows * width, 1)
    step = max(size // max(width, 1), 1)
    for b in range(0, rows, step):
        for t in range(0, width, size):
            yield slice(b, b + step), slice(t, t + size)


def _shifted(block: Tensor, temperature: float) -> Tensor:
    """Computes block / temperature - row maximum as a new tensor in float32 (or float64), never as a view."""
    x = widen(block)
    if temperature != 1.0:
        x = x / temperature
    return x - x.amax(dim=-1, keepdim=True)


class _RowStatistics(torch.autograd.Function):
    """Autograd function: logits [B,T,V], labels [B,T] -> log-probs [B,T], entropy [B,T] or None."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        temperature: float,
        chunk_size: int | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        shape = logits.shape[:2]
        labels = labels.reshape(shape)
        log_norm = torch.empty(shape, dtype=widen(logits[:0]).dtype, device=logits.device)
        logprobs = torch.empty_like(log_norm)
        entropy = torch.empty_like(log_norm) if with_entropy else None
        for block in _blocks(shape, chunk_size):
            z = _shifted(logits[block], temperature)
            exp = z.exp()
            norm = exp.sum(dim=-1)
            log_norm[block] = norm.log()
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
        """Computes the gradient of the logits, block by block.

        With z = logits / temperature:  d log p_y / d z_j = [j = y] - p_j,  d H / d z_j = -p_j (log p_j + H).
        """
        logits, labels, log_norm, entropy = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None:
            return None, None, None, None, None
        grad = torch.empty_like(logits)
        for block in _blocks(logits.shape[:2], ctx.chunk_size):
            log_p = _shifted(logits[block], ctx.temperature).sub_(log_norm[block].unsqueeze(-1))
            p = log_p.exp()
            if grad_entropy is None:
                d = log_p.zero_()
            else:  # -(log p + H) * dL/dH, which overwrites log_p
                d = log_p.clamp_(min=_FLOOR).add_(entropy[block].unsqueeze(-1))
                d = d.mul_(-grad_entropy[block].unsqueeze(-1))
            idle = torch.ones_like(log_norm[block], dtype=torch.bool)
            if grad_logprobs is not None:
                g = grad_logprobs[block].unsqueeze(-1)
                d = d.sub_(g).mul_(p).scatter_add_(-1, labels[block].unsqueeze(-1), g)
                idle &= grad_logprobs[block] == 0
            else:
                d = d.mul_(p)
            if grad_entropy is not None:
                idle &= grad_entropy[block] == 0
            # rows with a zero gradient (padding) may contain NaN: 0 * NaN must not reach the model
            grad[block] = d.div_(ctx.temperature).masked_fill_(idle.unsqueeze(-1), 0.0)
        return grad, None, None, None, None
