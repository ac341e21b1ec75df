"""Warns about settings that are valid but known to be wrong or risky, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_ds.algorithm.kl.keys import KL_ESTIMATORS
from ppo_ds.config.schema import (
    Config,
    PPOConfig,
    all_rewards,
    has_critic,
    reference_is_base,
    reward_models,
    trained_models,
    uses_environment,
    uses_reference,
    value_position,
)
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.config.text import show


def warnings(config: PPOConfig, hides_stops: bool) -> list[str]:
    """Returns the warnings of the start-up banner.

    At most one line is about the algorithm; the others are about sampling and the environment.
    ``hides_stops`` is True if the end token is not an action, which depends on algo.train_on_eos and, if that
    is null, on the tokenizer.
    """
    mistakes = list(_mistakes(config, hides_stops))
    lines = [f"warning    algo: {'; '.join(mistakes)}"] if mistakes else []
    if config.sampling.top_k != 0 or config.sampling.top_p < 1:
        lines.append(
            f"warning    sampling.top_k={config.sampling.top_k} sampling.top_p={config.sampling.top_p:g}: "
            "responses are sampled from a part of the distribution, but log-probs are of the whole"
        )
    if config.sampling.min_new_tokens:
        lines.append(
            f"warning    sampling.min_new_tokens={config.sampling.min_new_tokens}: "
            "no end token is sampled before it, but log-probs are of the whole distribution"
        )
    if (path := config.rollout.environment.path) and not uses_environment(config.reward):
        lines.append(
            f"warning    rollout.environment.path={path}: the rewards of its steps are not used; choose "
            "reward=environment, or add it to a weighted reward"
        )
    return lines


def slow_bf16(config: Config, computes_bf16: bool | None) -> list[str]:
    """Returns a warning if a model runs in bf16 on a processor that emulates bf16.

    ``computes_bf16`` is False if the processor emulates bf16, and None if this is unknown.
    """
    dtypes = {f"{name}.model": role.model.dtype for name, role in trained_models(config).items()}
    if isinstance(config, PPOConfig):
        if not has_critic(config):
            del dtypes["critic.model"]
        if uses_reference(config) and not reference_is_base(config):
            dtypes["reference.model"] = config.reference.model.dtype
        default = ModelConfig.model_fields["dtype"].default
        for reward, section in all_rewards(config).items():
            dtypes |= {key: model.get("dtype", default) for key, model in reward_models(section, reward)}
    slow = " ".join(f"{key}.dtype=bf16" for key, dtype in dtypes.items() if dtype == "bf16")
    if computes_bf16 is not False or not slow:
        return []
    return [
        f"warning    {slow}: this processor has no bf16 instructions, and emulated bf16 is 3 to 20 times "
        "slower than fp32; set the dtype to fp32"
    ]


def _mistakes(config: PPOConfig, hides_stops: bool) -> Iterator[str]:
    """Yields a phrase for each setting of the algorithm that is known to be a mistake.

    Most of these settings are used by published systems, which ppo_ds can thus reproduce.
    """
    algo = config.algo
    estimator, level = algo.advantage, algo.action_level
    flaw = KL_ESTIMATORS[algo.kl.estimator].flaw_as_loss
    if algo.kl.place == "loss" and flaw and algo.kl.coef > 0:
        yield f"kl.estimator={algo.kl.estimator} as a loss {flaw}"
    if estimator.needs_critic and value_position(algo) == "response_last":
        yield (
            "value.position=response_last is V(prompt, response), which is no baseline: with a perfect "
            "critic all advantages are 0 (use prompt_last)"
        )
    if algo.old_policy == "lagged":
        yield (
            f"old_policy=lagged: a copy that is up to {algo.lag - 1} updates old did not generate the "
            "responses, so ratios do not start at 1"
        )
    if algo.entropy.coef and algo.entropy.kind == "sample":
        yield "entropy.kind=sample has no gradient in expectation (use exact)"
    if algo.reward_shaping.score_position == "next_token" and algo.value.next_state == "ignored":
        yield "value.next_state=ignored loses the score of every response that ends with an end token"
    if (
        algo.reward_shaping.score_position == "next_token"
        and algo.value.next_state == "untrained"
        and estimator.needs_critic
        and level == "token"
    ):
        yield "value.next_state=untrained pays the score in a state whose value is not trained"
    if hides_stops:
        yield (
            f"train_on_eos={show(algo.train_on_eos)}: the end token is not an action here, so the decision "
            "to stop is not trained"
        )
    if estimator.divides_by_std and algo.advantage.whiten == "batch":
        yield (
            f"advantage.whiten=batch after advantage.estimator={algo.advantage.estimator} divides by a "
            "standard deviation twice (use none, as GRPO does)"
        )
    alpha, limit = algo.gae.length_alpha, config.sampling.max_new_tokens
    if alpha is not None and alpha * limit <= 1:
        yield (
            f"gae.length_alpha={alpha:g} gives lambda 0 to responses of up to {1 / alpha:.0f} tokens, and "
            f"none is longer (sampling.max_new_tokens={limit})"
        )
    if algo.gae.gamma * algo.gae.lam < 0.5 and estimator.needs_critic and level == "token":
        yield (
            f"gae.gamma={algo.gae.gamma:g} x gae.lam={algo.gae.lam:g}: the score reaches only the last few "
            "tokens"
        )
