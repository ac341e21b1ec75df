"""The formulas of ppo_ds/algorithm, by the name that a config gives them and on plain tensors.

The goldens, the peers' cases and the properties are tables of names and tensors. These functions turn them
into calls of the functions that the trainer calls.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ppo_ds.algorithm.credit import gae, groups, positions
from ppo_ds.algorithm.credit.responses import CreditOptions, Responses
from ppo_ds.algorithm.credit.returns import reinforce, remax
from ppo_ds.algorithm.credit.whitening import Whitening
from ppo_ds.algorithm.kl.keys import KL_ESTIMATORS
from ppo_ds.algorithm.loss import aggregation
from ppo_ds.algorithm.loss.keys import LOSS_AGGREGATIONS
from ppo_ds.algorithm.policy.keys import POLICY_LOSSES, PolicyConfig
from ppo_ds.algorithm.policy.surrogate import surrogate_loss
from ppo_ds.algorithm.rollout_is import weights
from ppo_ds.algorithm.rollout_is.keys import WEIGHTS
from ppo_ds.algorithm.shaping.scores import ScoreShaper
from ppo_ds.algorithm.value import loss as value
from ppo_ds.compute.linear_logprobs import linear_statistics
from ppo_ds.config.registry import import_target
from ppo_ds.config.sections.algo import GAEConfig, RewardShapingConfig
from ppo_ds.ops.logprobs import logprobs_and_entropy_from_logits
from ppo_ds.ops.masked import keep, masked_whiten
from ppo_ds.ops.moments import RunningMoments
from tests.ppo.conftest import run_ranks


def agg_of(name: Any) -> aggregation.Aggregation:
    return import_target(LOSS_AGGREGATIONS[name].function) if isinstance(name, str) else name


def aggregate(loss, mask, mode="token_mean", totals=None):
    return aggregation.aggregate(loss, mask, agg_of(mode), totals)


def approx_kl(logprobs, ref_logprobs, estimator="k1", clamp=None):
    return import_target(KL_ESTIMATORS[estimator].target)(logprobs, ref_logprobs, clamp)


def kl_loss(logprobs, ref_logprobs, mask, estimator="k2", agg="token_mean", totals=None, clamp=None):
    kl = approx_kl(keep(logprobs, mask), keep(ref_logprobs, mask), estimator, clamp)
    return aggregate(kl, mask, agg, totals)


def entropy_loss(entropy, mask, agg="token_mean", totals=None):
    return aggregate(entropy, mask, agg, totals)


def policy_loss(
    logprobs, old, advantages, mask, *, kind="ppo", ratio="token", agg="token_mean", **options: Any
):
    """Computes a policy loss; ``options`` are those of surrogate_loss and keys of algo.policy."""
    variant = POLICY_LOSSES[kind]
    given = {key: options.pop(key) for key in list(options) if key in PolicyConfig.all_fields()}
    keys = {key: given[key] for key in given if key in variant.model_fields}
    if kind == "gmpo":
        keys = {"clip_low": 0.4} | keys
    return surrogate_loss(
        import_target(variant.function),
        variant(**keys),
        logprobs,
        old,
        advantages,
        mask,
        ratio=variant.ratio or ratio,
        agg=agg_of(agg),
        **options,
    )


def sapo_loss(*args, **options):
    return policy_loss(*args, kind="sapo", **options)


def gmpo_loss(*args, **options):
    return policy_loss(*args, kind="gmpo", **options)


def dppo_loss(*args, divergence, **options):
    return policy_loss(*args, kind=f"dppo_{divergence}", **options)


def clip_cov_loss(*args, **options):
    return policy_loss(*args, kind="clip_cov", **options)


def kl_cov_loss(*args, **options):
    return policy_loss(*args, kind="kl_cov", **options)


def value_loss(values, old_values, returns, mask, *, clip=None, half=True, agg="token_mean", totals=None):
    return value.value_loss(
        values, old_values, returns, mask, clip=clip, half=half, agg=agg_of(agg), totals=totals
    )


def rollout_is_weights(old, rollout, mask, kind, low, high, level="token"):
    return weights.rollout_is_weights(old, rollout, mask, is_section(kind, level, low=low, high=high))[0]


def is_section(kind, level, **bounds):
    """Makes the section algo.rollout_is; only some kinds have a level."""
    levels = {"level": level} if "level" in WEIGHTS[kind].model_fields else {}
    return WEIGHTS[kind](**levels, **bounds)


def bounded_is_ratio(old, rollout, mask, kind, level="token"):
    return weights.rollout_is_weights(old, rollout, mask, is_section(kind, level))[1]


# -- credit --------------------------------------------------------------------------------------------------


def responses(rewards: Tensor, states: Tensor, **columns: Any) -> Responses:
    """Makes the responses of an estimator; without ``mask``, all states but the last are actions."""
    given = {
        "scores": rewards.sum(1),
        "mask": states[:, :-1].bool(),
        "trained": states,
        "groups": torch.arange(len(rewards)),
        "lengths": states[:, :-1].sum(1).long(),
        "finished": torch.ones(len(rewards), dtype=torch.bool),
    }
    return Responses(rewards=rewards, states=states, **given | columns)


def options_of(**gae_keys: Any) -> CreditOptions:
    return CreditOptions(gae=GAEConfig(**gae_keys))


def with_last_state(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, 1))


def of_rewards(estimator, rewards: Tensor, mask: Tensor, gamma: float = 1.0, **columns: Any) -> Tensor:
    """Computes the advantages [B,T] of an estimator of returns from rewards [B,T]."""
    given = responses(with_last_state(rewards), with_last_state(mask.bool()), **columns)
    return estimator(given, options_of(gamma=gamma)).advantages


def reinforce_pp_advantages(rewards, mask, gamma=1.0):
    """Computes REINFORCE++ advantages (Hu 2025) and returns: whitened (unbiased), discounted returns."""
    returns = of_rewards(reinforce, rewards, mask, gamma)
    return masked_whiten(returns, mask), returns


def remax_advantages(rewards, mask, gamma=1.0, *, baselines):
    return of_rewards(remax, rewards, mask, gamma, baselines=baselines)


def group_advantages(scores, group_ids, kind, eps=groups.EPS, lengths=None, singleton="none", reduce=None):
    """Computes an advantage [B] for each score [B]; ``lengths`` [B] are the numbers of actions.

    A config refuses single responses, so lone scores are set apart as verl ("score") and NeMo ("zero") treat
    them.
    """
    if kind == "none":
        return scores
    actions = torch.ones(len(scores), dtype=torch.long) if lengths is None else lengths.long()
    mask = torch.arange(max(actions.tolist(), default=1)) < actions[:, None]
    totals = with_last_state(torch.zeros(mask.shape, dtype=scores.dtype))
    totals[:, 0] = scores
    given = responses(totals, with_last_state(mask), scores=scores, groups=group_ids, mask=mask)
    options = CreditOptions(gae=GAEConfig(), reduce=reduce)
    with patch.object(groups, "EPS", eps):
        made = getattr(groups, "dr_grpo" if kind == "mean" else kind)(given, options).advantages[:, 0]
    _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
    alone = counts[index] == 1
    if singleton == "none":
        assert not alone.any(), "a prompt with one response has no baseline"
        return made
    return torch.where(alone, scores if singleton == "score" else torch.zeros_like(made), made)


def gdpo_advantages(scores, group_ids, part_weights, reduce=None):
    """Computes GDPO advantages [B] from the parts of the scores [B,K]."""
    mask = torch.ones(len(scores), 1, dtype=torch.bool)
    given = responses(
        with_last_state(scores.sum(1)[:, None]),
        with_last_state(mask),
        groups=group_ids,
        components=tuple({str(k): float(x) for k, x in enumerate(row)} for row in scores),
    )
    named = {str(k): float(weight) for k, weight in enumerate(part_weights)}
    made = groups.gdpo(given, CreditOptions(gae=GAEConfig(), part_weights=named, reduce=reduce))
    return made.advantages[:, 0]


def one_step_advantages(scores, values):
    """Computes advantages and returns [B] of whole responses from their scores and values [B]."""
    rewards = with_last_state(scores[:, None])
    states = with_last_state(torch.ones(len(scores), 1, dtype=torch.bool))
    options = CreditOptions(gae=GAEConfig(), action_level="sequence", value_position="prompt_last")
    made = gae.gae(responses(rewards, states, values=with_last_state(values[:, None])), options)
    return made.advantages[:, 0], made.returns[:, 0]


def normalize_advantages(advantages, mask, mode="batch", unbiased=False, reduce=None):
    assert mode == "batch"
    return Whitening("batch", unbiased, "token").whiten(advantages, mask, reduce)


# -- shaping -------------------------------------------------------------------------------------------------


def shape_scores(scores, finished=None, lengths=None, max_new_tokens=None, moments=None, **keys: Any):
    """Shapes scores [B]; ``keys`` are those of algo.reward_shaping, all of them off if they are not given."""
    scores = torch.as_tensor(scores)
    ended = torch.ones(len(scores), dtype=torch.bool) if finished is None else finished.bool()
    actions = torch.zeros(len(scores), dtype=torch.long) if lengths is None else lengths
    limits = torch.as_tensor(1 if max_new_tokens is None else max_new_tokens).expand(len(scores))
    rollout = SimpleNamespace(
        scores=scores, finished=ended, response_lengths=actions, generated_lengths=actions, limits=limits
    )
    section = RewardShapingConfig(**{"clip": None} | keys)
    shaper = ScoreShaper(section, None, RunningMoments() if moments is None else moments)
    return shaper(rollout, update=False)[0]


def token_rewards(scores, mask, kl=None, kl_coef=0.0, place="last_token", token_scores=None):
    penalty = None if kl is None else kl_coef * kl
    return positions.token_rewards(scores, mask, penalty, place, token_scores)


def linear_logprobs_and_entropy(*args, with_entropy=True, **options):
    return linear_statistics(*args, with_entropy=with_entropy, **options)[:2]


def logprobs_from_logits(logits, labels, temperature=1.0, chunk_size=1024):
    return logprobs_and_entropy_from_logits(logits, labels, temperature, chunk_size, with_entropy=False)[0]


def entropy_from_logits(logits, temperature=1.0, chunk_size=1024):
    labels = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return logprobs_and_entropy_from_logits(logits, labels, temperature, chunk_size)[1]


def on_ranks(size, work):
    """Runs work(rank, reduce) on each of ``size`` ranks, which are threads, and returns the results."""
    return run_ranks(size, lambda world: work(world.rank, world.sum))
