"""The four roles: which weights each starts from, and which engine holds it."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ppo_ds.config.schema import Config, reference_is_base, rollout_size
from ppo_ds.config.sections.models import (
    ActorConfig,
    CriticConfig,
    FrozenZeroConfig,
    InheritedModelConfig,
    LoraConfig,
    ModelConfig,
)
from ppo_ds.config.types import replace
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenBase, FrozenModel, freeze
from ppo_ds.engine.gather import gathered
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import LRSchedule, TrainedModel, parameter_counts
from ppo_ds.engine.zero import deepspeed_config
from ppo_ds.errors import UserError
from ppo_ds.models.lora import adapter_parameters, add_adapters, without_adapters
from ppo_ds.models.policy import Policy, load_policy, sharded_loading, unsharded_twin
from ppo_ds.models.rope import steady_until
from ppo_ds.models.size import decoding_bytes
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.models.value import ScoreHead, ScoreModel, as_kept, load_critic, load_reward_model, reads_like

T = TypeVar("T")
CLASSIFIER = "ppo_ds.rewards.model.model_reward"


def _engine_config(role: ActorConfig | CriticConfig, dtype: str) -> dict[str, Any]:
    zero = role.zero
    return deepspeed_config(
        stage=zero.stage,
        dtype=dtype,
        offload_optimizer=zero.offload_optimizer,
        offload_params=zero.offload_params,
        grad_clip=role.optim.grad_clip,
        raw=role.deepspeed,
    )


def _loaded(load: Callable[[], nn.Module], engine_config: dict[str, Any] | None) -> Any:
    """Under ZeRO-3 each weight is sharded as it is read, so that no rank ever holds a whole model."""
    if engine_config is None or engine_config["zero_optimization"]["stage"] < 3:
        return load()
    with sharded_loading(engine_config):
        return load()


def _adapt(module: Any, lora: LoraConfig, seed: int, key: str) -> None:
    """Adds adapters if LoRA is on."""
    if lora.rank:
        add_adapters(module, rank=lora.rank, alpha=_alpha(lora), targets=lora.targets, seed=seed, key=key)


def _alpha(lora: LoraConfig) -> float:
    return lora.alpha or 2 * lora.rank


def _training(
    role: ActorConfig | CriticConfig,
    name: str,
    module: nn.Module,
    engine_config: dict[str, Any],
    world: World,
    optimizer_steps: int,
) -> dict[str, Any]:
    """The schedule (and so the metric ``lr``) is that of the adapters where there are some; a value head
    beside them keeps to optim.lr.
    """
    optim, adapters = role.optim, set(adapter_parameters(module))
    lr = (role.lora.lr or optim.lr) if adapters else optim.lr
    return {
        "world": world,
        "deepspeed_config": engine_config,
        "schedule": LRSchedule(lr, optim.schedule, optim.warmup_ratio, optim.min_lr_ratio, optimizer_steps),
        "lr_factors": {
            parameter: optim.lr / lr for parameter in module.parameters() if parameter not in adapters
        },
        "betas": optim.betas,
        "eps": optim.eps,
        "weight_decay": optim.weight_decay,
        "settings": {f"{name}.lora.rank": role.lora.rank, f"{name}.lora.alpha": _alpha(role.lora)}
        if adapters
        else {},
    }


def _policy(
    model: ModelConfig | InheritedModelConfig,
    temperature: float,
    key: str,
    checkpointing: bool = False,
    value_head: bool = False,
) -> Policy:
    return load_policy(
        model.path,
        revision=model.revision,
        dtype=model.dtype,
        trust_remote_code=model.trust_remote_code,
        attn_implementation=model.attn_implementation,
        gradient_checkpointing=checkpointing,
        temperature=temperature,
        key=key,
        value_head=value_head,
    )


@dataclass(frozen=True)
class Needs:
    """Requirements of the data on a model that reads the actor's ids."""

    vocabulary: int  # ids of the actor's tokenizer are below
    positions: int  # the longest prompt and the longest answer together


def _fitting(module: Any, needs: Needs, path: str, key: str) -> Any:
    """The module, if it can read what it will be given: an index out of range on a GPU says nothing of its
    cause.
    """
    if needs.vocabulary > module.vocab_size:
        raise UserError(
            f"{key}={path}: the actor's tokenizer has ids up to {needs.vocabulary - 1}, this model's embedding only {module.vocab_size} rows; "
            "they do not belong together"
        )
    steady = steady_until(module.trunk.config)
    if steady is not None and needs.positions > steady[1]:
        raise UserError(
            f"{key}={path}: RoPE of type {steady[0]} changes all rows of a batch that has one longer than {steady[1]} tokens; the longest prompt and "
            f"sampling.max_new_tokens together (or a text of data.ptx_path) may have {needs.positions}: lower data.max_prompt_tokens, "
            f"sampling.max_new_tokens or data.ptx_max_tokens to stay within {steady[1]}"
        )
    if module.max_tokens is not None and needs.positions > module.max_tokens:
        raise UserError(
            f"{key}={path}: has {module.max_tokens} positions; the longest prompt and sampling.max_new_tokens together (or a text of "
            f"data.ptx_path) need {needs.positions}: lower data.max_prompt_tokens, sampling.max_new_tokens or data.ptx_max_tokens"
        )
    return module


