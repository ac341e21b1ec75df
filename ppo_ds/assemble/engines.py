"""Builds the engine of a role from its config section: trained by DeepSpeed, or frozen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ppo_ds.config.schema import TrainedConfig, learning_rate
from ppo_ds.config.sections.models import FrozenZeroConfig, LoraConfig
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenModel, freeze
from ppo_ds.engine.trained import LRSchedule
from ppo_ds.engine.zero import deepspeed_config, new_node_groups
from ppo_ds.errors import UserError
from ppo_ds.models.lora import adapter_parameters, add_adapters
from ppo_ds.models.policy import rope_length_limit, sharded_loading

T = TypeVar("T")
M = TypeVar("M")


@dataclass(frozen=True)
class Needs:
    """The properties of the data, as token ids of one tokenizer, that a model must support."""

    vocabulary: int  # upper bound (exclusive) of the tokenizer's ids
    positions: int  # number of tokens of the longest row
    longest: str  # describes the longest row in errors
    remedy: str  # for errors: the config keys to lower if the longest row is too long
    tokenizer_of: str = "actor"  # for errors: the model that provides the tokenizer

    def check(self, module: Any, path: str, key: str) -> None:
        """Raises UserError about the config key ``key`` if the model cannot read the data.

        Otherwise an out-of-range index on a GPU would end the run with an error that hides the cause.
        """
        if self.vocabulary > module.vocab_size:
            raise UserError(
                f"{key}={path}: the {self.tokenizer_of}'s tokenizer has ids up to {self.vocabulary - 1}, "
                f"this model's embedding only {module.vocab_size} rows; they do not belong together"
            )
        self.check_positions(module.trunk.config, module.max_tokens, path, key)

    def check_positions(self, config: Any, limit: int | None, path: str, key: str) -> None:
        """Raises UserError if the longest row exceeds ``limit`` or the length up to which RoPE is constant.

        ``config`` is the Hugging Face config of the model.
        """
        rope = rope_length_limit(config)
        if rope is not None and self.positions > rope[1]:
            kind, constant = rope
            raise UserError(
                f"{key}={path}: RoPE of type {kind} changes all rows of a batch that has one longer than "
                f"{constant} tokens; {self.longest} may have {self.positions}: lower {self.remedy} to stay "
                f"within {constant}"
            )
        if limit is not None and self.positions > limit:
            raise UserError(
                f"{key}={path}: has {limit} positions; {self.longest} need {self.positions}: "
                f"lower {self.remedy}"
            )

    def checked(self, load: Callable[[], M], path: str, key: str) -> Callable[[], M]:
        """Returns a function that calls ``load``, checks the model and returns it."""

        def load_checked() -> M:
            module = load()
            self.check(module, path, key)
            return module

        return load_checked


def trained_engine(
    load: Callable[[], nn.Module],
    make: Callable[..., T],
    role: TrainedConfig,
    name: str,
    world: World,
    optimizer_steps: int,
) -> T:
    """Loads the module of a role and returns the engine that ``make`` builds from this module.

    With LoRA, the schedule and the metric ``lr`` use the learning rate of the adapters; a value head is
    trained with optim.lr. Raises UserError if DeepSpeed rejects ``role.deepspeed``. All ranks must call this.
    """
    optim, zero = role.optim, role.zero
    assert role.model.dtype is not None, "inherited from the actor"
    engine_config = deepspeed_config(
        stage=zero.stage,
        dtype=role.model.dtype,
        offload_optimizer=zero.offload_optimizer,
        offload_params=zero.offload_params,
        grad_clip=optim.grad_clip,
        ranks=world.size,
        raw=role.deepspeed,
    )
    module = load_module(load, engine_config)
    adapters, lr, settings = set(adapter_parameters(module)), learning_rate(role), {}
    if adapters:
        settings = {f"{name}.lora.rank": role.lora.rank, f"{name}.lora.alpha": adapter_alpha(role.lora)}
    schedule = LRSchedule(
        lr, optim.schedule, optim.warmup_ratio, optim.min_lr_ratio, optimizer_steps, optim.warmup_steps
    )
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
            eight_bit=optim.name == "adamw_8bit",
            settings=settings,
        )
    except (ValueError, AssertionError) as error:
        if not role.deepspeed:
            raise
        raise UserError(
            f"{name}.deepspeed={role.deepspeed}: DeepSpeed refuses it: {' '.join(str(error).split())[:300]}"
        ) from error


def frozen_engine(
    load: Callable[[], nn.Module], zero: FrozenZeroConfig, dtype: str, world: World
) -> tuple[Any, FrozenModel]:
    """Loads a module and returns it with the FrozenModel that runs it. All ranks must call this."""
    engine_config = None
    if zero.stage == 3:
        engine_config = deepspeed_config(stage=3, dtype=dtype, offload_params=zero.offload_params, raw={})
    module = load_module(load, engine_config)
    return module, freeze(module, world=world, offload=zero.offload_params, deepspeed_config=engine_config)


def load_module(load: Callable[[], nn.Module], engine_config: dict[str, Any] | None) -> Any:
    """Calls ``load``. Under ZeRO-3, each weight is sharded as it is read; no rank holds the whole model."""
    if engine_config is None or engine_config["zero_optimization"]["stage"] < 3:
        return load()
    new_node_groups()
    with sharded_loading(engine_config):
        return load()


def add_lora(module: Any, lora: LoraConfig, seed: int, key: str) -> None:
    if lora.rank:
        add_adapters(
            module, rank=lora.rank, alpha=adapter_alpha(lora), targets=lora.targets, seed=seed, key=key
        )


def adapter_alpha(lora: LoraConfig) -> float:
    return lora.alpha or 2 * lora.rank
