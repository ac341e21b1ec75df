"""Checks the algo section and the keys that it depends on."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_ds.algorithm.rollout_is.keys import Bounded, Leveled
from ppo_ds.config.schema import (
    PPOConfig,
    has_critic,
    learns_values,
    reward_weights,
    rollout_size,
    uses_reference,
)


def check_batches(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each batch size that the ranks or the optimizer steps cannot divide evenly."""
    prompts, samples, minibatch = (
        config.rollout.prompts_per_step,
        config.rollout.samples_per_prompt,
        config.algo.minibatch_size,
    )
    rollout = rollout_size(config)
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
        nearest = [
            max((n for n in fitting if n < minibatch), default=None),
            min((n for n in fitting if n > minibatch), default=None),
        ]
        divisor = f" and be divisible by the number of ranks, {ranks}" if ranks > 1 else ""
        yield (
            f"algo.minibatch_size={minibatch}: must divide the rollout of {rollout} samples "
            f"(rollout.prompts_per_step={prompts} x "
            f"rollout.samples_per_prompt={samples}){divisor}; nearest that fit: "
            f"{' or '.join(str(n) for n in nearest if n)}"
        )


def check_kl(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each conflict of the KL penalty and its controller."""
    yield from config.algo.kl.problems(rollout_size(config))
    if config.health.max_kl and not uses_reference(config):
        yield (
            f"health.max_kl={config.health.max_kl:g}: without a reference no KL is measured; set "
            "algo.kl.place to reward or loss, or health.max_kl to null"
        )


def check_policy_loss(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each conflict between the keys of the policy loss."""
    yield from config.algo.policy.problems(config.algo.action_level)


def check_loss(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each loss or reward-shaping option that another key rules out."""
    algo, limit = config.algo, config.sampling.max_new_tokens
    if algo.positive_nll.above and not algo.positive_nll.coef:
        yield (
            f"algo.positive_nll.above={algo.positive_nll.above:g}: only used with algo.positive_nll.coef "
            "above 0"
        )
    if algo.loss.mask_truncated and algo.gae.bootstrap_truncated:
        yield (
            "algo.gae.bootstrap_truncated=true: changes the returns of truncated responses, which "
            "algo.loss.mask_truncated=true excludes from the losses; set one of them to false"
        )
    if algo.reward_shaping.overlong_buffer is not None and algo.reward_shaping.overlong_buffer > limit:
        yield (
            f"algo.reward_shaping.overlong_buffer={algo.reward_shaping.overlong_buffer:g}: must be at most "
            f"sampling.max_new_tokens={limit}"
        )


def check_rollout_is(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each conflict of the importance weights for the decode backend."""
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


def check_old_logprobs(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each key that needs the forward which algo.old_logprobs=rollout saves."""
    algo, key = config.algo, "algo.old_logprobs=rollout"
    if algo.old_logprobs == "recompute":
        return
    if algo.old_policy == "lagged":
        yield f"{key}: needs algo.old_policy=rollout, since the lagged policy has not generated the responses"
    if algo.rollout_is.kind != "none":
        yield (
            f"{key}: algo.rollout_is.kind={algo.rollout_is.kind} compares the decode backend with the "
            "forward that this saves; set algo.rollout_is.kind=none or algo.old_logprobs=recompute"
        )
    if config.critic.share_trunk:
        yield (
            f"{key}: critic.share_trunk=true computes the values in the forward that this saves; set "
            "algo.old_logprobs=recompute"
        )
    if algo.policy.top_entropy is not None:
        yield (
            f"{key}: algo.policy.top_entropy={algo.policy.top_entropy:g} needs the entropies of the forward "
            "that this saves; set algo.old_logprobs=recompute"
        )
    if config.health.max_parity is None:
        yield (
            f"{key}: needs a limit on the difference to the training engine; set health.max_parity to auto "
            "or a number"
        )
    elif config.health.parity_action == "warn":
        yield (
            f"{key}: needs a limit that is enforced, since the update uses the decode backend's log-probs; "
            "set health.parity_action to stop"
        )


def check_values(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each option of values that the action level or estimator does not support."""
    algo, estimator = config.algo, config.algo.advantage.estimator
    no_values = not learns_values(config)
    position = algo.value.position
    if position is not None and (position == "token") != (algo.action_level == "token"):
        fits = "token" if algo.action_level == "token" else "prompt_last or response_last"
        yield f"algo.value.position={position}: with algo.action_level={algo.action_level} it must be {fits}"
    if config.critic.lora.rank and not has_critic(config):
        yield (
            f"critic.lora.rank={config.critic.lora.rank}: there is no separate critic to adapt "
            "(see algo.advantage.estimator and critic.share_trunk)"
        )
    if config.critic.init == "path" and no_values:
        yield f"critic.init=path: algo.advantage.estimator={estimator} has no critic to initialize"
    for key, is_set in (
        ("bootstrap_truncated=true", algo.gae.bootstrap_truncated),
        (f"lam_critic={algo.gae.lam_critic}", algo.gae.lam_critic is not None),
        (f"length_alpha={algo.gae.length_alpha}", algo.gae.length_alpha is not None),
    ):
        if is_set and (algo.action_level == "sequence" or no_values):
            yield f"algo.gae.{key}: only used with algo.action_level=token and algo.advantage.estimator=gae"
    if config.critic.share_trunk and no_values:
        yield (
            f"critic.share_trunk=true: algo.advantage.estimator={estimator} learns no values; set it to false"
        )


def check_estimator(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each setting that the advantage estimator cannot be combined with."""
    advantage = config.algo.advantage
    yield from advantage.problems(config.algo)
    if advantage.needs_parts and (parts := len(reward_weights(config))) < 2:
        yield (
            f"algo.advantage.estimator={advantage.estimator}: normalizes the parts of a reward one by "
            f"one; set reward=weighted with two or more parts whose weight is not 0 (it has {parts})"
        )


def check_critic_training(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each critic-only phase without a critic, or without a later actor update."""
    value, estimator = config.algo.value, config.algo.advantage.estimator
    for key, steps in (("warmup_steps", value.warmup_steps), ("pretrain_rollouts", value.pretrain_rollouts)):
        if steps and not learns_values(config):
            yield (
                f"algo.value.{key}={steps}: algo.advantage.estimator={estimator} has no critic to train; "
                "set it to 0"
            )
        if steps and config.critic.share_trunk:
            yield (
                f"algo.value.{key}={steps}: trains only the critic, and critic.share_trunk=true has no "
                "separate critic; set it to 0"
            )
    if value.warmup_steps and config.run.steps is not None and value.warmup_steps >= config.run.steps:
        yield (
            f"algo.value.warmup_steps={value.warmup_steps}: leaves no step that trains the actor; "
            f"must be below run.steps={config.run.steps}"
        )


def check_groups(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each option that needs several responses per prompt if there is only one."""
    algo, n = config.algo, config.rollout.samples_per_prompt
    if n > 1:
        return
    estimator = algo.advantage
    excludes_dynamic = estimator.needs_greedy or estimator.needs_parts  # which has a line of its own
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


def check_ptx(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each conflict between the PTX loss and its texts."""
    data, ptx = config.data, config.algo.ptx
    if ptx.coef and data.ptx_path is None:
        yield f"algo.ptx.coef={ptx.coef:g}: needs texts in data.ptx_path"
    if ptx.batch_size is not None and not ptx.coef:
        yield f"algo.ptx.batch_size={ptx.batch_size}: only used with algo.ptx.coef above 0"
    if data.ptx_path is not None and not ptx.coef:
        yield f"data.ptx_path={data.ptx_path}: only used with algo.ptx.coef above 0 (InstructGPT: 27.8)"
    texts = ptx.batch_size or config.algo.minibatch_size or rollout_size(config)
    if ptx.coef and texts % ranks:
        yield f"algo.ptx.batch_size={texts}: must be divisible by the number of ranks, {ranks}"
