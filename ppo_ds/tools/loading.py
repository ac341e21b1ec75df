"""Loads policies for decoding, their tokenizers and rewards, for the chat and the evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, SupportsInt

from ppo_ds.assemble.reward_models import RewardModels, build_reward
from ppo_ds.assemble.roles import ppo_needs
from ppo_ds.config.schema import PPOConfig
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.distributed.world import World
from ppo_ds.models.download import HubModel
from ppo_ds.models.policy import Policy, load_policy
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.rewards.weighted import WeightedReward
from ppo_ds.tools.model_argument import NamedModel
from ppo_ds.types import Reward


def hub_models(config: PPOConfig, models: Sequence[NamedModel]) -> list[HubModel]:
    """Returns all models and tokenizers as entries for the download."""
    trusted = config.actor.model.trust_remote_code
    return [
        HubModel(model.key, path, revision_of(config, path), trusted)
        for model in models
        for path in dict.fromkeys((model.path, model.tokenizer_path))
    ]


def revision_of(config: PPOConfig, path: str) -> str | None:
    """Returns the revision of a model or tokenizer: actor.model.revision if ``path`` is the actor's."""
    return config.actor.model.revision if path == config.actor.model.path else None


def model_section(config: PPOConfig, model: NamedModel) -> ModelConfig:
    """Returns the settings for loading a model: those of actor.model, with the model's path."""
    own = {"path": model.path, "revision": revision_of(config, model.path), "gradient_checkpointing": False}
    return ModelConfig(**config.actor.model.model_dump() | own)


def tokenizer_of(config: PPOConfig, model: NamedModel) -> Tokenizer:
    """Loads the tokenizer of a model, with the chat template of the config."""
    path, trusted = model.tokenizer_path, config.actor.model.trust_remote_code
    template = config.data.chat_template, config.data.chat_template_kwargs
    return load_tokenizer(path, revision_of(config, path), trusted, *template, key=model.key)


def load_decoder(config: PPOConfig, model: NamedModel, tokenizer: Tokenizer, positions: int = 1) -> Policy:
    """Loads a policy that samples at the temperature of the config.

    Raises UserError if it has fewer embeddings than the tokenizer has ids, or fewer than ``positions``
    positions.
    """
    section, temperature = model_section(config, model), config.sampling.temperature
    policy = load_policy(section, temperature=temperature, key=model.key, adapter=model.adapter)
    needs = ppo_needs(tokenizer.id_bound, positions)
    if model.tokenizer_path != config.actor.model.path:
        needs = replace(needs, tokenizer_of=model.name)
    needs.check(policy, model.path, model.key)
    return policy


def load_reward(
    section: dict[str, Any],
    key: str,
    tokenizer: Tokenizer,
    temperature: float,
    world: World,
    load_frozen: RewardModels,
    score_tokens: SupportsInt,
    note: Callable[[str], None],
) -> Reward:
    """Builds the reward of a section for responses of one tokenizer. All ranks must call this.

    A weighted reward does not normalize its parts (WeightedReward.start_evaluation).
    """
    reward = build_reward(
        section,
        key=key,
        tokenizer=tokenizer,
        temperature=temperature,
        load_frozen=load_frozen,
        score_tokens=score_tokens,
        all_reduce_max=world.max_int,
        reduce=world.sum,
        should_stop=lambda: False,
        note=note,
    )
    if isinstance(reward, WeightedReward):
        return lambda rollout: reward.start_evaluation(rollout).result()
    return reward
