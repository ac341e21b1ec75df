"""Lists the keys that have an effect, or are valid, only if other keys have certain values."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from ppo_ds.config.schema import Config, PPOConfig, TextConfig, averaged_models, trained_models
from ppo_ds.config.text import short

GAE = "algo.advantage.estimator=gae"
GAE_OF_TOKENS = ("algo.action_level=token", GAE)
SEPARATE_CRITIC = (GAE, "critic.share_trunk=false")

# Key that differs from its default -> its conditions: KEY, KEY=VALUE or KEY above 0. KEY alone means that its
# value is neither null nor 0.
ALL_STAGES = {
    "run.steps": ["run.epochs=null"],
    "checkpoint.best_by": ["checkpoint.keep_best=true"],
    "checkpoint.keep_exports": ["checkpoint.export_every"],
    "tracker.print_answers": ["tracker.samples"],
}
ON_TEXTS = {"eval.every": ["data.eval_path"]}
TRAINED_MODEL = {
    "zero.offload_optimizer": ["zero.stage above 0"],
    "zero.offload_params": ["zero.stage=3"],
    "optim.name": ["zero.offload_optimizer=false"],
    "lora.alpha": ["lora.rank above 0"],
    "lora.targets": ["lora.rank above 0"],
    "lora.lr": ["lora.rank above 0"],
}
AVERAGED_MODEL = {"ema.evaluate": ["ema.decay"]}
PPO = {
    "data.path": ["data.mix=[]"],
    # without shuffling or in a mixture, other settings determine how often a prompt is drawn
    "data.difficulty.floor": ["data.shuffle=true", "data.mix=[]"],
    "data.difficulty.responses": ["data.difficulty.floor"],
    "data.ptx_path": ["algo.ptx.coef above 0"],
    "sampling.min_new_tokens": ["sampling.stop=[]"],  # the minimum does not delay stop strings
    "rollout.oversample": ["rollout.partial=true"],
    "rollout.max_versions": ["rollout.partial=true"],
    "actor.zero.generation_gather": ["actor.zero.stage=3"],
    "critic.model.path": ["critic.init=path"],
    "critic.lora.rank": SEPARATE_CRITIC,
    "critic.share_trunk": [GAE, "actor.lora.rank=0"],
    "algo.positive_nll.above": ["algo.positive_nll.coef above 0"],
    "algo.ptx.coef": ["data.ptx_path"],
    "algo.ptx.batch_size": ["algo.ptx.coef above 0"],
    # mask_truncated excludes the responses whose returns bootstrap_truncated changes
    "algo.gae.bootstrap_truncated": [*GAE_OF_TOKENS, "algo.loss.mask_truncated=false"],
    "algo.gae.lam_critic": GAE_OF_TOKENS,
    "algo.gae.length_alpha": GAE_OF_TOKENS,
    "algo.value.warmup_steps": SEPARATE_CRITIC,
    "algo.value.pretrain_rollouts": SEPARATE_CRITIC,
    # These conditions apply only to the value rollout. The decode backend's log-probs replace a forward that
    # the other keys use for comparison, values or entropies. They need an enforced limit on the parity gap.
    "algo.old_logprobs": [
        "algo.old_policy=rollout",
        "algo.rollout_is.kind=none",
        "critic.share_trunk=false",
        "algo.policy.top_entropy=null",
        "health.max_parity",
        "health.parity_action=stop",
    ],
}


def check_needs(config: Config, ranks: int) -> Iterator[str]:
    """Yields an error line for each key that is set although a condition in the tables above is not met."""
    needs: dict[str, Any] = dict(ALL_STAGES)
    needs |= ON_TEXTS if isinstance(config, TextConfig) else {}
    if isinstance(config, PPOConfig):
        needs |= PPO if config.algo.old_logprobs == "rollout" else PPO | {"algo.old_logprobs": []}
    for models, table in ((trained_models(config), TRAINED_MODEL), (averaged_models(config), AVERAGED_MODEL)):
        for name in models:
            for key, conditions in table.items():
                needs[f"{name}.{key}"] = [f"{name}.{condition}" for condition in conditions]
    for key, conditions in needs.items():
        section, name = attrgetter(key.rpartition(".")[0])(config), key.rpartition(".")[2]
        if name not in type(section).model_fields:  # a key of another variant
            continue
        value, default = getattr(section, name), type(section).model_fields[name].default
        if value is None or value == default:
            continue
        for condition in conditions:
            other, equals, wanted = condition.removesuffix(" above 0").partition("=")
            found = attrgetter(other)(config)
            if equals:
                holds = short(found) == wanted
            else:
                holds = found > 0 if condition.endswith(" above 0") else bool(found)
            if not holds:
                now = "" if isinstance(found, list) else f" (it is {short(found)})"
                yield f"{key}={short(value)}: needs {condition}{now}; otherwise set {key}={short(default)}"
