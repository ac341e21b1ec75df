"""Checks the section algo together with the keys of other sections that it depends on."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator

from ppo_ds.algorithm.rollout_is.keys import Bounded, Leveled
from ppo_ds.config.schema import PPOConfig, is_partial, reward_weights, rollout_size, uses_reference


def check_batches(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each batch size that ranks or optimizer steps do not divide evenly.

    Also yields one for each setting that conflicts with memory.sequence_parallel.
    """
    section, minibatch, rollout = config.rollout, config.algo.minibatch_size, rollout_size(config)
    prompts, samples = section.prompts_per_step, section.samples_per_prompt
    group = config.memory.sequence_parallel
    if ranks % group and not config.run.dry_run:  # a dry run does not divide rows
        yield f"memory.sequence_parallel={group}: must divide the number of ranks, {ranks}"
    if prompts % ranks:
        below = prompts - prompts % ranks
        fits = " or ".join(str(n) for n in (below, below + ranks) if n)
        yield (
            f"rollout.prompts_per_step={prompts}: must be divisible by the number of ranks, {ranks}; "
            f"nearest that fit: {fits}"
        )
        ranks = 1  # the check below then compares the minibatch with the rollout only
    if minibatch is not None and (rollout % minibatch or minibatch % ranks):
        fitting = [n for n in range(ranks, rollout + 1, ranks) if rollout % n == 0]
        above = bisect(fitting, minibatch)  # index of the first number above; ``minibatch`` does not fit
        nearest = fitting[max(0, above - 1) : above + 1]
        divisor = f" and be divisible by the number of ranks, {ranks}" if ranks > 1 else ""
        yield (
            f"algo.minibatch_size={minibatch}: must divide the rollout of {rollout} samples "
            f"(rollout.prompts_per_step={prompts} x "
            f"rollout.samples_per_prompt={samples}){divisor}; nearest that fit: "
            f"{' or '.join(map(str, nearest))}"
        )
    if group > 1 and config.memory.layout == "padded":
        yield "memory.layout=padded: memory.sequence_parallel divides packed rows; use packed or auto"
    if group > 1 and config.memory.reuse_forwards == "all":
        yield "memory.reuse_forwards=all: no forward is kept with memory.sequence_parallel; use auto or off"
    texts = config.algo.ptx.batch_size or minibatch or rollout
    if config.algo.ptx.coef and texts % ranks:
        yield f"algo.ptx.batch_size={texts}: must be divisible by the number of ranks, {ranks}"


def check_losses(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each unusable setting of the KL, the policy loss or the overlong penalty."""
    yield from config.algo.kl.problems(rollout_size(config))
    yield from config.algo.policy.problems(config.algo.action_level)
    if config.health.max_kl and not uses_reference(config):
        yield (
            f"health.max_kl={config.health.max_kl:g}: without a reference no KL is measured; set "
            "algo.kl.place to reward or loss, or health.max_kl to null"
        )
    buffer, limit = config.algo.reward_shaping.overlong_buffer, config.sampling.max_new_tokens
    if buffer is not None and buffer > limit:
        yield (
            f"algo.reward_shaping.overlong_buffer={buffer:g}: must be at most sampling.max_new_tokens={limit}"
        )


def check_rollout_is(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each conflict of algo.rollout_is with other keys, or between its own keys."""
    weights, policy = config.algo.rollout_is, config.algo.policy
    if not isinstance(weights, Bounded):
        return
    if weights.unit == "token" and config.algo.action_level == "sequence":
        has_level = isinstance(weights, Leveled)
        other = ", or algo.rollout_is.level sequence or sequence_mean" if has_level else ""
        yield (
            f"algo.rollout_is.kind={weights.kind}: weights tokens, so algo.action_level must be token{other}"
        )
    if weights.unit == "token" and policy.response_ratio:
        yield (
            f"algo.rollout_is.kind={weights.kind}: weights tokens, but algo.policy.loss={policy.loss} has "
            "one ratio per response, whose gradient reaches all of its tokens; use algo.rollout_is.kind="
            "truncate or mask with algo.rollout_is.level=sequence_mean or sequence"
        )
    yield from weights.problems()


def check_values(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each key of algo.value that conflicts with other keys."""
    algo, position, warmup = config.algo, config.algo.value.position, config.algo.value.warmup_steps
    if position is not None and (position == "token") != (algo.action_level == "token"):
        fits = "token" if algo.action_level == "token" else "prompt_last or response_last"
        yield f"algo.value.position={position}: with algo.action_level={algo.action_level} it must be {fits}"
    if warmup and config.run.steps is not None and warmup >= config.run.steps:
        yield (
            f"algo.value.warmup_steps={warmup}: leaves no step that trains the actor; must be below "
            f"run.steps={config.run.steps}"
        )


def check_estimator(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each setting that conflicts with the advantage estimator."""
    advantage = config.algo.advantage
    yield from advantage.problems(config.algo)
    if advantage.needs_parts and (parts := len(reward_weights(config))) < 2:
        yield (
            f"algo.advantage.estimator={advantage.estimator}: normalizes the parts of a reward one by "
            f"one; set reward=weighted with two or more parts whose weight is not 0 (it has {parts})"
        )


def check_groups(config: PPOConfig, ranks: int) -> Iterator[str]:
    """With one response per prompt, yields an error line for each option that needs several."""
    algo, n = config.algo, config.rollout.samples_per_prompt
    if n > 1:
        return
    estimator = algo.advantage
    excludes_dynamic = estimator.needs_greedy or estimator.needs_parts  # reported by another line
    for key, value, needs in (
        ("algo.advantage.estimator", algo.advantage.estimator, estimator.needs_group),
        ("algo.advantage.whiten", "group", algo.advantage.whiten == "group"),
        ("algo.dynamic_sampling.enabled", "true", algo.dynamic_sampling.enabled and not excludes_dynamic),
    ):
        if needs:
            yield (
                f"{key}={value}: compares the responses to one prompt; set rollout.samples_per_prompt "
                f"(it is {n}) to 2 or more, often 8"
            )


def check_partial(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each setting that partial rollouts do not support."""
    if not is_partial(config):
        return
    algo = config.algo
    if algo.rollout_is.kind == "none":
        yield (
            "rollout.partial=true: responses have tokens of earlier versions of the policy, which need "
            "importance weights; set algo.rollout_is.kind, for example truncate (it is none)"
        )
    path, estimator, floor = config.rollout.environment.path, algo.advantage, config.data.difficulty.floor
    dynamic, name = algo.dynamic_sampling.enabled, estimator.estimator
    for setting, found, why in (
        (f"rollout.environment.path={path}", path, "responses of several turns are not continued later"),
        ("algo.dynamic_sampling.enabled=true", dynamic, "each of its rounds waits for all responses"),
        (f"algo.advantage.estimator={name}", estimator.needs_greedy, "greedy responses are not continued"),
        (f"data.difficulty.floor={floor}", floor, "it learns the scores of a draw before the next draw"),
    ):
        if found:
            yield f"{setting}: {why}; change it, or set rollout.partial=false"
