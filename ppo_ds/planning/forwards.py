"""Determines which forwards of a PPO step also serve for something else, from the config alone."""

from __future__ import annotations

from ppo_ds.config.schema import PPOConfig, has_critic, rollout_size
from ppo_ds.ppo.model_outputs import OldLogprobs


def old_logprobs_source(config: PPOConfig) -> OldLogprobs:
    """Returns which computation gives the old log-probs, see ModelForwards.

    The forward of the update computes them if one optimizer step uses the whole rollout, the old policy does
    not lag, and nothing before the update needs the log-probs: there is no KL in the reward, no importance
    weight for the decode backend, no value head on the actor, no step in which only the critic learns, and no
    selection of tokens.
    """
    algo = config.algo
    if algo.old_logprobs == "rollout":
        return "rollout"
    needed_before = (
        algo.kl.place == "reward"
        or algo.rollout_is.kind != "none"
        or config.critic.share_trunk
        or algo.value.warmup_steps > 0
        or algo.policy.top_entropy is not None
        or algo.policy.selection is not None
    )
    one_step = one_optimizer_step(config)
    return "update" if one_step and algo.old_policy == "rollout" and not needed_before else "forward"


def one_optimizer_step(config: PPOConfig) -> bool:
    """Returns whether one optimizer step uses the whole rollout."""
    size = rollout_size(config)
    return config.algo.epochs == 1 and (config.algo.minibatch_size or size) == size


def kept_roles(config: PPOConfig) -> tuple[str, ...]:
    """Returns the models whose forwards before the update also serve for the update.

    With memory.reuse_forwards=auto this is at most the actor, whose backward is the first of the update, so
    that peak memory stays the same. The critic's graph adds to it: its gradients, or the graph itself, are
    then in memory during the actor's backward.

    Other forwards of the same weights between a forward and its backward exclude a model: those of the
    reference or the reward model that is the same model without its adapters, and of the lagged policy. PTX
    losses come first in the update. Log-probs and entropies for the selection of tokens need other options.
    Ranks that divide tokens have other rows in the update.
    """
    algo, reuse = config.algo, config.memory.reuse_forwards
    if reuse == "off" or not one_optimizer_step(config) or config.memory.sequence_parallel > 1:
        return ()
    excluded = (
        algo.old_policy == "lagged"
        or config.actor.lora.rank > 0
        or algo.ptx.coef > 0
        or algo.policy.top_entropy is not None
    )
    actor = old_logprobs_source(config) == "forward" and not excluded
    critic = reuse == "all" and has_critic(config) and config.critic.lora.rank == 0
    return tuple(name for name, kept in (("actor", actor), ("critic", critic)) if kept)