def actor_module(config: Config) -> Policy:
    """Loads the actor's policy with its adapters and value head."""
    role = config.actor
    checkpointing, value_head = role.model.gradient_checkpointing, config.critic.share_trunk
    policy = _policy(role.model, config.sampling.temperature, "actor.model.path", checkpointing, value_head)
    if config.algo.aux_coef and policy.balance_coef is None:
        raise UserError(
            f"algo.aux_coef={config.algo.aux_coef:g}: {role.model.path} is no mixture of experts and has no loss to balance them"
        )
    _adapt(policy.lm, role.lora, config.run.seed, "actor.lora")
    return policy


def build_actor(
    config: Config,
    world: World,
    needs: Needs,
    optimizer_steps: int,
    timed: Callable[[str], AbstractContextManager[None]],
) -> HybridActor:
    role = config.actor
    engine_config = _engine_config(role, role.model.dtype)
    policy = _fitting(
        _loaded(lambda: actor_module(config), engine_config), needs, role.model.path, "actor.model.path"
    )
    training = _training(role, "actor", policy, engine_config, world, optimizer_steps)
    return _accepted(
        lambda: HybridActor(policy, make_inference_copy=unsharded_twin, timer=timed, **training),
        role,
        "actor",
    )


def _accepted(make: Callable[[], T], role: ActorConfig | CriticConfig, name: str) -> T:
    """Returns what ``make`` makes; raises UserError where DeepSpeed rejects the user's own JSON."""
    try:
        return make()
    except (ValueError, AssertionError) as error:
        if not role.deepspeed:
            raise
        raise UserError(
            f"{name}.deepspeed={role.deepspeed}: DeepSpeed refuses it: {' '.join(str(error).split())[:300]}"
        ) from error


def build_reference(config: Config, world: World, needs: Needs, actor: TrainedModel) -> FrozenModel:
    role = config.reference
    if reference_is_base(config):
        return FrozenBase(actor, base_weights=without_adapters)

    def load() -> Policy:
        policy = _policy(role.model, actor.module.temperature, "reference.model.path")
        return _fitting(policy, needs, role.model.path, "reference.model.path")

    return _placed(load, role.zero, role.model.dtype, world)[1]


def _placed(
    load: Callable[[], nn.Module], zero: FrozenZeroConfig, dtype: str, world: World
) -> tuple[Any, FrozenModel]:
    engine_config = None
    if zero.stage == 3:
        engine_config = deepspeed_config(stage=3, dtype=dtype, offload_params=zero.offload_params, raw={})
    module = _loaded(load, engine_config)
    return module, freeze(module, world=world, offload=zero.offload_params, deepspeed_config=engine_config)


class RewardModels:
    """The models that rewards score with, each in memory once: who asks for one that is there already gets
    that one.
    """

    def __init__(self, world: World, note: Callable[[str], None]):
        """``note`` receives a line of the start-up banner for each model that is shared."""
        self._world, self._note = world, note
        self._placed: dict[
            Hashable, tuple[str, Any, FrozenModel]
        ] = {}  # the first one's key, module, and where it runs
        self._base: tuple[Hashable, TrainedModel] | None = None

    def offer(self, critic: TrainedModel, start: CriticStart, config: Config) -> None:
        """Where the critic is a reward model with adapters, that reward model is the critic as it began.

        A collective, before any training.
        """
        head = getattr(critic.module.model, "score", None)
        if start.reward is not None and config.critic.lora.rank and isinstance(head, ScoreHead):
            with gathered(critic, head):
                head.keep()
            own = config.critic.model
            self._base = (
                _identity(
                    load_reward_model,
                    replace(start.reward, dtype=own.dtype, attn_implementation=own.attn_implementation),
                ),
                critic,
            )

    def __call__(
        self, load: Callable[..., nn.Module], model: ModelConfig, zero: FrozenZeroConfig, key: str
    ) -> tuple[Any, FrozenModel]:
        """What ``load`` makes of the model, and where it runs. ``key``: who asks, as errors name it."""
        identity = _identity(load, model)
        if self._base is not None and self._base[0] == identity:
            critic = self._base[1]
            self._note(
                f"sharing    {key}: the critic without its adapters, with its first head; no weights of its own"
            )
            return critic.module, FrozenBase(critic, base_weights=as_kept)
        place = identity, zero.stage, zero.offload_params
        if place not in self._placed:
            self._placed[place] = (
                key,
                *_placed(lambda: load(**_loading(model), key=key), zero, model.dtype, self._world),
            )
            return self._placed[place][1:]
        first, *there = self._placed[place]
        self._note(f"sharing    {key}: the same as {first}, in memory once")
        return tuple(there)


