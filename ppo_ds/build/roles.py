"""Builds the four roles: loads the weights that each starts from into its engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from ppo_ds.config.schema import Config, reference_is_base, rollout_size
from ppo_ds.config.sections.models import (
    ActorConfig,
    CriticConfig,
    FrozenZeroConfig,
    LoraConfig,
    ModelConfig,
)
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenBase, FrozenModel, freeze
from ppo_ds.engine.gather import gathered
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import LRSchedule, TrainedModel, parameter_counts
from ppo_ds.engine.zero import deepspeed_config
from ppo_ds.errors import UserError
from ppo_ds.models.lora import adapter_parameters, add_adapters, without_adapters
from ppo_ds.models.policy import Policy, load_policy, sharded_loading, unsharded_twin
from ppo_ds.models.rope import rope_length_limit
from ppo_ds.models.size import decoding_bytes
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.models.value import (
    ScoreHead,
    ScoreModel,
    as_kept,
    can_start_critic,
    load_critic,
    load_reward_model,
)

T = TypeVar("T")
CLASSIFIER = "ppo_ds.rewards.model.model_reward"


@dataclass(frozen=True)
class Needs:
    """Requirements of the data on a model that reads the actor's ids."""

    vocabulary: int  # upper bound (exclusive) of the ids of the actor's tokenizer
    positions: int  # tokens of the longest prompt and the longest response together

    def check(self, module: Any, path: str, key: str) -> None:
        """Raises UserError, which names ``key``, if the model cannot read the data.

        Without this check an index out of range on a GPU would end the run without naming its cause.
        """
        if self.vocabulary > module.vocab_size:
            raise UserError(
                f"{key}={path}: the actor's tokenizer has ids up to {self.vocabulary - 1}, this model's "
                f"embedding only {module.vocab_size} rows; they do not belong together"
            )
        rope = rope_length_limit(module.trunk.config)
        if rope is not None and self.positions > rope[1]:
            kind, limit = rope
            raise UserError(
                f"{key}={path}: RoPE of type {kind} changes all rows of a batch that has one longer than "
                f"{limit} tokens; the longest prompt and sampling.max_new_tokens together (or a text of "
                f"data.ptx_path) may have {self.positions}: lower data.max_prompt_tokens, "
                f"sampling.max_new_tokens or data.ptx_max_tokens to stay within {limit}"
            )
        if module.max_tokens is not None and self.positions > module.max_tokens:
            raise UserError(
                f"{key}={path}: has {module.max_tokens} positions; the longest prompt and "
                "sampling.max_new_tokens together (or a text of data.ptx_path) "
                f"need {self.positions}: lower data.max_prompt_tokens, sampling.max_new_tokens or "
                "data.ptx_max_tokens"
            )


# -- trained roles ---------------------------------------------------------------------------------


def actor_module(config: Config) -> Policy:
    """Loads the actor's policy with its adapters and value head."""
    role = config.actor
    policy = load_policy(
        role.model,
        temperature=config.sampling.temperature,
        key="actor.model.path",
        value_head=config.critic.share_trunk,
    )
    if config.algo.aux_coef and policy.balance_coef is None:
        raise UserError(
            f"algo.aux_coef={config.algo.aux_coef:g}: {role.model.path} is no mixture of experts and has no "
            "loss to balance them"
        )
    _add_adapters(policy.lm, role.lora, config.run.seed, "actor.lora")
    return policy


def build_actor(
    config: Config,
    world: World,
    needs: Needs,
    optimizer_steps: int,
    timed: Callable[[str], AbstractContextManager[None]],
) -> HybridActor:
    """Builds the actor's engine. A collective."""

    def load() -> Policy:
        policy = actor_module(config)
        needs.check(policy, config.actor.model.path, "actor.model.path")
        return policy

    make = partial(HybridActor, make_inference_copy=unsharded_twin, timer=timed)
    return _trained(load, make, config.actor, "actor", world, optimizer_steps)


def critic_module(config: Config, start: CriticStart) -> ScoreModel:
    """Loads the critic with its adapters."""
    # With critic.init=actor and LoRA on both roles, the two bases are equal, and one would suffice: the
    # actor's, with a second pair of adapters and a head. But two engines cannot hold one set of weights (each
    # shards and hooks them), so actor and critic would have to be one engine.
    critic = load_critic(start.model, zero_head=start.zero_head, key=start.key)
    _add_adapters(critic.model, config.critic.lora, config.run.seed, "critic.lora")
    return critic


def build_critic(
    config: Config, start: CriticStart, world: World, needs: Needs, optimizer_steps: int
) -> TrainedModel:
    """Builds the critic's engine. A collective."""

    def load() -> ScoreModel:
        critic = critic_module(config, start)
        needs.check(critic, start.model.path, start.key)
        return critic

    return _trained(load, TrainedModel, config.critic, "critic", world, optimizer_steps)


