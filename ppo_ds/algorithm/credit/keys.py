"""Defines the advantage estimators: the keys of algo.advantage and algo.gae, and the name of each function.

An estimator is a function (Responses, CreditOptions) -> Estimate, see responses.py. To add one, write its
function in any importable module, and its class here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from ppo_ds.config.text import short
from ppo_ds.config.types import Fraction, OneOf, Positive, Section, Variants

if TYPE_CHECKING:
    from ppo_ds.config.sections.algo import AlgoConfig

ADVANTAGE_ESTIMATORS: dict[str, type[AdvantageConfig]] = {}
_HERE = "ppo_ds.algorithm.credit"


class GAEConfig(Section):
    """Generalized advantage estimation."""

    gamma: Fraction = 1.0
    """Discount factor."""

    lam: Fraction = 0.95
    """Lambda of the advantages."""

    lam_critic: Fraction | None = None
    """Lambda of the returns; null: algo.gae.lam."""

    length_alpha: Positive | None = None
    """Alpha of VAPO's lambda of the advantages, 1 - 1 / (alpha x length of the response), at least 0; null:
    algo.gae.lam."""

    bootstrap_truncated: bool = False
    """Bootstraps responses cut at the length limit with the value of the last state instead of 0."""


class AdvantageConfig(Variants):
    """Advantage estimator and whitening."""

    tag = "estimator"
    variants = ADVANTAGE_ESTIMATORS
    code = "function"
    interface = (("Responses", "CreditOptions"), "Estimate")
    function: ClassVar[str]  # dotted name of the estimator
    needs_critic: ClassVar[bool] = False
    needs_group: ClassVar[bool] = False  # two or more responses per prompt
    # requires needs_group; uses the scores of the parts of reward=weighted instead of the total score
    needs_parts: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = False  # the score of a greedy response to each prompt
    divides_by_std: ClassVar[bool] = False  # whitening would divide by a std a second time
    why: ClassVar[str] = ""  # a relative clause with the reason for ``excluded``

    estimator: Annotated[str, OneOf(ADVANTAGE_ESTIMATORS)] = "gae"
    """Advantage estimator, or package.module.name of your own."""

    whiten: Literal["batch", "none", "group", "minibatch"] = "batch"
    """Whitens advantages under the mask, over all ranks, per rollout (batch) or optimizer step (minibatch);
    group: over the responses to one prompt."""

    unbiased: bool = False
    """Divides by n - 1 in the variance."""

    @property
    def gives_token_returns(self) -> bool:
        """True if each token has its own return; then algo.action_level must be "token"."""
        return not (self.needs_critic or self.needs_group)

    def problems(self, algo: AlgoConfig) -> Iterator[str]:
        """Yields an error line for each key of ``algo`` that conflicts with the estimator."""
        chosen = f"algo.advantage.estimator={self.estimator}"
        if self.gives_token_returns and algo.action_level != "token":
            yield f"{chosen}: gives each token its own return, so algo.action_level must be token"
        for key, value, off in self.excluded(algo):
            line = f"algo.{key}={short(value)}: cannot be combined with {chosen}"
            yield f"{line}, {self.why}; set it to {off}"

    def excluded(self, algo: AlgoConfig) -> Iterator[tuple[str, Any, str]]:
        """Yields (key, value, value to set instead) of each conflicting setting of ``algo``."""
        yield from ()


def changes_of_scores(algo: AlgoConfig) -> Iterator[tuple[str, Any, str]]:
    """Yields (key, value, value to set instead) of each setting of ``algo`` that changes scores."""
    shaping = algo.reward_shaping
    settings: list[tuple[str, Any, Any, str]] = [
        ("kl.place", algo.kl.place if algo.kl.place == "reward" else None, None, "loss or none"),
        ("reward_shaping.clip", shaping.clip, None, "null"),
        ("reward_shaping.normalize", shaping.normalize, "none", "none"),
        ("reward_shaping.missing_eos", shaping.missing_eos, None, "null"),
        ("reward_shaping.overlong_buffer", shaping.overlong_buffer, None, "null"),
        ("reward_shaping.length_penalty", shaping.length_penalty, 0, "0"),
    ]
    return ((key, value, remedy) for key, value, off, remedy in settings if value != off)


class GAE(AdvantageConfig):
    """Generalized advantage estimation with a critic (Schulman et al. 2016); at action_level=sequence,
    score - V.
    """

    estimator: Literal["gae"] = "gae"
    function = f"{_HERE}.gae.gae"
    needs_critic = True


class Reinforce(AdvantageConfig):
    """Discounted sum of future rewards, without a baseline."""

    estimator: Literal["reinforce"] = "reinforce"
    function = f"{_HERE}.returns.reinforce"


class ReMax(AdvantageConfig):
    """Discounted sum of future rewards minus the score of a greedy response (Li et al. 2024)."""

    estimator: Literal["remax"] = "remax"
    function = f"{_HERE}.returns.remax"
    needs_greedy = True
    why = "which compares a response with the greedy one"

    def excluded(self, algo: AlgoConfig) -> Iterator[tuple[str, Any, str]]:
        if algo.dynamic_sampling.enabled:
            yield "dynamic_sampling.enabled", True, "false"


class RLOO(AdvantageConfig):
    """Score minus the mean score of the other responses to the prompt (Ahmadian et al. 2024)."""

    estimator: Literal["rloo"] = "rloo"
    function = f"{_HERE}.groups.rloo"
    needs_group = True


class GRPO(AdvantageConfig):
    """Score minus the group's mean, divided by its standard deviation (Shao et al. 2024)."""

    estimator: Literal["grpo"] = "grpo"
    function = f"{_HERE}.groups.grpo"
    needs_group = divides_by_std = True


