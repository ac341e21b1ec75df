"""Defines the policy losses: the keys of algo.policy, their rules, and the dotted name of each function.

A policy loss is a function (PolicyTerms, section algo.policy) -> TokenLoss, see surrogate.py. To add one,
write its function in any importable module, and its class here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt, Lt

from ppo_ds.config.text import short
from ppo_ds.config.types import NonNegative, Number, OneOf, Positive, Variants

POLICY_LOSSES: dict[str, type[PolicyConfig]] = {}
_HERE = "ppo_ds.algorithm.policy"


class PolicyConfig(Variants):
    """Policy loss."""

    tag = "loss"
    variants = POLICY_LOSSES
    code = "function"
    interface = (("PolicyTerms", "section"), "TokenLoss")
    function: ClassVar[str]  # dotted name of the loss
    # Unit of the ratio passed to the loss: token, sequence or sequence_mean; None: algo.action_level
    ratio: ClassVar[str | None] = None
    # True if the loss determines the ratio itself, so that algo.action_level must be token
    own_ratio: ClassVar[bool] = False
    # True if the tokens of a response share one ratio, whose gradient also reaches tokens of weight 0
    response_ratio: ClassVar[bool] = False
    # At action_level=sequence: True if the loss of a response is the sum over its tokens, False if each token
    # has the loss of the whole response.
    sums_over_tokens: ClassVar[bool] = True
    # Dotted name of a function that returns the mask ``PolicyTerms.selected`` [B,T]. Called as (log-probs
    # before the update, advantages, mask, torch.Generator, section) with all rows of an optimizer step
    selection: ClassVar[str | None] = None

    loss: Annotated[str, OneOf(POLICY_LOSSES)] = "ppo"
    """Policy loss, or package.module.name of your own."""

    off_policy_limit: Positive | None = None
    """Excludes tokens with a negative advantage in responses whose mean log(sampling / current policy)
    exceeds this value, in nats (DeepSeek-V3.2); null: off."""

    top_entropy: Annotated[Number, Gt(0), Lt(1)] | None = None
    """Share of the tokens that have a policy loss: those with the highest entropy; null: all."""

    def problems(self, action_level: str) -> Iterator[str]:
        """Yields an error line for each conflict between the keys."""
        if self.top_entropy is not None and action_level == "sequence":
            yield (
                f"algo.policy.top_entropy={self.top_entropy:g}: selects tokens, so algo.action_level must be "
                "token"
            )
        if self.top_entropy is not None and self.response_ratio:
            yield (
                f"algo.policy.top_entropy={self.top_entropy:g}: selects tokens, but algo.policy.loss="
                f"{self.loss} has one ratio per response, whose gradient reaches all of its tokens; set it "
                "to null"
            )
        if self.own_ratio and action_level == "sequence":
            yield (
                f"algo.policy.loss={self.loss}: determines the ratio itself, so algo.action_level must be "
                "token"
            )


class Clipped(PolicyConfig):
    """A loss that clips the ratio."""

    clip_low: Positive | None = 0.2
    """Lower clip range, below 1: the ratio is at least 1 - clip_low (gmpo: exp(-clip_low), any number); null
    or 1: no lower bound, for cispo and clip_cov only."""

    clip_high: Positive | None = None
    """Upper clip range; null: algo.policy.clip_low."""

    def problems(self, action_level: str) -> Iterator[str]:
        if reason := self.wrong_lower_bound():
            yield f"algo.policy.clip_low={short(self.clip_low)}: must be {reason}"
        yield from super().problems(action_level)

    def wrong_lower_bound(self) -> str | None:
        """Describes the valid values of clip_low; returns None if its value is valid for the loss."""
        if self.clip_low is not None and self.clip_low < 1:
            return None
        exempt = [name for name, other in self.variants.items() if issubclass(other, MayLackLowerBound)]
        return (
            f"above 0 and below 1, so set it, often to 0.2; only {' and '.join(exempt)} can do without a "
            f"lower bound of the ratio (algo.policy.loss is {self.loss})"
        )


class MayLackLowerBound(Clipped):
    """A loss that clips the ratio and also works without a lower bound (clip_low null or 1)."""

    def problems(self, action_level: str) -> Iterator[str]:
        yield from super().problems(action_level)
        if self.clip_low is None and self.clip_high is None:
            yield "algo.policy.clip_high=null: must be a number if algo.policy.clip_low is null (often 4)"

    def wrong_lower_bound(self) -> str | None:
        if self.clip_low is None or self.clip_low <= 1:
            return None
        return "above 0 and at most 1, since the ratio is positive; 1 and null are no lower bound"


class DualClipped(Clipped):
    """A clipped surrogate with an optional bound of the loss for negative advantages."""

    dual_clip: Annotated[Number, Gt(1)] | None = None
    """Limits the loss for negative advantages to dual_clip x |advantage| (dual-clip PPO); null: off."""


class PPO(DualClipped):
    """Clipped surrogate (Schulman et al. 2017), with an optional dual clip."""

    loss: Literal["ppo"] = "ppo"
    function = f"{_HERE}.losses.ppo"
    sums_over_tokens = False


class GSPO(DualClipped):
    """Clipped surrogate with one ratio per response, the geometric mean over tokens (Zheng et al. 2025)."""

    loss: Literal["gspo"] = "gspo"
    function = f"{_HERE}.losses.ppo"
    ratio = "sequence_mean"
    own_ratio = True
    response_ratio = True


class CISPO(MayLackLowerBound):
    """Advantage times log-probability times the clipped ratio, which gets no gradient (MiniMax 2025)."""

    loss: Literal["cispo"] = "cispo"
    function = f"{_HERE}.losses.cispo"


class REINFORCE(PolicyConfig):
    """Advantage times log-probability, without a ratio."""

    loss: Literal["reinforce"] = "reinforce"
    function = f"{_HERE}.losses.reinforce"


class SAPO(PolicyConfig):
    """Advantage times a smooth gate of the ratio in place of the clip (Gao et al. 2025)."""

    loss: Literal["sapo"] = "sapo"
    function = f"{_HERE}.losses.sapo"
    sums_over_tokens = False
    tau_pos: Positive = 1.0
    """Temperature of sapo's gate for positive advantages."""

    tau_neg: Positive = 1.05
    """Temperature of sapo's gate for other advantages; a larger one cuts off earlier."""


