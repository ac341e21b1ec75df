"""Builds rewards, and loads each of their models only once."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, SupportsInt

from torch import Tensor, nn

from ppo_ds.assemble.engines import frozen_engine
from ppo_ds.assemble.roles import CriticStart
from ppo_ds.compute.sizes import Shape
from ppo_ds.config.schema import PPOConfig
from ppo_ds.config.sections.models import FrozenZeroConfig, ModelConfig
from ppo_ds.config.targets import bind
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenBase, FrozenModel
from ppo_ds.engine.gather import gathered
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.models.chat_scorer import load_chat_scorer
from ppo_ds.models.size import own_code_shape, shape_of
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.models.value import ScoreHead, as_kept, load_reward_model
from ppo_ds.rewards.teacher import load_teacher
from ppo_ds.types import Reward


def build_reward(
    section: dict[str, Any],
    *,
    key: str = "reward",
    tokenizer: Tokenizer,
    temperature: float,
    load_frozen: RewardModels,
    score_tokens: SupportsInt,
    all_reduce_max: Callable[[int], int],
    reduce: Callable[[Tensor], Tensor],
    should_stop: Callable[[], bool],
    note: Callable[[str], None],
) -> Reward:
    """Builds the reward of a section such as config.reward. If it has models, all ranks must call this.

    Args:
        key: The section's name in the config.
        tokenizer: The tokenizer of the scored policy.
        temperature: The temperature of the log-probs of its responses.
        load_frozen: Loads the reward's models.
        score_tokens: memory.score_tokens.
        all_reduce_max: Returns the maximum of a number over all ranks.
        reduce: Returns the sum of a tensor over all ranks.
        should_stop: Returns whether a stop request has arrived.
        note: Receives banner lines.
    """
    return bind(section, key)(
        tokenizer=tokenizer,
        temperature=temperature,
        load_frozen=load_frozen,
        all_reduce_max=all_reduce_max,
        score_tokens=score_tokens,
        reduce=reduce,
        should_stop=should_stop,
        note=note,
    )


@dataclass(frozen=True)
class LoadedModel:
    """A model with which rewards score responses."""

    key: str  # its config key
    section: ModelConfig
    zero: FrozenZeroConfig
    module: Any
    scorer: FrozenModel
    shape: Shape | None  # None if unknown


class RewardModels:
    """Loads the models of rewards.

    Rewards that use the same model with the same options for loading and ZeRO share one copy in memory.
    """

    def __init__(self, world: World, note: Callable[[str], None]):
        """Initializes without models; ``note`` receives a banner line for each shared model."""
        self._world, self._note = world, note
        self._loaded: dict[Hashable, LoadedModel] = {}
        self._base: tuple[Hashable, TrainedModel] | None = None

    def offer(self, critic: TrainedModel, start: CriticStart, config: PPOConfig) -> None:
        """Lets a reward whose model is the base of a LoRA critic use this base instead of a second copy.

        The reward uses a copy of the initial score head. All ranks must call this before training.
        """
        head = getattr(critic.module.model, "score", None)
        if start.reward is not None and config.critic.lora.rank and isinstance(head, ScoreHead):
            with gathered(critic, head):
                head.keep()
            self._base = _identity(load_reward_model, start.model), critic

    def __call__(
        self, load: Callable[..., nn.Module], model: ModelConfig, zero: FrozenZeroConfig, key: str
    ) -> tuple[Any, FrozenModel]:
        """Returns ``load(model, key=key)`` and the FrozenModel that runs it.

        If the same model is in memory already, as that of another reward or as the base of the critic, it is
        returned instead. ``key`` is the config key for error messages. All ranks must call this.
        """
        identity = _identity(load, model)
        if self._base is not None and self._base[0] == identity:
            critic = self._base[1]
            self._note(
                f"sharing    {key}: the critic without its adapters, with its first head; "
                "no weights of its own"
            )
            return critic.module, FrozenBase(critic, base_weights=as_kept)
        placement = identity, zero.stage, zero.offload_params
        if placement in self._loaded:
            first = self._loaded[placement]
            if key != first.key:  # an evaluation builds a reward once for each tokenizer
                self._note(f"sharing    {key}: the same as {first.key}, in memory once")
            return first.module, first.scorer
        module, scorer = frozen_engine(lambda: load(model, key=key), zero, model.dtype, self._world)
        shape = shape_of(module.trunk) if load in (load_reward_model, load_teacher) else None
        if load is load_chat_scorer:
            shape = own_code_shape(module.model.config.to_dict())
        self._loaded[placement] = LoadedModel(key, model, zero, module, scorer, shape)
        if self._loaded[placement].shape is None:
            self._note(
                f"warning    {key}: its sizes are not known; auto token budgets do not count its forwards"
            )
        return module, scorer

    @property
    def loaded(self) -> list[LoadedModel]:
        """The models that were loaded for rewards, each once; not the critic's base."""
        return list(self._loaded.values())

    @property
    def sharded(self) -> bool:
        """Returns whether a forward of any of the rewards' models is a collective."""
        shared = self._base is not None and self._base[1].zero_stage == 3
        return shared or any(model.zero.stage == 3 for model in self.loaded)


def _identity(load: Callable[..., nn.Module], model: ModelConfig) -> Hashable:
    path = os.path.realpath(model.path) if os.path.isdir(model.path) else model.path
    own_code = model.trust_remote_code
    return load, path, model.revision, model.dtype, own_code, model.attn_implementation, model.quantization