def _loading(model: ModelConfig) -> dict[str, Any]:
    """The arguments of those loaders that make a frozen model."""
    return {
        name: getattr(model, name)
        for name in ("path", "revision", "dtype", "trust_remote_code", "attn_implementation")
    }


def _identity(load: Callable[..., nn.Module], model: ModelConfig) -> Hashable:
    """Returns what identifies a model: its loader, its folder and the options it is loaded with."""
    here = os.path.isdir(model.path)
    return load, *(_loading(model) | ({"path": os.path.realpath(model.path)} if here else {})).values()


def _reward_model(config: Config) -> ModelConfig | None:
    """The reward's ``model`` section as the reward itself reads it, where it is a sequence classifier: other
    models have no head for a critic.
    """
    section = config.reward.get("model") if config.reward["_target_"] == CLASSIFIER else None
    return ModelConfig(**section) if isinstance(section, dict) else None


@dataclass(frozen=True)
class CriticStart:
    """The weights a critic begins with, and whether a missing value head may begin at zero."""

    path: str
    revision: str | None
    trust_remote_code: bool
    zero_head: bool
    key: str  # the config key that errors name
    reward: ModelConfig | None = None  # where they are the reward model's


def critic_start(config: Config, tokenizer: Tokenizer) -> CriticStart:
    """``critic.init`` resolved: auto is the reward model where it is a decoder with the actor's vocabulary,
    else the actor.
    """
    init, own, actor, reward = (
        config.critic.init,
        config.critic.model,
        config.actor.model,
        _reward_model(config),
    )
    if init in ("auto", "reward"):
        alike = reward is not None and reads_like(
            reward.path, tokenizer, revision=reward.revision, trust_remote_code=reward.trust_remote_code
        )
        if init == "reward" and not alike:
            raise UserError(
                f"critic.init=reward: {reward.path if reward else 'the reward'} is not a decoder with the actor's vocabulary; "
                "use critic.init=actor, or critic.init=path with critic.model.path"
            )
        init = "reward" if alike else "actor"
    if init == "reward":
        return CriticStart(
            reward.path,
            reward.revision,
            reward.trust_remote_code,
            zero_head=False,
            key="reward.model.path",
            reward=reward,
        )
    if init == "actor":
        return CriticStart(
            actor.path, actor.revision, actor.trust_remote_code, zero_head=True, key="actor.model.path"
        )
    return CriticStart(own.path, own.revision, own.trust_remote_code, zero_head=True, key="critic.model.path")


def critic_module(config: Config, start: CriticStart) -> ScoreModel:
    """Loads the critic with its adapters."""
    # With critic.init=actor and LoRA on both, the two bases are equal, and one could do: the actor's, with a
    # second pair of adapters and a head. But two engines cannot hold one set of weights (each shards and
    # hooks them): actor and critic would be one engine.
    model = config.critic.model
    critic = load_critic(
        start.path,
        revision=start.revision,
        dtype=model.dtype,
        trust_remote_code=start.trust_remote_code,
        attn_implementation=model.attn_implementation,
        gradient_checkpointing=model.gradient_checkpointing,
        zero_head=start.zero_head,
        key=start.key,
    )
    _adapt(critic.model, config.critic.lora, config.run.seed, "critic.lora")
    return critic


def build_critic(
    config: Config, start: CriticStart, world: World, needs: Needs, optimizer_steps: int
) -> TrainedModel:
    role = config.critic
    engine_config = _engine_config(role, role.model.dtype)
    critic = _fitting(
        _loaded(lambda: critic_module(config, start), engine_config), needs, start.path, start.key
    )
    return _accepted(
        lambda: TrainedModel(
            critic, **_training(role, "critic", critic, engine_config, world, optimizer_steps)
        ),
        role,
        "critic",
    )


def plan_generation(config: Config, actor: HybridActor, critic: TrainedModel | None) -> list[str]:
    """How the actor generates, for the start-up banner. A collective, once all models are in memory."""
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
                f"warning    memory.layout=packed: no kernel takes the {name}'s heads: attention is computed one "
                "sequence after the other"
            )
        if choice.reason is not None:
            lines.append(f"warning    memory.layout={layout}: the {name}'s rows are padded: {choice.reason}")
    return lines


def adapter_notes(config: Config, actor: TrainedModel, critic: TrainedModel | None) -> list[str]:
    """For the start-up banner: how much of the models is trained, where LoRA is on."""
    trained = [("actor", config.actor.lora, actor)] + (
        [("critic", config.critic.lora, critic)] if critic else []
    )
    lines = []
    for name, lora, model in trained:
        if lora.rank:
            n, m = parameter_counts(model.module)
            lines.append(
                f"lora       {name}: rank {lora.rank}, trainable parameters: {n:,} of {m:,} ({n / m:.2%})"
            )
    return lines
