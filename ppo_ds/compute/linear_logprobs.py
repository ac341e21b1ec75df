"""Log-probabilities, entropy and accuracy of a linear head without materialising the logits.

The logits of K hidden states and V tokens (5 GB in float32 for 8,192 x 151,936), and their gradient, are
computed for one block of the vocabulary at a time, [K,b], in float32 or wider. The backward pass recomputes
them, unless all blocks together are small. With 16-bit hidden states and weights, logits are float32 on CUDA
and ROCm and rounded to 16 bits on the CPU, both here and in ``linear_logits`` (used by decoding).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppo_ds.compute import matmul
from ppo_ds.ops.masked import widen

CPU_BLOCK = 2**20  # number of logits in a block: 4 MB of float32 fit into the caches of a CPU
GPU_BLOCK = 2**25  # 128 MB of float32: few kernel launches
KEPT = 2**25  # maximum number of logits that are kept for the backward pass: 128 MB
_FLOOR = -1e4  # exp(-1e4) is 0 even in float64; avoids 0 * log 0 = NaN where a logit is -inf


class LabelStatistics(NamedTuple):
    """Statistics of K distributions over the vocabulary and of their labels, in nats."""

    logprobs: Tensor  # [K] log p of the labels
    entropy: Tensor | None  # [K]; None unless requested
    mean_logprobs: Tensor | None  # [K] mean of log p over the vocabulary; None unless requested
    # [K] bool: the label has the largest logit; not differentiable; ``linear_statistics`` always computes it
    correct: Tensor | None


def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float = 1.0,
    *,
    with_entropy: bool = True,
    with_mean: bool = False,
    block_elements: int | None = None,
    kept_elements: int = KEPT,
) -> LabelStatistics:
    """Computes the statistics of softmax((hidden weight^T + bias) / temperature) and its ``labels`` [K].

    hidden is [K,H], weight [V,H], bias [V] or None. The results are in float32 or wider, and differentiable
    except ``correct``. At most ``block_elements`` logits are in a block. If all blocks together have at most
    ``kept_elements`` logits, these are kept for the backward pass instead of recomputed.
    """
    size = block_elements or (CPU_BLOCK if hidden.device.type == "cpu" else GPU_BLOCK)
    keep = torch.is_grad_enabled() and len(hidden) * len(weight) <= kept_elements
    found = _LinearStatistics.apply(
        hidden, weight, bias, labels, temperature, with_entropy, with_mean, size, keep
    )
    return LabelStatistics(*found)


def _blocks(rows: int, vocabulary: int, size: int) -> Iterator[slice]:
    """Yields slices that cover the vocabulary, each with at most ``size`` elements over all rows."""
    width = max(size // max(rows, 1), 1)
    for start in range(0, vocabulary, width):
        yield slice(start, min(start + width, vocabulary))


def has_fp32_products(a: Tensor, b: Tensor) -> bool:
    """Returns whether the device can multiply these 16-bit matrices with a float32 result.

    torch.mm accepts ``out_dtype`` only on CUDA (and on ROCm, whose tensors report ``is_cuda`` too), and only
    for two matrices of the same 16-bit dtype (_mm_dtype_out_cuda in aten/src/ATen/native/cuda/Blas.cpp).
    """
    return a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Computes the matrix product of a and b as a new tensor in float32 or wider."""
    if has_fp32_products(a, b):
        return torch.mm(a, b, out_dtype=torch.float32)
    return widen(matmul.mm(a, b))


def linear_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Computes the logits hidden weight^T + bias [...,V] of hidden [...,H] in float32 or wider."""
    logits = _Product.apply(hidden.flatten(0, -2), weight)
    if bias is not None:
        logits = logits + bias
    return logits.unflatten(0, hidden.shape[:-1])


class _Product(torch.autograd.Function):
    """Computes hidden weight^T [K,V] by ``_product``; torch.mm with ``out_dtype`` is not differentiable."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        # the parameter itself is saved, as in _LinearStatistics
        ctx.save_for_backward(hidden, weight)
        return _product(hidden, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        grad = grad.to(hidden.dtype)
        return (
            matmul.mm(grad, weight) if ctx.needs_input_grad[0] else None,
            matmul.mm(grad.t(), hidden) if ctx.needs_input_grad[1] else None,
        )


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice, temperature: float) -> Tensor:
    z = _product(hidden, weight[block].t())
    if bias is not None:
        z += bias[block]
    return z if temperature == 1.0 else z.div_(temperature)


