"""Controllers of the KL coefficient."""

from __future__ import annotations

import math
from typing import Any


class FixedKLController:
    """Keeps the KL coefficient constant."""

    def __init__(self, init_kl_coef: float = 0.2):
        self.value = init_kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Does nothing. Subclasses adapt the coefficient to ``current``, the mean KL of ``n_steps`` samples.

        ``current`` must be reduced over ranks, so that all ranks have the same coefficient.
        """

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class ControlledKLController(FixedKLController):
    """Multiplies the coefficient by ``factor()`` at each update, and limits it to [min_coef, max_coef].

    ``target`` has the unit of the KL passed to update(). A KL that is not finite is ignored.
    """

    def __init__(
        self,
        init_kl_coef: float = 0.2,
        target: float = 6.0,
        min_coef: float = 0.0,
        max_coef: float | None = None,
    ):
        super().__init__(init_kl_coef)
        self.target, self.min_coef, self.max_coef = target, min_coef, max_coef

    def factor(self, current: float, n_steps: int) -> float:
        raise NotImplementedError

    def update(self, current: float, n_steps: int) -> None:
        if math.isfinite(current):  # a NaN would remain in the coefficient
            value = max(self.value * self.factor(current, n_steps), self.min_coef)
            self.value = value if self.max_coef is None else min(value, self.max_coef)


class AdaptiveKLController(ControlledKLController):
    """Proportional controller in log space (Ziegler et al. 2019, section 2.2)."""

    def __init__(self, *args: Any, horizon: float = 10000, **limits: Any):
        super().__init__(*args, **limits)
        self.horizon = horizon

    def factor(self, current: float, n_steps: int) -> float:
        return 1 + min(max(current / self.target - 1, -0.2), 0.2) * n_steps / self.horizon


class ThresholdKLController(ControlledKLController):
    """Multiplies the coefficient by 1.5 if KL > 2 * target, and by 0.5 if KL < target / 2.

    The KL is 0 at the start of training, so the first steps halve the coefficient down to ``min_coef``.
    """

    def factor(self, current: float, n_steps: int) -> float:
        if current > 2 * self.target:
            return 1.5
        return 0.5 if current < 0.5 * self.target else 1.0