def _add_adapters(module: Any, lora: LoraConfig, seed: int, key: str) -> None:
    """Adds adapters if LoRA is on."""
    if lora.rank:
        add_adapters(module, rank=lora.rank, alpha=_alpha(lora), targets=lora.targets, seed=seed, key=key)


def _alpha(lora: LoraConfig) -> float:
    return lora.alpha or 2 * lora.rank


def _trained(
    load: Callable[[], nn.Module],
    make: Callable[..., T],
    role: ActorConfig | CriticConfig,
    name: str,
    world: World,
    optimizer_steps: int,
) -> T:
    """Loads the module of a role and calls ``make`` with it and the arguments of its engine.

    With adapters the schedule, and so the metric ``lr``, is that of the adapters; a value head beside them
    keeps optim.lr. Raises UserError if DeepSpeed rejects the user's own JSON.
    """
    optim, zero = role.optim, role.zero
    engine_config = deepspeed_config(
        stage=zero.stage,
        dtype=role.model.dtype,
        offload_optimizer=zero.offload_optimizer,
        offload_params=zero.offload_params,
        grad_clip=optim.grad_clip,
        raw=role.deepspeed,
    )
    module = _load(load, engine_config)
    adapters, lr, settings = set(adapter_parameters(module)), optim.lr, {}
    if adapters:
        lr = role.lora.lr or optim.lr
        settings = {f"{name}.lora.rank": role.lora.rank, f"{name}.lora.alpha": _alpha(role.lora)}
    schedule = LRSchedule(lr, optim.schedule, optim.warmup_ratio, optim.min_lr_ratio, optimizer_steps)
    try:
        return make(
            module,
            world=world,
            deepspeed_config=engine_config,
            schedule=schedule,
            lr_factors={p: optim.lr / lr for p in module.parameters() if p not in adapters},
            betas=optim.betas,
            eps=optim.eps,
            weight_decay=optim.weight_decay,
            settings=settings,
        )
    except (ValueError, AssertionError) as error:
        if not role.deepspeed:
            raise
        raise UserError(
            f"{name}.deepspeed={role.deepspeed}: DeepSpeed refuses it: {' '.join(str(error).split())[:300]}"
        ) from error


def _load(load: Callable[[], nn.Module], engine_config: dict[str, Any] | None) -> Any:
    """Calls ``load``; under ZeRO-3 each weight is sharded as it is read, so that no rank holds all of it."""
    if engine_config is None or engine_config["zero_optimization"]["stage"] < 3:
        return load()
    with sharded_loading(engine_config):
        return load()


# -- where the critic starts -----------------------------------------------------------------------


@dataclass(frozen=True)
class CriticStart:
    """The initial weights of a critic."""

    model: ModelConfig  # critic.model with the path, revision and trust_remote_code of the weights
    zero_head: bool  # whether a missing value head starts at zero
    key: str  # the config key that errors name
    reward: ModelConfig | None = None  # the reward model, if the weights are its own


def critic_start(config: Config, tokenizer: Tokenizer) -> CriticStart:
    """Resolves ``critic.init``.

    auto is the reward model if it is a decoder with the actor's vocabulary, else the actor.
    """
    init, own = config.critic.init, config.critic.model
    reward = _reward_model(config)
    if init in ("auto", "reward"):
        usable = reward is not None and can_start_critic(reward, tokenizer)
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


def _reward_model(config: Config) -> ModelConfig | None:
    """Returns the ``model`` section of a reward that is a sequence classifier, else None.

    Only such a model has a head for a critic.
    """
    section = config.reward.get("model") if config.reward["_target_"] == CLASSIFIER else None
    return ModelConfig(**section) if isinstance(section, dict) else None


# -- frozen roles ----------------------------------------------------------------------------------


def build_reference(config: Config, world: World, needs: Needs, actor: TrainedModel) -> FrozenModel:
    """Builds the reference, which is the actor's base if the actor has adapters on the same weights."""
    if reference_is_base(config):
        return FrozenBase(actor, base_weights=without_adapters)
    zero = config.reference.zero
    # a frozen model has no backward pass that would recompute activations
    model = ModelConfig(**config.reference.model.model_dump() | {"gradient_checkpointing": False})

    def load() -> Policy:
        key = "reference.model.path"
        policy = load_policy(model, temperature=actor.module.temperature, key=key)
        needs.check(policy, model.path, key)
        return policy

    return _frozen(load, zero, model.dtype, world)[1]


