"""Defines the algo section, all options of the algorithm.

A preset in conf/algo/ sets the keys in which it differs from the defaults.
"""

from typing import Literal

from ppo_ds.algorithm.credit.keys import AdvantageConfig, GAEConfig
from ppo_ds.algorithm.kl.keys import KLConfig
from ppo_ds.algorithm.loss.keys import LossConfig
from ppo_ds.algorithm.policy.keys import PolicyConfig
from ppo_ds.algorithm.rollout_is.keys import RolloutISConfig
from ppo_ds.config.types import Count, Natural, NonNegative, Number, Positive, Section


class ValueConfig(Section):
    """Value loss and positions of the values."""

    position: Literal["token", "prompt_last", "response_last"] | None = None
    """Position of the values; null: token, or prompt_last at algo.action_level=sequence."""

    clip: Positive | None = 0.2
    """Clip range around the old values; null: off."""

    half: bool = True
    """Multiplies the squared error by 1/2."""

    coef: NonNegative = 1.0
    """Coefficient of the value loss."""

    next_state: Literal["trained", "untrained", "ignored"] = "trained"
    """State after the response, to which reward_shaping.score_position=next_token adds the score. trained:
    its value is trained; untrained: its value is used but not trained; ignored: neither its value nor its
    score is used."""

    warmup_steps: Natural = 0
    """PPO steps at the start that train only the critic."""

    pretrain_rollouts: Natural = 0
    """Rollouts before the first step that train only the critic, with lambda 1."""


class PositiveNLLConfig(Section):
    """Negative log-likelihood of correct responses, added to the policy loss (VAPO)."""

    coef: NonNegative = 0.0
    """Coefficient of the loss; 0: off."""

    above: Number = 0.0
    """A response is correct if its score before shaping is above this number."""


class EntropyConfig(Section):
    """Entropy bonus."""

    coef: NonNegative = 0.0
    """Coefficient of the entropy bonus."""

    kind: Literal["exact", "sample"] = "exact"
    """exact: entropy of the whole distribution; sample: -log p of the sampled token."""


class RewardShapingConfig(Section):
    """Clipping, normalization, penalties and position of scores."""

    score_position: Literal["last_token", "next_token"] = "last_token"
    """Position to which the score is added: the last action, or the position after it (next_token)."""

    clip: Positive | None = 5.0
    """Clips scores to [-clip, clip]; null: off."""

    normalize: Literal["none", "running", "first"] = "none"
    """Normalizes scores, before the clip, by mean and standard deviation of all scores so far (running) or of
    the first rollout (first)."""

    normalize_std: bool = True
    """Divides by the standard deviation; false: only subtracts the mean."""

    missing_eos: Literal["subtract", "set", "scale"] | None = None
    """Penalty on the score of a response cut at the length limit; null: none."""

    missing_eos_value: Number = 1.0
    """The value to subtract, to set, or to scale by."""

    overlong_buffer: Positive | None = None
    """Tokens before the length limit over which a penalty grows (DAPO); a value below 1 is a share of the
    limit."""

    overlong_factor: NonNegative = 1.0
    """Overlong penalty at the length limit."""

    length_penalty: Number = 0.0
    """Penalty per token, subtracted from the score."""


class DynamicSamplingConfig(Section):
    """Resampling of prompts that give a group baseline no signal (DAPO)."""

    enabled: bool = False
    """Replaces prompts whose responses all have the same score (before penalties) by other prompts."""

    max_rounds: Count = 10
    """Largest number of generation rounds in a step; after it, prompts with equal scores fill the rollout."""


class PtxConfig(Section):
    """Language-modelling loss on the texts of data.ptx_path beside PPO's losses (InstructGPT)."""

    coef: NonNegative = 0.0
    """Coefficient of the PTX loss; 0: off."""

    batch_size: Count | None = None
    """Texts per optimizer step, over all ranks; null: algo.minibatch_size."""


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

    action_level: Literal["token", "sequence"] = "token"
    """Unit of an action: a token, or a whole response with one ratio and one advantage."""

    train_on_eos: bool | None = True
    """Treats the end token as an action; null: only if the end token is not the pad token (as in
    DeepSpeed-Chat)."""

    old_policy: Literal["rollout", "lagged"] = "rollout"
    """Policy of the old log-probs: the generating policy (rollout), or a copy that is up to algo.lag - 1
    steps old (lagged)."""

    old_logprobs: Literal["auto", "recompute", "rollout"] = "auto"
    """Source of the old log-probs: a forward of the actor (recompute), or the decode backend (rollout), which
    saves this forward; auto: rollout if the two sources agree up to rounding in fp32 and no other key of algo
    or critic needs the forward, else recompute."""

    lag: Count = 4
    """PPO steps between copies of the lagged policy; the first copy is made after lag - 1 steps."""

    aux_coef: NonNegative | None = 0.0
    """Coefficient of the load-balancing loss of a mixture of experts; null: the model's coefficient, or 0 for
    a model without experts."""

    epochs: Count = 2
    """Passes over one rollout."""

    target_kl: Positive | None = None
    """KL to the old policy at which the update ends, in nats per token (with algo.action_level=sequence: per
    response); null: off."""

    minibatch_size: Count | None = None
    """Samples per optimizer step, over all ranks; null: the whole rollout."""
