"""Defines the algo section, all options of the algorithm.

A preset in conf/algo/ sets the keys in which it differs from the defaults.
"""

from typing import Literal

from pydantic import Field

from ppo_ds.algorithm.credit.keys import AdvantageConfig, GAEConfig
from ppo_ds.algorithm.kl.keys import KLConfig
from ppo_ds.algorithm.loss.keys import LossConfig
from ppo_ds.algorithm.policy.keys import PolicyConfig
from ppo_ds.algorithm.rollout_is.keys import RolloutISConfig
from ppo_ds.config.types import Count, Natural, NonNegative, Number, Positive, Section


class ValueConfig(Section):
    """Value loss, and where values are taken."""

    position: Literal["token", "prompt_last", "response_last"] | None = Field(
        None, description="Position of the values; null: token, or prompt_last at algo.action_level=sequence."
    )
    clip: Positive | None = Field(0.2, description="Clip range around the old values; null: off.")
    half: bool = Field(True, description="Multiplies the squared error by 1/2.")
    coef: NonNegative = Field(1.0, description="Coefficient of the value loss.")
    next_state: Literal["trained", "untrained", "ignored"] = Field(
        "trained",
        description="State after the response, which gets the score at "
        "reward_shaping.score_position=next_token: its value is trained, only used, or ignored "
        "together with the score.",
    )
    warmup_steps: Natural = Field(0, description="PPO steps at the start that train only the critic.")
    pretrain_rollouts: Natural = Field(
        0, description="Rollouts before the first step that train only the critic, with lambda 1."
    )


class PositiveNLLConfig(Section):
    """Negative log-likelihood of correct responses, added to the policy loss (VAPO)."""

    coef: NonNegative = Field(0.0, description="Coefficient of the loss; 0: off.")
    above: Number = Field(
        0.0,
        description="A response is correct if its score, as the reward returned it, is above this number.",
    )


class EntropyConfig(Section):
    """Entropy bonus."""

    coef: NonNegative = Field(0.0, description="Coefficient of the entropy bonus.")
    kind: Literal["exact", "sample"] = Field(
        "exact", description="exact: entropy of the whole distribution; sample: -log p of the sampled token."
    )


class RewardShapingConfig(Section):
    """Clipping, normalization and penalties of scores, and the position that gets them."""

    score_position: Literal["last_token", "next_token"] = Field(
        "last_token", description="Position that gets the score: the last action, or one position after it."
    )
    clip: Positive | None = Field(5.0, description="Clips scores to [-clip, clip]; null: off.")
    normalize: Literal["none", "running", "first"] = Field(
        "none",
        description="Normalizes scores, before the clip, by the mean and standard deviation of all scores "
        "so far (running) or of the first rollout (first).",
    )
    normalize_std: bool = Field(
        True, description="Divides by the standard deviation; false: only subtracts the mean."
    )
    missing_eos: Literal["subtract", "set", "scale"] | None = Field(
        None, description="Penalty on the score of a response cut at the length limit; null: none."
    )
    missing_eos_value: Number = Field(1.0, description="The value to subtract, to set, or to scale by.")
    overlong_buffer: Positive | None = Field(
        None,
        description="Tokens before the limit over which a length penalty grows (DAPO); below 1: a share of "
        "the limit.",
    )
    overlong_factor: NonNegative = Field(1.0, description="Overlong penalty at the length limit.")
    length_penalty: Number = Field(0.0, description="Penalty per token, subtracted from the score.")


class DynamicSamplingConfig(Section):
    """Resamples prompts whose responses all have the same score, since they give a group baseline no signal
    (DAPO).

    The reward's own scores decide, before any penalty.
    """

    enabled: bool = Field(
        False, description="Replaces prompts whose responses all have the same score by others."
    )
    max_rounds: Count = Field(
        10,
        description="Rounds of generation in one step; after these, prompts with equal scores fill the rest "
        "of the rollout.",
    )


class PtxConfig(Section):
    """Language-modelling loss on the texts of data.ptx_path beside PPO's losses (InstructGPT)."""

    coef: NonNegative = Field(0.0, description="Coefficient of the PTX loss; 0: off.")
    batch_size: Count | None = Field(
        None, description="Texts per optimizer step, over all ranks; null: algo.minibatch_size."
    )


class AlgoConfig(Section):
    """Options of the algorithm; the presets in conf/algo/ (algo=NAME) set them."""

    kl: KLConfig
    gae: GAEConfig
    advantage: AdvantageConfig
    policy: PolicyConfig
    value: ValueConfig
    positive_nll: PositiveNLLConfig
    entropy: EntropyConfig
    loss: LossConfig
    reward_shaping: RewardShapingConfig
    rollout_is: RolloutISConfig
    dynamic_sampling: DynamicSamplingConfig
    ptx: PtxConfig
    action_level: Literal["token", "sequence"] = Field(
        "token",
        description="Unit of an action: a token, or a whole response with one ratio and one advantage.",
    )
    train_on_eos: bool | None = Field(
        True,
        description="Treats the end token as an action; null: only if it is not also the pad token (as in "
        "DeepSpeed-Chat).",
    )
    old_policy: Literal["rollout", "lagged"] = Field(
        "rollout",
        description="Policy of the old log-probs: the one that generated, or a copy from up to algo.lag "
        "steps ago.",
    )
    old_logprobs: Literal["recompute", "rollout"] = Field(
        "recompute",
        description="Source of the old log-probs: a forward of the actor, or the decode backend, which saves "
        "that forward; health.max_parity limits the difference.",
    )
    lag: Count = Field(
        4,
        description="PPO steps between two copies of the lagged policy, the first of which is made after "
        "lag - 1 steps, as in MiniMind.",
    )
    aux_coef: NonNegative | None = Field(
        0.0,
        description="Coefficient of a mixture of experts' load-balancing loss; null: the model's own, 0 "
        "without experts.",
    )
    epochs: Count = Field(2, description="Passes over one rollout.")
    target_kl: Positive | None = Field(
        None,
        description="Ends the passes once the policy is this far from the old one, in nats per token (or "
        "per response at algo.action_level=sequence); null: off.",
    )
    minibatch_size: Count | None = Field(
        None, description="Samples per optimizer step, over all ranks; null: the whole rollout."
    )
