"""What a config does that is allowed but known to be wrong or risky: one line for all of it, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_ds.config.schema import (
    Config,
    has_critic,
    reference_is_base,
    reward_models,
    uses_reference,
    value_position,
)
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.config.text import show


def warnings(config: Config, hides_stops: bool) -> list[str]:
    """At most one line on the algorithm, and one on the sampler, as the start-up banner shows them.

    ``hides_stops``: whether an end token is no action: algo.train_on_eos, and where that is null the tokenizer, say so.
    """
    mistakes = list(_mistakes(config, hides_stops))
    lines = [f"warning    algo: {'; '.join(mistakes)}"] if mistakes else []
    if config.sampling.top_k != 0 or config.sampling.top_p < 1:
        lines.append(
            f"warning    sampling.top_k={config.sampling.top_k} sampling.top_p={config.sampling.top_p:g}: "
            "answers are drawn from a part of the distribution, their log-probs are those of the whole"
        )
    if config.sampling.min_new_tokens:
        lines.append(
            f"warning    sampling.min_new_tokens={config.sampling.min_new_tokens}: "
            "before it no end token is drawn, but log-probs are those of the whole distribution"
        )
    return lines


def slow_bf16(config: Config, computes_bf16: bool | None) -> list[str]:
    """A line where a model is to run in bf16 on a processor that emulates it. ``computes_bf16``: see engine/processor.py."""
    dtypes = {"actor.model": config.actor.model.dtype}
    if has_critic(config):
        dtypes["critic.model"] = config.critic.model.dtype
    if uses_reference(config) and not reference_is_base(config):
        dtypes["reference.model"] = config.reference.model.dtype
    dtypes |= {
        key: model.get("dtype", ModelConfig.model_fields["dtype"].default)
        for key, model in reward_models(config.reward)
    }
    slow = " ".join(f"{key}.dtype=bf16" for key, dtype in dtypes.items() if dtype == "bf16")
    if computes_bf16 is not False or not slow:
        return []
    return [
        f"warning    {slow}: this processor has no instructions for bf16; emulated, it is 3 to 20 times slower than fp32"
    ]


def _mistakes(config: Config, hides_stops: bool) -> Iterator[str]:
    """What published systems do and should not: each kept as a switch, so that they can be run as they are."""
    algo = config.algo
    if algo.kl.place == "loss" and algo.kl.estimator == "k1" and algo.kl.coef > 0:
        yield "kl.estimator=k1 as a loss has no gradient in expectation, so it holds nothing back (k2 does)"
    if algo.kl.place == "loss" and algo.kl.estimator == "abs" and algo.kl.coef > 0:
        yield "kl.estimator=abs as a loss is not the gradient of any KL (k2 is)"
    if algo.advantage.estimator == "gae" and value_position(algo) == "response_last":
        yield "value.position=response_last is V(prompt, answer): no baseline, a perfect critic leaves no advantage (prompt_last is one)"
    if algo.old_policy == "lagged":
        yield f"old_policy=lagged: a copy that is up to {algo.lag - 1} updates old did not draw the answers, so ratios start away from 1"
    if algo.entropy.coef and algo.entropy.kind == "sample":
        yield "entropy.kind=sample has no gradient in expectation (exact has)"
    if algo.reward_shaping.score_position == "next_token" and algo.value.next_state == "ignored":
        yield "value.next_state=ignored loses the score of every answer that ended by itself"
    if (
        algo.reward_shaping.score_position == "next_token"
        and algo.value.next_state == "untrained"
        and algo.advantage.estimator == "gae"
        and algo.action_level == "token"
    ):
        yield "value.next_state=untrained puts the score on a state whose value nothing trains"
    if hides_stops:
        yield f"train_on_eos={show(algo.train_on_eos)}: the end token is no action here, so the decision to stop is not trained"
    if algo.advantage.estimator == "grpo" and algo.advantage.whiten == "batch":
        yield "advantage.whiten=batch after advantage.estimator=grpo divides by a deviation twice (none is GRPO's)"
    if (
        algo.gae.gamma * algo.gae.lam < 0.5
        and algo.advantage.estimator == "gae"
        and algo.action_level == "token"
    ):
        yield f"gae.gamma={algo.gae.gamma:g} x gae.lam={algo.gae.lam:g}: credit for the score dies within a few tokens"
