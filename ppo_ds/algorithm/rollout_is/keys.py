"""Defines the importance weights for the decode backend: the keys of algo.rollout_is, and their functions.

A function gets (log w [B,T], mask, section) and returns the weights and the ratio to which the bounds apply,
see weights.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from ppo_ds.config.types import NonNegative, OneOf, Positive, Variants

WEIGHTS: dict[str, type[RolloutISConfig]] = {}
_HERE = "ppo_ds.algorithm.rollout_is.weights"


class RolloutISConfig(Variants):
    """Importance weights for a decode backend whose log-probs differ from the training engine's."""

    tag = "kind"
    variants = WEIGHTS

    kind: Annotated[str, OneOf(WEIGHTS)] = "none"
    """Kind of the importance weights."""


class NoWeights(RolloutISConfig):
    """Corrects nothing."""

    kind: Literal["none"] = "none"


class Bounded(RolloutISConfig):
    """Importance weights with bounds."""

    function: ClassVar[str]  # dotted name

    low: NonNegative = 0.5
    """Lower limit of the weights."""

    high: Positive = 2.0
    """Upper limit of the weights."""

    @property
    def unit(self) -> str:
        """The unit of a weight: token, sequence or sequence_mean."""
        return "token"

    def problems(self) -> Iterator[str]:
        """Yields an error line if the lower bound is above the upper bound."""
        if self.low > self.high:
            yield f"algo.rollout_is.low={self.low:g}: must be at most algo.rollout_is.high={self.high:g}"


class TIS(Bounded):
    """Weights of tokens, limited to [low, high]."""

    kind: Literal["tis"] = "tis"
    function = f"{_HERE}.truncate"


class IcePop(Bounded):
    """Weights of tokens, 0 outside of [low, high]."""

    kind: Literal["icepop"] = "icepop"
    function = f"{_HERE}.mask_outside"


class SeqMaskTIS(Bounded):
    """Weights of tokens, 0 in responses whose geometric mean of weights is outside of [low, high]."""

    kind: Literal["seq_mask_tis"] = "seq_mask_tis"
    function = f"{_HERE}.sequence_mask_tis"


class Leveled(Bounded):
    """Importance weights of tokens or of responses."""

    level: Literal["token", "sequence", "sequence_mean"] = "token"
    """Unit of a weight: a token, or a response with the product (sequence) or the geometric mean
    (sequence_mean) of its tokens' weights."""

    @property
    def unit(self) -> str:
        return self.level


class Truncate(Leveled):
    """One weight per token or sequence (see level), limited to [low, high]."""

    kind: Literal["truncate"] = "truncate"
    function = f"{_HERE}.truncate"


class Mask(Leveled):
    """Weights per unit of algo.rollout_is.level, 0 outside of [low, high]."""

    kind: Literal["mask"] = "mask"
    function = f"{_HERE}.mask_outside"
