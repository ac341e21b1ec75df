"""Builds the models of the config: actor, critic and reference.

Functions that take the whole config are for PPO: they read the sections `algo`, `sampling`, `critic` and
`reference`. A stage without these sections builds its actor with ``actor_module`` and
``engines.trained_engine``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from ppo_ds.assemble.engines import Needs, add_lora, frozen_engine, trained_engine
from ppo_ds.config.schema import PPOConfig, reference_is_base
from ppo_ds.config.sections.models import ActorConfig, ModelConfig
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenBase, FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.errors import UserError
from ppo_ds.models.lora import without_adapters
from ppo_ds.models.policy import Policy, load_policy, unsharded_twin
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.models.value import ScoreModel, can_start_critic, load_critic

CLASSIFIER = "ppo_ds.rewards.model.model_reward"


def ppo_needs(vocabulary: int, positions: int) -> Needs:
    return Needs(
        vocabulary,
        positions,
        longest="the longest prompt and sampling.max_new_tokens together (or a text of data.ptx_path)",
        remedy="data.max_prompt_tokens, sampling.max_new_tokens or data.ptx_max_tokens",
    )


def actor_module(
    role: ActorConfig,
    seed: int,
    *,
    temperature: float = 1.0,
    value_head: bool = False,
    aux_coef: float | None = None,
) -> Policy:
    """Loads a policy with its adapters, initialized with ``seed``, and an optional value head.

    Raises UserError if ``aux_coef`` (algo.aux_coef) is set and the model is not a mixture of experts.
    """
    policy = load_policy(role.model, temperature=temperature, key="actor.model.path", value_head=value_head)
    if aux_coef and policy.balance_coef is None:
        raise UserError(
            f"algo.aux_coef={aux_coef:g}: {role.model.path} is no mixture of experts and has no loss to "
            "balance them"
        )
    add_lora(policy.lm, role.lora, seed, "actor.lora")
    return policy


def ppo_actor_module(config: PPOConfig) -> Policy:
    return actor_module(
        config.actor,
        config.run.seed,
        temperature=config.sampling.temperature,
        value_head=config.critic.share_trunk,
        aux_coef=config.algo.aux_coef,
    )


def build_actor(
    config: PPOConfig,
    world: World,
    needs: Needs,
    optimizer_steps: int,
    timed: Callable[[str], AbstractContextManager[None]],
) -> HybridActor:
    """Builds the engine of PPO's actor, with generation. All ranks must call this."""
    load = needs.checked(partial(ppo_actor_module, config), config.actor.model.path, "actor.model.path")
    copy = None if config.rollout.own_weights else unsharded_twin
    make = partial(HybridActor, make_inference_copy=copy, timer=timed)
    return trained_engine(load, make, config.actor, "actor", world, optimizer_steps)


@dataclass(frozen=True)
class CriticStart:
    """The initial weights of a critic."""

    model: ModelConfig  # critic.model with the path, revision and trust_remote_code of the weights
    zero_head: bool  # whether a missing value head starts at zero
    key: str  # the config key for error messages
    reward: ModelConfig | None = None  # the reward model, if its weights are used


def critic_start(config: PPOConfig, tokenizer: Tokenizer | None) -> CriticStart:
    """Returns the initial weights of the critic, which ``critic.init`` selects.

    "auto" selects the reward model if it is a decoder with the actor's vocabulary, otherwise the actor.
    Without a ``tokenizer`` the vocabulary is unknown, and "auto" selects the actor. Raises UserError if
    "reward" is given and the reward model is not such a decoder.
    """
    init, own = config.critic.init, config.critic.model
    # only a sequence classifier has a head that a critic can use
    section = config.reward.get("model") if config.reward["_target_"] == CLASSIFIER else None
    reward = ModelConfig(**section) if isinstance(section, dict) else None
    if init in ("auto", "reward"):
        usable = reward is not None and tokenizer is not None and can_start_critic(reward, tokenizer)
        if init == "reward" and not usable:
            raise UserError(
                f"critic.init=reward: {reward.path if reward else 'the reward'} is not a decoder with the "
                "actor's vocabulary; use critic.init=actor, or critic.init=path with critic.model.path"
            )
        init = "reward" if usable else "actor"
    weights = {"reward": reward, "actor": config.actor.model, "path": own}[init]
    source = {name: getattr(weights, name) for name in ("path", "revision", "trust_remote_code")}
    return CriticStart(
        ModelConfig(**own.model_dump() | source),
        zero_head=init != "reward",
        key="critic.model.path" if init == "path" else f"{init}.model.path",
        reward=reward if init == "reward" else None,
    )


def critic_module(config: PPOConfig, start: CriticStart) -> ScoreModel:
    """Loads the critic with its adapters."""
    # With critic.init=actor and LoRA on both roles, actor and critic have equal base weights. One copy would
    # suffice if it had a second set of adapters and a value head. But two engines cannot hold the same
    # weights, since each shards and hooks its weights, so actor and critic would have to be one engine.
    critic = load_critic(start.model, zero_head=start.zero_head, key=start.key)
    add_lora(critic.model, config.critic.lora, config.run.seed, "critic.lora")
    return critic


def build_critic(
    config: PPOConfig, start: CriticStart, world: World, needs: Needs, optimizer_steps: int
) -> TrainedModel:
    """Builds the critic's engine. All ranks must call this."""
    load = needs.checked(partial(critic_module, config, start), start.model.path, start.key)
    return trained_engine(load, TrainedModel, config.critic, "critic", world, optimizer_steps)


def ppo_model(config: PPOConfig, name: str, tokenizer: Tokenizer) -> Policy | ScoreModel:
    """Loads the actor or the critic of a PPO run, in the state before the first step."""
    if name == "critic":
        return critic_module(config, critic_start(config, tokenizer))
    return ppo_actor_module(config)


def sft_model(config: PPOConfig, name: str, tokenizer: Tokenizer) -> Policy:
    """Loads the actor of stage=sft, in the state before the first step."""
    return actor_module(config.actor, config.run.seed)


def build_reference(config: PPOConfig, world: World, needs: Needs, actor: TrainedModel) -> FrozenModel:
    """Builds the reference: a frozen model, or with reference_is_base, the actor without its adapters.

    All ranks must call this.
    """
    if reference_is_base(config):
        return FrozenBase(actor, base_weights=without_adapters)
    zero = config.reference.zero
    # a frozen model has no backward pass that would recompute activations
    model = ModelConfig(**config.reference.model.model_dump() | {"gradient_checkpointing": False})
    key = "reference.model.path"
    load = partial(load_policy, model, temperature=actor.module.temperature, key=key)
    return frozen_engine(needs.checked(load, model.path, key), zero, model.dtype, world)[1]
