"""KL estimators (Schulman, "Approximating KL divergence") and controllers of the KL coefficient.

All values are in nats.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ppo_ds.ops.masked import widen

KLEstimator = Literal["k1", "abs", "k2", "k3", "k1+", "k3+"]

_MAX_EXPONENT = 20.0


def approx_kl(
    logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator = "k1", clamp: float | None = None
) -> Tensor:
    """Estimates KL(policy || reference) elementwise at samples of the policy.

    Gradients flow into ``logprobs`` only. With d = log pi - log pi_ref:

        k1 = d        abs = |d|        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

    "k1+" and "k3+" have the value of k1 and k3 and the gradient of k2. Of k1, k2 and k3, only k2 has the
    gradient of the reverse KL in expectation. The expected gradient of k1 is 0, and the expected
    gradient of k3 is the gradient of the forward KL.

    In k3, -d is limited to 20, so that the value stays finite; the gradient is 0 beyond the limit. Large d
    need no limit, since exp(-d) vanishes.

    Args:
        clamp: Limits the value to +-clamp; the gradient is 0 beyond it, except for "k1+" and "k3+". None: no
            limit.
    """
    d = widen(logprobs) - widen(ref_logprobs).detach()
    if estimator in ("k1+", "k3+"):
        k2 = d.square() / 2
        value: KLEstimator = "k1" if estimator == "k1+" else "k3"
        return approx_kl(logprobs, ref_logprobs, value, clamp).detach() + (k2 - k2.detach())
    match estimator:
        case "k1":
            kl = d
        case "abs":
            kl = d.abs()
        case "k2":
            kl = d.square() / 2
        case "k3":
            exponent = (-d).clamp(max=_MAX_EXPONENT)
            kl = torch.expm1(exponent) - exponent
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}: k1, abs, k2, k3, k1+ or k3+")
    return kl if clamp is None else kl.clamp(-clamp, clamp)


class FixedKLController:
    """Keeps the KL coefficient constant."""

    def __init__(self, init_kl_coef: float = 0.2):
        self.value = init_kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Does nothing. Subclasses adjust the coefficient to ``current``, the KL of ``n_steps`` sequences.

        ``current`` must be reduced over ranks, so that all ranks keep the same coefficient.
        """

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """Proportional controller in log space (Ziegler et al. 2019, section 2.2).

    ``target`` has the unit of the KL passed to update(): the default of 6 nats is per sequence, not per
    token.
    """

    def __init__(
        self,
        init_kl_coef: float = 0.2,
        target: float = 6.0,
        horizon: float = 10000,
        min_coef: float = 0.0,
        max_coef: float | None = None,
    ):
        super().__init__(init_kl_coef)
        self.target, self.horizon = target, horizon
        self.min_coef, self.max_coef = min_coef, max_coef

    def update(self, current: float, n_steps: int) -> None:
        if not math.isfinite(current):
            return  # NaN would stay in the coefficient, and an infinite KL would count as an error of +0.2
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value = _limit(self.value * (1 + error * n_steps / self.horizon), self.min_coef, self.max_coef)


class ThresholdKLController(FixedKLController):
    """Multiplies the coefficient by ``up`` or ``down`` when the KL leaves a band around the target.

    The factor is ``up`` if KL > ``high`` * target and ``down`` if KL < ``low`` * target, both strictly. The
    KL is 0 at the start of training, so without ``min_coef`` the coefficient would be halved in every step.
    """

    def __init__(
        self,
        init_kl_coef: float = 0.2,
        target: float = 0.01,
        up: float = 1.5,
        down: float = 0.5,
        high: float = 2.0,
        low: float = 0.5,
        min_coef: float = 1e-4,
        max_coef: float | None = 10.0,
    ):
        super().__init__(init_kl_coef)
        self.target, self.up, self.down, self.high, self.low = target, up, down, high, low
        self.min_coef, self.max_coef = min_coef, max_coef

    def update(self, current: float, n_steps: int) -> None:
        if not math.isfinite(current):
            return
        if current > self.high * self.target:
            self.value = _limit(self.value * self.up, self.min_coef, self.max_coef)
        elif current < self.low * self.target:
            self.value = _limit(self.value * self.down, self.min_coef, self.max_coef)


def _limit(value: float, low: float, high: float | None) -> float:
    return max(value, low) if high is None else min(max(value, low), high)
