"""Determines from the config alone which forwards of a PPO step are used for more than one purpose."""

from __future__ import annotations

from ppo_ds.config.schema import PPOConfig, has_critic, rollout_size
from ppo_ds.ppo.model_outputs import OldLogprobs


def old_logprobs_source(config: PPOConfig) -> OldLogprobs:
    """Returns the source of the old log-probs (see OldLogprobs); that of recompute for auto.

    With algo.old_logprobs=rollout, it is the decode backend. Otherwise, the forward of the update computes
    them if one optimizer step uses the whole rollout, the old policy does not lag, and nothing before the
    update needs the log-probs: there is no KL in the reward, no importance weight for the decode backend, no
    value head on the actor, no step with only the critic, and no selection of tokens.
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
    """Returns the models whose forwards before the update are reused in the update.

    There are none with several optimizer steps per rollout, or with sequence parallelism, because ranks then
    have other rows in the update. With memory.reuse_forwards=auto this is at most the actor: its backward is
    the first of the update, so peak memory stays the same. Reusing the critic's forward increases the peak:
    the critic's gradients, or its graph, are then in memory during the actor's backward.

    A model is excluded if its weights may run another forward between a forward and its backward: with LoRA,
    a reference or reward model may be this model without adapters, and a lagged policy runs in the actor's
    engine. PTX losses exclude the actor because they come first in the update, algo.policy.top_entropy
    because it needs entropies before the update. The actor also needs a forward before the update.
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
