"""Determines from the config alone which forwards of a PPO step are used for more than one purpose."""

from __future__ import annotations

from ppo_ds.config.schema import PPOConfig, has_critic, rollout_size
from ppo_ds.config.types import replace
from ppo_ds.ppo.model_outputs import OldLogprobs


def old_logprobs_source(config: PPOConfig) -> OldLogprobs:
    """Returns "rollout", "update" or "forward", the source of the old log-probs; auto counts as recompute.

    With algo.old_logprobs=rollout, the decode backend computes them; otherwise a forward before the update.
    The update's own forward suffices if one optimizer step uses the whole rollout, the old policy does not
    lag, and nothing needs the log-probs before the update. These need them: a KL in the reward, importance
    weights for the decode backend, a value head on the actor, warm-up steps that train only the critic, and
    policy losses on selected tokens.
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


def with_sources(config: PPOConfig) -> list[PPOConfig]:
    """Returns the configs that may replace one with algo.old_logprobs=auto.

    One has recompute; in fp32, another has rollout. The run continues with one of them
    (assemble/generator.py). A config without auto is returned alone and unchanged.
    """
    if config.algo.old_logprobs != "auto":
        return [config]
    names = ["recompute", "rollout"] if config.actor.model.dtype == "fp32" else ["recompute"]
    return [replace(config, algo=replace(config.algo, old_logprobs=name)) for name in names]


def one_optimizer_step(config: PPOConfig) -> bool:
    """Returns whether one optimizer step uses the whole rollout."""
    size = rollout_size(config)
    return config.algo.epochs == 1 and (config.algo.minibatch_size or size) == size


def kept_roles(config: PPOConfig) -> tuple[str, ...]:
    """Returns the models whose forwards before the update are reused in the update.

    There are none with several optimizer steps per rollout, and none with sequence parallelism, because ranks
    then have other rows in the update. With memory.reuse_forwards=auto, at most the last model that runs
    before the update is returned: the actor, or the critic if the actor does not run. The backward of this
    model is the first of the update, so the kept graph does not increase peak memory. If the critic comes
    first, its gradients are in memory during the actor's backward. With memory.reuse_forwards=all, both
    graphs may be in memory.

    A model is excluded if its engine may run another forward between the kept forward and its backward: with
    LoRA, a reference or reward model may be this model without adapters, and a lagged policy runs in the
    actor's engine. The actor is also excluded in three cases: it runs no forward before the update; PTX
    losses come first in the update; algo.policy.top_entropy needs entropies before the update.
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
    actor_runs = old_logprobs_source(config) == "forward"
    actor = actor_runs and not excluded
    critic = has_critic(config) and config.critic.lora.rank == 0 and (reuse == "all" or not actor_runs)
    return tuple(name for name, kept in (("actor", actor), ("critic", critic)) if kept)