class DrGRPO(AdvantageConfig):
    """Score minus the group's mean (Liu et al. 2025)."""

    estimator: Literal["dr_grpo"] = "dr_grpo"
    function = f"{_HERE}.groups.dr_grpo"
    needs_group = True


class LitePPO(AdvantageConfig):
    """Score minus the group's mean, divided by the standard deviation of all scores (Lite PPO, arXiv
    2508.08221).
    """

    estimator: Literal["lite_ppo"] = "lite_ppo"
    function = f"{_HERE}.groups.lite_ppo"
    needs_group = divides_by_std = True


class MaxRL(AdvantageConfig):
    """Score minus the group's mean, divided by this mean (Tajwar et al. 2026)."""

    estimator: Literal["maxrl"] = "maxrl"
    function = f"{_HERE}.groups.maxrl"
    needs_group = True
    why = "which divides by the mean score of a group, and this can make it 0 or negative"

    def excluded(self, algo: AlgoConfig) -> Iterator[tuple[str, Any, str]]:
        shaping = algo.reward_shaping
        sign = 1 if shaping.missing_eos == "subtract" else -1
        harmless = {
            "reward_shaping.clip": True,
            "reward_shaping.missing_eos": sign * shaping.missing_eos_value <= 0,
            "reward_shaping.overlong_buffer": shaping.overlong_factor == 0,
            "reward_shaping.length_penalty": shaping.length_penalty < 0,
        }
        return (setting for setting in changes_of_scores(algo) if not harmless.get(setting[0]))


class GDPO(AdvantageConfig):
    """Several rewards, each normalized within the group as in grpo; their weighted sum is normalized over the
    rollout (arXiv 2601.05242).
    """

    estimator: Literal["gdpo"] = "gdpo"
    function = f"{_HERE}.groups.gdpo"
    needs_group = needs_parts = divides_by_std = True
    why = "which uses the parts of the reward, not its total score"

    def excluded(self, algo: AlgoConfig) -> Iterator[tuple[str, Any, str]]:
        yield from changes_of_scores(algo)
        if algo.dynamic_sampling.enabled:
            yield "dynamic_sampling.enabled", True, "false"


class OPO(AdvantageConfig):
    """Score minus the group's mean, in which a response's weight is its length (Hao et al. 2025)."""

    estimator: Literal["opo"] = "opo"
    function = f"{_HERE}.groups.opo"
    needs_group = True
