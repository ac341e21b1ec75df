"""Defines the KL to the reference: the keys of algo.kl, the estimators, and the controllers.

To add an estimator or a controller, write its code in any importable module, and an entry or a class here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from ppo_ds.config.registry import Entry
from ppo_ds.config.text import short
from ppo_ds.config.types import NonNegative, OneOf, Positive, Variants

KL_CONTROLLERS: dict[str, type[KLConfig]] = {}
_HERE = "ppo_ds.algorithm.kl"


@dataclass(frozen=True)
class KLEstimatorEntry(Entry):
    """An estimator of the KL to the reference: (logprobs, ref_logprobs[, clamp=algo.kl.clamp]) -> [B,R]."""

    # False if it differs from another estimator only in the gradient
    in_reward: bool = field(default=True, kw_only=True)
    flaw_as_loss: str | None = field(default=None, kw_only=True)  # why not to use it as a loss


KL_ESTIMATORS = {
    "k1": KLEstimatorEntry(
        f"{_HERE}.estimators.k1",
        "log p - log p_ref: unbiased, signed.",
        flaw_as_loss="has no gradient in expectation, so it does not limit the KL (use k2)",
    ),
    "abs": KLEstimatorEntry(
        f"{_HERE}.estimators.absolute",
        "|log p - log p_ref|.",
        flaw_as_loss="does not have the gradient of any KL (use k2)",
    ),
    "k2": KLEstimatorEntry(
        f"{_HERE}.estimators.k2",
        "(log p - log p_ref)^2 / 2: its gradient is that of the reverse KL in expectation.",
    ),
    "k3": KLEstimatorEntry(
        f"{_HERE}.estimators.k3", "exp(log p_ref - log p) - 1 + log p - log p_ref: unbiased, never negative."
    ),
    "k1+": KLEstimatorEntry(
        f"{_HERE}.estimators.k1_plus", "The value of k1 with the gradient of k2.", in_reward=False
    ),
    "k3+": KLEstimatorEntry(
        f"{_HERE}.estimators.k3_plus", "The value of k3 with the gradient of k2.", in_reward=False
    ),
}


class KLConfig(Variants):
    """KL penalty against the reference."""

    tag = "controller"
    variants = KL_CONTROLLERS
    function: ClassVar[str]  # dotted name of the controller; its arguments: coef and the keys ``takes``
    takes: ClassVar[tuple[str, ...]] = ()

    place: Literal["reward", "loss", "none"] = "reward"
    """Where the penalty is applied."""

    estimator: Annotated[str, OneOf(KL_ESTIMATORS)] = "k1"
    """Estimator of the KL."""

    coef: NonNegative = 0.05
    """Coefficient of the penalty, or its initial value."""

    clamp: Positive | None = None
    """Limits the KL of each token to [-clamp, clamp], beyond which only k1+ and k3+ have a gradient; null:
    off."""

    controller: Annotated[str, OneOf(KL_CONTROLLERS)] = "fixed"
    """How the coefficient changes with the measured KL."""

    after_update: bool = False
    """Measures the KL to the reference again after each update, with one more forward."""

    def problems(self, samples: int) -> Iterator[str]:
        """Yields an error line for each conflict between the keys; ``samples`` is the size of a rollout."""
        if self.clamp is not None and self.place == "none":
            yield (
                f"algo.kl.clamp={self.clamp:g}: limits a penalty that algo.kl.place=none does not compute; "
                "set algo.kl.place to reward or loss, or algo.kl.clamp to null"
            )
        if self.place == "reward" and not KL_ESTIMATORS[self.estimator].in_reward:
            yield (
                f"algo.kl.estimator={self.estimator}: differs from {self.estimator[:-1]} only in its "
                f"gradient, so it needs algo.kl.place=loss; in the reward use {self.estimator[:-1]}"
            )


class FixedKL(KLConfig):
    """The coefficient does not change."""

    controller: Literal["fixed"] = "fixed"
    function = f"{_HERE}.controllers.FixedKLController"


class ControlledKL(KLConfig):
    """A KL penalty whose coefficient follows the measured KL."""

    target: Positive = 6.0
    """Target KL of the controller, in nats per algo.kl.unit."""

    unit: Literal["sequence", "token"] = "sequence"
    """Unit of the KL passed to the controller."""

    min_coef: NonNegative = 0.0
    """Lower limit of the coefficient."""

    max_coef: Positive | None = None
    """Upper limit of the coefficient; null: none."""

    def problems(self, samples: int) -> Iterator[str]:
        if self.coef == 0:
            yield f"algo.kl.coef=0: must be above 0, since algo.kl.controller={self.controller} multiplies it"
        if not self.min_coef <= self.coef <= (math.inf if self.max_coef is None else self.max_coef):
            yield (
                f"algo.kl.coef={self.coef:g}: must lie between algo.kl.min_coef={self.min_coef:g} and "
                f"algo.kl.max_coef={short(self.max_coef)}"
            )
        if self.place == "none":
            yield (
                f"algo.kl.controller={self.controller}: changes a coefficient that algo.kl.place=none does "
                "not use; set algo.kl.place to reward or loss"
            )
        yield from super().problems(samples)


class AdaptiveKL(ControlledKL):
    """Proportional controller in log space (Ziegler et al. 2019)."""

    controller: Literal["adaptive"] = "adaptive"
    function = f"{_HERE}.controllers.AdaptiveKLController"
    takes = ("target", "horizon", "min_coef", "max_coef")
    horizon: Positive = 10000.0
    """Number of samples over which the controller changes the coefficient by at most about 20 %."""

    def problems(self, samples: int) -> Iterator[str]:
        yield from super().problems(samples)
        if self.horizon <= 0.2 * samples:
            yield (
                f"algo.kl.horizon={self.horizon:g}: one step of {samples} samples could take algo.kl.coef "
                f"to 0; must be above {0.2 * samples:g} (usual: 10000)"
            )


class ThresholdKL(ControlledKL):
    """Raises the coefficient by half above twice the target, and halves it below half of the target."""

    controller: Literal["threshold"] = "threshold"
    function = f"{_HERE}.controllers.ThresholdKLController"
    takes = ("target", "min_coef", "max_coef")

    def problems(self, samples: int) -> Iterator[str]:
        if self.min_coef == 0 or self.max_coef is None:
            yield (
                "algo.kl.controller=threshold: needs algo.kl.min_coef above 0 and algo.kl.max_coef (for "
                "example 1e-4 and 10), or repeated halving takes the coefficient to 0"
            )
        yield from super().problems(samples)