class DPPO(PolicyConfig):
    """A loss without the tokens whose probability has moved too far from that under the old policy."""

    own_ratio = True
    delta: Positive | None = None
    """Distance from the old policy beyond which a token is masked; null: 0.15 in probability (dppo_tv) or
    0.05 nats (dppo_kl)."""


class DPPOTV(DPPO):
    """Advantage times ratio, masked where the token's probability moved too far (Qi et al. 2026)."""

    loss: Literal["dppo_tv"] = "dppo_tv"
    function = f"{_HERE}.losses.dppo_tv"


class DPPOKL(DPPO):
    """Advantage times ratio, masked where the token's KL(old || new) is too large (Qi et al. 2026)."""

    loss: Literal["dppo_kl"] = "dppo_kl"
    function = f"{_HERE}.losses.dppo_kl"


class GMPO(Clipped):
    """Advantage times the geometric mean of a response's clipped ratios (Zhao et al. 2025)."""

    loss: Literal["gmpo"] = "gmpo"
    function = f"{_HERE}.losses.gmpo"
    own_ratio = True
    response_ratio = True

    def wrong_lower_bound(self) -> str | None:
        if self.clip_low is not None:
            return None
        return "a number, a limit of the log-ratio with algo.policy.loss=gmpo; set it to 0.4"


class Covariance(PolicyConfig):
    """A loss that treats a few tokens with a high covariance of log-prob and advantage differently."""

    own_ratio = True
    cov_frac: Annotated[Number, Gt(0), Lt(1)] | None = None
    """Share of the tokens to select; null: 0.0002 (clip_cov) or 0.002 (kl_cov)."""


class ClipCov(Covariance, MayLackLowerBound):
    """Clipped surrogate without a few random tokens with a high covariance (Cui et al. 2025)."""

    loss: Literal["clip_cov"] = "clip_cov"
    function = f"{_HERE}.losses.clip_cov"
    selection = f"{_HERE}.selection.clip_cov_tokens"
    cov_low: Number = 1.0
    """Minimum covariance of the tokens that clip_cov selects."""

    cov_high: Number = 5.0
    """Maximum covariance of the tokens that clip_cov selects."""

    def problems(self, action_level: str) -> Iterator[str]:
        yield from super().problems(action_level)
        if self.cov_low >= self.cov_high:
            yield (
                f"algo.policy.cov_low={self.cov_low:g}: must be below algo.policy.cov_high={self.cov_high:g}"
            )


class KLCov(Covariance):
    """Advantage times ratio, with a KL penalty on the tokens of the highest covariance (Cui et al. 2025)."""

    loss: Literal["kl_cov"] = "kl_cov"
    function = f"{_HERE}.losses.kl_cov"
    selection = f"{_HERE}.selection.kl_cov_tokens"
    kl_cov_coef: NonNegative = 1.0
    """Coefficient of kl_cov's penalty."""
