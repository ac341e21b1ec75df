"""Controllers of the KL coefficient."""

from __future__ import annotations

import math


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