def _frozen(
    load: Callable[[], nn.Module], zero: FrozenZeroConfig, dtype: str, world: World
) -> tuple[Any, FrozenModel]:
    """Loads a module and returns it with the FrozenModel that runs it."""
    engine_config = None
    if zero.stage == 3:
        engine_config = deepspeed_config(stage=3, dtype=dtype, offload_params=zero.offload_params, raw={})
    module = _load(load, engine_config)
    return module, freeze(module, world=world, offload=zero.offload_params, deepspeed_config=engine_config)


class RewardModels:
    """Loads the models that rewards score with.

    Rewards with the same model, loaded and placed with the same options, share one copy in memory.
    """

    def __init__(self, world: World, note: Callable[[str], None]):
        """Initializes without models; ``note`` receives a banner line for each model that is shared."""
        self._world, self._note = world, note
        # the key, the module and the FrozenModel of each copy
        self._loaded: dict[Hashable, tuple[str, Any, FrozenModel]] = {}
        self._base: tuple[Hashable, TrainedModel] | None = None

    def offer(self, critic: TrainedModel, start: CriticStart, config: Config) -> None:
        """Shares the base of a critic with adapters that started from the reward model.

        A collective, before any training.
        """
        head = getattr(critic.module.model, "score", None)
        if start.reward is not None and config.critic.lora.rank and isinstance(head, ScoreHead):
            with gathered(critic, head):
                head.keep()
            self._base = _identity(load_reward_model, start.model), critic

    def __call__(
        self, load: Callable[..., nn.Module], model: ModelConfig, zero: FrozenZeroConfig, key: str
    ) -> tuple[Any, FrozenModel]:
        """Returns ``load(model, key=key)`` and the FrozenModel that runs it, or those of a shared copy.

        ``key`` is the config key that errors name.
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
            first, module, scorer = self._loaded[placement]
            self._note(f"sharing    {key}: the same as {first}, in memory once")
            return module, scorer
        module, scorer = _frozen(lambda: load(model, key=key), zero, model.dtype, self._world)
        self._loaded[placement] = key, module, scorer
        return module, scorer


def _identity(load: Callable[..., nn.Module], model: ModelConfig) -> Hashable:
    """Returns what identifies a model: its loader, its folder and the options it is loaded with."""
    path = os.path.realpath(model.path) if os.path.isdir(model.path) else model.path
    return load, path, model.revision, model.dtype, model.trust_remote_code, model.attn_implementation


# -- all roles -------------------------------------------------------------------------------------


def plan_generation(config: Config, actor: HybridActor, critic: TrainedModel | None) -> list[str]:
    """Plans the memory of generation and returns lines for the start-up banner.

    A collective, called once all models are in memory.
    """
    zero, most = config.actor.zero, config.sampling.max_new_tokens
    rows = rollout_size(config) // actor.world.size
    tokens = min(config.memory.rollout_tokens, rows * (config.data.max_prompt_tokens + most))
    line = actor.plan_generation(
        generation_gather=zero.generation_gather,
        offload_states=zero.offload_states,
        decoding_bytes=decoding_bytes(actor.module.lm, tokens, min(rows, max(1, tokens // most))),
        critic=critic,
    )
    return [line] if line else []


def choose_layouts(
    config: Config, actor: TrainedModel, reference: FrozenModel | None, critic: TrainedModel | None
) -> list[str]:
    """Lets each model choose the layout of its forwards and returns warnings for the start-up banner.

    A collective.
    """
    layout, device, lines = config.memory.layout, actor.world.device, []
    models: list[tuple[str, Any, AbstractContextManager[None]]] = [("actor", actor, nullcontext())]
    if reference is not None:
        models.append(("reference", reference, reference.resident()))
    if critic is not None:
        models.append(("critic", critic, nullcontext()))
    for name, model, resident in models:
        with resident:
            choice = model.module.choose_layout(layout, device, model)
        if choice.packed and not choice.kernel and device.type == "cuda":
            lines.append(
                f"warning    memory.layout=packed: no kernel supports the {name}'s heads: attention is "
                "computed one sequence after the other"
            )
        if choice.reason is not None:
            lines.append(f"warning    memory.layout={layout}: the {name}'s rows are padded: {choice.reason}")
    return lines


def adapter_notes(config: Config, actor: TrainedModel, critic: TrainedModel | None) -> list[str]:
    """Returns the numbers of trained parameters of models with LoRA, for the start-up banner."""
    trained = [("actor", config.actor.lora, actor)]
    if critic is not None:
        trained.append(("critic", config.critic.lora, critic))
    lines = []
    for name, lora, model in trained:
        if lora.rank:
            n, m = parameter_counts(model.module)
            lines.append(
                f"lora       {name}: rank {lora.rank}, trainable parameters: {n:,} of {m:,} ({n / m:.2%})"
            )
    return lines
