"""KL estimators (Schulman, "Approximating KL divergence").

Each function estimates KL(policy || reference) elementwise, in nats, at samples of the policy. Only the
policy's log-probs get gradients. ``clamp`` limits the value to [-clamp, clamp]; outside this range the
gradient is 0, except for k1+ and k3+.

Of k1, k2 and k3, only k2 has the gradient of the reverse KL in expectation. The expected gradient of k1 is 0,
and that of k3 is the gradient of the forward KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ppo_ds.ops.masked import widen

_MAX_EXPONENT = 20.0


def k1(logprobs: Tensor, ref_logprobs: Tensor, clamp: float | None = None) -> Tensor:
    """Computes d = log pi - log pi_ref: unbiased and signed."""
    return _clamped(_difference(logprobs, ref_logprobs), clamp)


def absolute(logprobs: Tensor, ref_logprobs: Tensor, clamp: float | None = None) -> Tensor:
    """Computes |d|."""
    return _clamped(_difference(logprobs, ref_logprobs).abs(), clamp)


def k2(logprobs: Tensor, ref_logprobs: Tensor, clamp: float | None = None) -> Tensor:
    """Computes d^2 / 2."""
    return _clamped(_difference(logprobs, ref_logprobs).square() / 2, clamp)


def k3(logprobs: Tensor, ref_logprobs: Tensor, clamp: float | None = None) -> Tensor:
    """Computes exp(-d) - 1 + d: unbiased and never negative.

    -d is limited to 20 to keep the value finite; beyond this limit, the gradient is 0.
    """
    exponent = (-_difference(logprobs, ref_logprobs)).clamp(max=_MAX_EXPONENT)
    return _clamped(torch.expm1(exponent) - exponent, clamp)


def k1_plus(logprobs: Tensor, ref_logprobs: Tensor, clamp: float | None = None) -> Tensor:
    """Computes k1 in the forward pass, with the gradient of k2."""
    return _with_gradient_of_k2(k1(logprobs, ref_logprobs, clamp), logprobs, ref_logprobs)


def k3_plus(logprobs: Tensor, ref_logprobs: Tensor, clamp: float | None = None) -> Tensor:
    """Computes k3 in the forward pass, with the gradient of k2."""
    return _with_gradient_of_k2(k3(logprobs, ref_logprobs, clamp), logprobs, ref_logprobs)


def _difference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return widen(logprobs) - widen(ref_logprobs).detach()


def _clamped(kl: Tensor, clamp: float | None) -> Tensor:
    return kl if clamp is None else kl.clamp(-clamp, clamp)


def _with_gradient_of_k2(value: Tensor, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    gradient = k2(logprobs, ref_logprobs)
    return value.detach() + (gradient - gradient.detach())
