"""Checks the models: ZeRO, adapters, raw DeepSpeed settings and the initial weights of the critic."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_ds.config.schema import Config, PPOConfig, averaged_models, has_critic, reward_models, trained_models
from ppo_ds.config.text import show

# DeepSpeed settings that the trainer sets itself -> the keys to use instead
SET_BY_TRAINER = {
    "optimizer": "{}.optim (AdamW)",
    "scheduler": "{}.optim.schedule",
    "train_batch_size": "the stage's batch sizes (stage=ppo: rollout.prompts_per_step, algo.minibatch_size; "
    "stage=sft: sft.batch_size; stage=reward_model: reward_model.batch_size)",
    "train_micro_batch_size_per_gpu": "memory.train_tokens",
    "gradient_accumulation_steps": "memory.train_tokens and the stage's batch size",
    "gradient_clipping": "{}.optim.grad_clip",
    "fp16": "{}.model.dtype",
    "bf16": "{}.model.dtype",
}


def check_zero(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each ZeRO option that the model's ZeRO stage does not support."""
    for name, model in trained_models(config).items():
        zero = model.zero
        if zero.offload_optimizer and zero.stage == 0:
            yield f"{name}.zero.offload_optimizer=true: needs {name}.zero.stage 1, 2 or 3 (it is 0)"
        if zero.offload_params and zero.stage != 3:
            yield f"{name}.zero.offload_params=true: needs {name}.zero.stage 3 (it is {zero.stage})"


def check_generation(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each ZeRO option of generation that has no effect."""
    zero = config.actor.zero
    if zero.generation_gather != "auto" and zero.stage != 3:
        yield (
            f"actor.zero.generation_gather={zero.generation_gather}: needs actor.zero.stage 3 "
            f"(it is {zero.stage})"
        )
    # offload_states also moves the optimizer states of the critic
    if (
        zero.offload_states == "always"
        and zero.offload_optimizer
        and (config.critic.zero.offload_optimizer or not has_critic(config))
    ):
        yield (
            "actor.zero.offload_states=always: with actor.zero.offload_optimizer=true the states are "
            "always on the CPU; use auto"
        )


def check_adapters(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each option of adapters or averaged weights that are not enabled."""
    for name, model in trained_models(config).items():
        for key in ("alpha", "targets", "lr"):
            value = getattr(model.lora, key)
            if not model.lora.rank and value not in (None, "auto"):
                yield f"{name}.lora.{key}={show(value)}: only used with {name}.lora.rank above 0"
    for name, averaged in averaged_models(config).items():
        if averaged.ema.evaluate and averaged.ema.decay is None:
            yield f"{name}.ema.evaluate=true: needs averaged weights; set {name}.ema.decay (for example 0.99)"


def check_raw_deepspeed(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each raw DeepSpeed setting that the trainer sets itself."""
    for name, model in trained_models(config).items():
        raw = model.deepspeed
        for key, instead in SET_BY_TRAINER.items():
            if key in raw:
                yield (
                    f"{name}.deepspeed.{key}={show(raw[key])}: is set by the trainer; use "
                    f"{instead.format(name)} instead"
                )
        raw_zero = raw.get("zero_optimization")
        if isinstance(raw_zero, dict) and "stage" in raw_zero:
            yield (
                f"{name}.deepspeed.zero_optimization.stage={show(raw_zero['stage'])}: use {name}.zero.stage, "
                "which also decides how the weights are loaded"
            )


def check_node_copies(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each zero_hpz_partition_size that cannot divide the ranks into equal groups.

    DeepSpeed makes groups of that many ranks, or one group if there are fewer ranks.
    """
    for name, model in trained_models(config).items():
        raw_zero = model.deepspeed.get("zero_optimization")
        size = raw_zero.get("zero_hpz_partition_size", 1) if isinstance(raw_zero, dict) else 1
        setting = f"{name}.deepspeed.zero_optimization.zero_hpz_partition_size={show(size)}"
        if type(size) is not int or size < 0:
            yield f"{setting}: must be a number of ranks; set it to the number of GPUs on a node"
        elif model.zero.stage == 3 and 1 < size < ranks and ranks % size:
            fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            yield f"{setting}: must divide the number of ranks, {ranks}; use one of {fits}"


def check_initial_critic(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line if the critic's path is missing or unused, or a shared trunk has adapters."""
    critic = config.critic
    if critic.init == "path" and not critic.model.path:
        yield "critic.model.path is missing: critic.init=path loads the critic from it"
    if critic.init != "path" and critic.model.path:
        yield (
            f"critic.model.path={critic.model.path}: only used with critic.init=path (it is {critic.init})"
        )
    if critic.share_trunk and config.actor.lora.rank:
        yield "critic.share_trunk=true: cannot be used with actor.lora.rank; use a separate critic"


def check_critic_from_reward(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line if critic.init=reward is set and the reward has no model."""
    models = dict(reward_models(config.reward))
    if config.critic.init == "reward" and config.reward and "reward.model" not in models:
        kind = show(config.reward.get("_target_"))
        yield (
            f"critic.init=reward: needs a reward model, but reward._target_={kind} has no reward.model.path"
        )
