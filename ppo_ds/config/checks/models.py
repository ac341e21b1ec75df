"""Checks the models: ZeRO, raw DeepSpeed settings, quantization and the initial weights of the critic."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from ppo_ds.config.schema import (
    Config,
    PPOConfig,
    all_rewards,
    has_critic,
    learns_values,
    reference_is_base,
    reward_models,
    trained_models,
    uses_reference,
)
from ppo_ds.config.text import show
from ppo_ds.config.types import leaves, parts_of
from ppo_ds.errors import not_installed

# DeepSpeed settings that the trainer sets -> the keys to use instead
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
# Settings of a model that conflict with model.quantization=nf4 -> the reason and the remedy
NOT_WITH_NF4 = {
    ("lora.rank", 0): "weights of 4 bits are not trained; use LoRA",
    ("zero.stage", 3): "weights of 4 bits are not sharded; use a lower one",
    ("zero.offload_params", True): "is not supported for weights of 4 bits; use false",
    ("model.trust_remote_code", True): "layers of a model's own code are not quantized; use a model without",
}


def check_generation(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line if actor.zero.offload_states=always would have no states to move."""
    zero = config.actor.zero
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


def check_raw_deepspeed(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each raw DeepSpeed setting that is wrong or that the trainer sets."""
    for name, model in trained_models(config).items():
        raw = model.deepspeed
        for key, instead in SET_BY_TRAINER.items():
            if key in raw:
                yield (
                    f"{name}.deepspeed.{key}={show(raw[key])}: is set by the trainer; use "
                    f"{instead.format(name)} instead"
                )
        raw_zero = raw.get("zero_optimization")
        raw_zero = raw_zero if isinstance(raw_zero, dict) else {}
        if "stage" in raw_zero:
            yield (
                f"{name}.deepspeed.zero_optimization.stage={show(raw_zero['stage'])}: use {name}.zero.stage, "
                "which also decides how the weights are loaded"
            )
        # DeepSpeed makes groups of ``size`` ranks, or one group if there are fewer ranks
        size = raw_zero.get("zero_hpz_partition_size", 1)
        setting = f"{name}.deepspeed.zero_optimization.zero_hpz_partition_size={show(size)}"
        if type(size) is not int or size < 0:
            yield f"{setting}: must be a number of ranks; set it to the number of GPUs on a node"
        elif model.zero.stage == 3 and 1 < size < ranks and ranks % size:
            fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
            yield f"{setting}: must divide the number of ranks, {ranks}; use one of {fits}"


def check_bitsandbytes(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each conflict with nf4, and if bitsandbytes is needed but not installed."""
    trained = trained_models(config)
    users = [f"{name}.optim.name=adamw_8bit" for name in trained if trained[name].optim.name == "adamw_8bit"]
    sections = {name: role.model_dump() for name, role in trained.items()}
    if isinstance(config, PPOConfig):
        if uses_reference(config) and not reference_is_base(config):
            sections["reference"] = config.reference.model_dump()
        for reward, whole in all_rewards(config).items():
            sections |= dict(parts_of(whole, reward))
    for key, section in sections.items():
        values = {".".join(map(str, path)): value for path, value in leaves(section)}
        if values.get("model.quantization") == "nf4":
            users.append(f"{key}.model.quantization=nf4")
            for (name, value), problem in NOT_WITH_NF4.items():
                if values.get(name) == value:
                    yield f"{key}.{name}={show(value)}: {problem}, or {key}.model.quantization=none"
    if users and find_spec("bitsandbytes") is None:
        yield f"{users[0]}: {not_installed('bitsandbytes', 'bitsandbytes')}"


def check_initial_critic(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line if the critic, or the model that critic.init loads, is missing."""
    critic, reward = config.critic, config.reward
    if critic.init == "path" and not learns_values(config):
        yield f"critic.init=path: needs a critic (algo.advantage.estimator={config.algo.advantage.estimator})"
    if critic.init == "path" and not critic.model.path:
        yield "critic.model.path is missing: critic.init=path loads the critic from it"
    if critic.init == "reward" and reward and "reward.model" not in dict(reward_models(reward)):
        kind = show(reward.get("_target_"))
        yield (
            f"critic.init=reward: needs a reward model, but reward._target_={kind} has no reward.model.path"
        )
