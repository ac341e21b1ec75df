"""Formats summary lines of the start-up banner: of a PPO run, of checkpoints and of a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ppo_ds.assemble.data import describe_rows
from ppo_ds.assemble.shared import machine, trained_model
from ppo_ds.config.schema import PPOConfig, reference_is_base, rollout_size, uses_reference
from ppo_ds.config.sections.run import CheckpointConfig, RunConfig
from ppo_ds.config.text import show
from ppo_ds.data.prompts import Source
from ppo_ds.distributed.world import World


def summary(
    config: PPOConfig,
    world: World,
    source: Source,
    critic_start: str | None,
    steps: int,
    optimizer_steps: int,
    gap: tuple[float, float],
) -> list[str]:
    """Returns the summary of a PPO run: devices, models, data and batch sizes.

    ``critic_start`` is the path of the critic's initial weights, or None without a separate critic. ``gap``
    is the mean and the maximum difference between the log-probs of generation and training.
    """
    actor, critic, reference, algo = config.actor, config.critic, config.reference, config.algo
    kl = "none"
    if algo.kl.place != "none":
        kl = f"{algo.kl.estimator} x {algo.kl.coef:g} ({algo.kl.controller}) in the {algo.kl.place}"
    if critic_start:
        values = trained_model("critic", critic_start, critic)
    elif critic.share_trunk:
        values = "critic     a value head on the actor"
    else:
        values = f"critic     none: advantages by {algo.advantage.estimator}"
    if not uses_reference(config):
        frozen = "none"
    elif reference_is_base(config):
        frozen = f"{reference.model.path}  {reference.model.dtype}  the actor without its adapters"
    else:
        copies = "sharded" if reference.zero.stage == 3 else "a replica on each rank"
        frozen = f"{reference.model.path}  {reference.model.dtype}  {copies}"
    return [
        *machine(world),
        trained_model("actor", actor.model.path, actor),
        values,
        f"reference  {frozen}",
        f"reward     {_reward(config.reward)}; KL {kl}",
        f"data       {source.path}: {describe_rows(source.report, 'prompts')}",
        *batch_equation(config, world.size, f", {optimizer_steps} in {steps} steps"),
        f"parity     log-probs of generation and training differ by {gap[0]:.2g} on average, "
        f"at most {gap[1]:.2g}; algo.old_logprobs={algo.old_logprobs}",
    ]


def length(run: RunConfig, steps: int) -> str:
    return f"length     {steps} steps: " + (
        f"run.steps={run.steps}" if run.steps else f"run.epochs={run.epochs:g} passes over the data"
    )


def checkpoint_times(checkpoint: CheckpointConfig) -> str:
    every, minutes = checkpoint.every, checkpoint.minutes
    if every == 0:
        best = (
            "only the one with the best evaluation (checkpoint.keep_best); " if checkpoint.keep_best else ""
        )
        return f"checkpoint {best or 'none; '}checkpoint.every=0, so an interrupted run starts again"
    times = [f"every {'step' if every == 1 else f'{every} steps'}"] if every else []
    times += [f"every {minutes:g} minutes"] if minutes is not None else []
    return f"checkpoint {', '.join([*times, 'at the end and at a stop signal'])}"


def resumed(run_dir: str, checkpoint: Path | None, done: int, steps: int) -> list[str]:
    """Returns a line about the ``done`` steps of earlier launches, or no line if ``done`` is 0.

    ``checkpoint`` is the checkpoint from which the run resumes.
    """
    if done >= steps:
        return [
            f"resumed    {run_dir} holds all {done} steps: nothing is left to train; raise run.steps, "
            "or choose another run.name"
        ]
    if done:
        return [
            f"resumed    after step {done}, from {checkpoint} (set run.name or run.dir to start another run)"
        ]
    return []


def batch_equation(config: PPOConfig, ranks: int, total: str = "") -> list[str]:
    """Returns lines on the samples and optimizer steps per PPO step; the last line ends with ``total``."""
    rollout, epochs, size = config.rollout, config.algo.epochs, rollout_size(config)
    minibatch = config.algo.minibatch_size or size
    return [
        f"rollout    {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} = {size} samples "
        f"per step, {size // ranks} per rank",
        f"update     {epochs} epochs x ({size} / {minibatch}) = {epochs * size // minibatch} optimizer "
        f"steps per step{total}",
    ]


def _reward(section: dict[str, Any]) -> str:
    """Formats a reward section as ``FunctionReward path=a:b``, nested sections in parentheses."""
    words = [str(section["_target_"]).rpartition(".")[2]] if "_target_" in section else []
    for key, value in section.items():
        if key != "_target_":
            words.append(f"{key}=({_reward(value)})" if isinstance(value, dict) else f"{key}={show(value)}")
    return " ".join(words)