def _within(labels: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Returns a mask [K] of the labels inside the block, and their columns [K,1] (0 for other labels)."""
    inside = (labels >= block.start) & (labels < block.stop)
    return inside, torch.where(inside, labels - block.start, 0).unsqueeze(-1)


class _Sums:
    """Accumulates per row: largest logit, sum exp(z - largest) and sum exp(z - largest) (z - largest)."""

    def __init__(self, like: Tensor):
        self.largest = torch.full_like(like, torch.finfo(like.dtype).min)
        self.exp, self.weighted = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, z: Tensor, with_entropy: bool) -> Tensor:
        """Adds a block z [K,b] and returns exp(z - largest); overwrites z."""
        largest = torch.maximum(self.largest, z.amax(dim=-1))
        shift = self.largest - largest
        z = z.sub_(largest.unsqueeze(-1))
        exp = z.exp() if with_entropy else z.exp_()
        if with_entropy:
            weighted = z.clamp_(min=_FLOOR).mul_(exp).sum(dim=-1)
            self.weighted = shift.exp() * (self.weighted + shift * self.exp) + weighted
        self.exp = shift.exp() * self.exp + exp.sum(dim=-1)
        self.largest = largest
        return exp


class _LinearStatistics(torch.autograd.Function):
    """Autograd function of linear_statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        with_entropy: bool,
        with_mean: bool,
        size: int,
        keep: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        chosen = torch.empty(len(hidden), dtype=widen(hidden[:0]).dtype, device=hidden.device)
        sums, kept, total = _Sums(chosen), [], torch.zeros_like(chosen)
        for block in _blocks(len(hidden), len(weight), size):
            z = _logits(hidden, weight, bias, block, temperature)
            inside, column = _within(labels, block)
            chosen = torch.where(inside, z.gather(-1, column).squeeze(-1), chosen)
            if with_mean:
                total += z.sum(dim=-1)
            exp = sums.add(z, with_entropy)
            if keep:
                kept += [exp, sums.largest]
        log_sum = sums.exp.log()
        entropy = log_sum - sums.weighted / sums.exp if with_entropy else None
        # saves the parameter itself instead of a copy: ZeRO-3 releases the parameter between the passes and
        # gathers it again for the backward
        log_norm = sums.largest + log_sum
        ctx.save_for_backward(hidden, weight, bias, labels, log_norm, entropy, *kept)
        ctx.temperature, ctx.size = temperature, size
        ctx.set_materialize_grads(False)
        correct = chosen == sums.largest
        ctx.mark_non_differentiable(correct)
        mean = total / len(weight) - log_norm if with_mean else None
        return chosen - sums.largest - log_sum, entropy, mean, correct

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_mean: Tensor | None,
        _correct: None,
    ) -> tuple[Tensor | None, ...]:
        """Computes the gradients of hidden, weight and bias, block by block.

        With z = (hidden weight^T + bias) / temperature and the mean m of log p over V tokens:
        d log p_y / d z_j = [j = y] - p_j,  d H / d z_j = -p_j (log p_j + H),  d m / d z_j = 1/V - p_j.
        """
        hidden, weight, bias, labels, log_norm, entropy, *kept = ctx.saved_tensors
        if grad_logprobs is None and grad_entropy is None and grad_mean is None:
            return (None,) * 9
        for_logprobs = (
            torch.zeros_like(log_norm) if grad_logprobs is None else grad_logprobs / ctx.temperature
        )
        for_entropy = None if grad_entropy is None else grad_entropy / ctx.temperature
        for_mean = None if grad_mean is None else grad_mean / ctx.temperature
        # rows with a zero gradient may contain NaN: 0 * NaN must not reach the model
        idle = for_logprobs == 0
        for grad in (for_entropy, for_mean):
            idle = idle if grad is None else idle & (grad == 0)
        hidden = hidden.masked_fill(idle.unsqueeze(-1), 0.0)
        grad_hidden = torch.zeros_like(hidden, dtype=log_norm.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if ctx.needs_input_grad[2] else None
        for i, block in enumerate(_blocks(len(hidden), len(weight), ctx.size)):
            if kept:
                p = kept[2 * i] * (kept[2 * i + 1] - log_norm).exp().unsqueeze(-1)
            else:
                p = _logits(hidden, weight, bias, block, ctx.temperature).sub_(log_norm.unsqueeze(-1)).exp_()
            inside, column = _within(labels, block)
            if for_mean is None:
                d = logits_gradient(p, inside, column, for_logprobs, entropy, for_entropy)
            else:  # the gradients of both log-probs have the term -p_j
                d = logits_gradient(p, inside, column, for_logprobs + for_mean, entropy, for_entropy)
                d.scatter_add_(-1, column, torch.where(inside, -for_mean, 0.0).unsqueeze(-1))
                d.add_(for_mean.unsqueeze(-1) / len(weight))
            d = d.masked_fill_(idle.unsqueeze(-1), 0.0)
            if grad_bias is not None:
                grad_bias[block] = d.sum(dim=0)
            d = d.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden += _product(d, weight[block])
            if grad_weight is not None:
                matmul.mm(d.t(), hidden, out=grad_weight[block])
        return (
            None if grad_hidden is None else grad_hidden.to(hidden.dtype),
            grad_weight,
            grad_bias,
            *(None,) * 6,
        )


def logits_gradient(
    p: Tensor,
    inside: Tensor,
    column: Tensor,
    for_logprobs: Tensor,
    entropy: Tensor,
    for_entropy: Tensor | None,
) -> Tensor:
    """Computes the gradient [K,b] of a block of logits from its probabilities p [K,b], overwriting p.

    ``inside`` and ``column`` are the results of ``_within``. ``for_logprobs`` [K] and ``for_entropy`` [K] are
    the incoming gradients of the log-probs and of ``entropy`` [K], divided by the temperature.
    """
    if for_entropy is None:
        d = p.mul_(-for_logprobs.unsqueeze(-1))
    else:
        slope = (
            p.log()
            .clamp_(min=_FLOOR)
            .add_(entropy.unsqueeze(-1))
            .mul_(for_entropy.unsqueeze(-1))
            .add_(for_logprobs.unsqueeze(-1))
        )
        d = slope.mul_(p).neg_()
    return d.scatter_add_(-1, column, torch.where(inside, for_logprobs, 0.0).unsqueeze(-1))
