"""Checks the inputs of a PPO run and plans its models, without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ppo_ds.assemble.data import (
    Inputs,
    build_held_out,
    build_prompts,
    build_ptx,
    build_tokenizer,
    describe_rows,
    stop_ids,
)
from ppo_ds.assemble.preflight import check_engine_model, check_models, check_rewards, try_functions
from ppo_ds.compute.sizes import Shape, causal_pairs, forward_flops
from ppo_ds.config.schema import PPOConfig, all_rewards, rollout_size
from ppo_ds.config.targets import bind
from ppo_ds.data.prompts import PromptStream
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.planning.ppo_memory import Models, estimate
from ppo_ds.planning.run_memory import BYTES, Hardware
from ppo_ds.tools.doctor.model_shapes import SHAPES, plan_models
from ppo_ds.tools.doctor.report import Report
from ppo_ds.tools.doctor.step_time import STATE_BYTES, Plan, PPOTime

MEAN_OF = 1000  # prompts over which the mean length is computed


def plan_ppo(config: PPOConfig, hardware: Hardware, report: Report) -> Plan | None:
    """Checks the inputs and reads the shapes of all models; returns None if a shape cannot be read."""
    inputs = check_inputs(config, hardware.on_gpu, report)
    models = plan_models(config, inputs.tokenizer, report)
    if models is None:
        return None
    checkpoint, exported = disk_bytes(config, models)
    longest = inputs.longest or config.data.max_prompt_tokens
    return Plan(
        partial(estimate, models=models, hardware=hardware, longest_prompt=longest),
        partial(PPOTime, models=models, mean_prompt=inputs.mean or longest, longest=longest),
        models.actor,
        inputs.evaluated,
        step_flops(config, models, longest),
        checkpoint,
        exported,
    )


def disk_bytes(config: PPOConfig, models: Models) -> tuple[int, list[int]]:
    """Returns the bytes of one checkpoint and of each model that is exported at the end of the run."""
    actor, critic, ema = models.actor, models.critic, config.actor.ema.decay is not None
    trained = actor.trained + (critic.trained if critic else 0)
    copies = int(ema) + int(config.algo.old_policy == "lagged")
    exported = [BYTES[config.actor.model.dtype] * actor.parameters] * (1 + ema)
    exported += [BYTES[str(config.critic.model.dtype)] * critic.parameters] if critic else []
    return STATE_BYTES * trained + 4 * copies * actor.trained, exported


def step_flops(config: PPOConfig, models: Models, prompt: int) -> int:
    """Computes the FLOPs of one PPO step over all ranks, with prompts and responses of maximum length.

    A backward pass counts as two forward passes, or as three with gradient checkpointing.
    """
    rows, response = rollout_size(config), config.sampling.max_new_tokens
    length = prompt + response

    def forward(shape: Shape) -> int:
        return forward_flops(shape, rows * length, rows * causal_pairs([length]), rows * response)

    trained = {"actor": models.actor} | ({} if models.critic is None else {"critic": models.critic})
    frozen = [model.shape for model in (models.reference, *models.rewards.values()) if model is not None]
    scoring = sum(map(forward, (*trained.values(), *frozen)))
    epoch = sum(
        forward(shape) * (4 if getattr(config, name).model.gradient_checkpointing else 3)
        for name, shape in trained.items()
    )
    return forward(models.actor) + scoring + config.algo.epochs * epoch


@dataclass(frozen=True)
class CheckedInputs:
    """The actor's tokenizer and the sizes of the data; None where they could not be read."""

    tokenizer: Tokenizer | None
    longest: int | None = None  # tokens of the longest prompt
    mean: float | None = None  # tokens of a prompt on average
    evaluated: int = 0  # prompts of an evaluation


def check_inputs(config: PPOConfig, on_gpu: bool, report: Report) -> CheckedInputs:
    """Reports on tokenizer, data, reward and whether vLLM can decode the actor; returns the data's sizes."""
    if Path(str(config.actor.model.path)).parent == SHAPES:
        report.add("tokenizer", "not in the Hub's cache; data and rewards were not checked either", ok=False)
        return CheckedInputs(None)
    tokenizer = report.attempt(
        "tokenizer", lambda: build_tokenizer(config), lambda t: f"{t.vocab_size} tokens"
    )
    if tokenizer is None:
        return CheckedInputs(None)

    def describe_stops(ids: tuple[int, ...]) -> str:
        tokens = ", ".join(repr(tokenizer.decode([i], skip_special_tokens=False)) for i in ids)
        return f"responses end with {tokens or 'the length limit only'}"

    report.attempt("sampling", lambda: stop_ids(config, tokenizer), describe_stops)
    errors = report.errors
    report.attempt("decode", lambda: check_engine_model(config, on_gpu))
    source = report.attempt(
        "data",
        lambda: build_prompts(config, tokenizer),
        lambda s: f"{s.path}: {describe_rows(s.report, 'prompts')}; the longest has {s.longest} tokens",
    )
    held_out = report.attempt(
        "held out",
        lambda: build_held_out(config, tokenizer),
        lambda s: f"{s.path}: {describe_rows(s.report, 'prompts')}" if s else None,
    )
    ptx = report.attempt(
        "texts",
        lambda: build_ptx(config, tokenizer),
        lambda s: f"{s.source.path}: {describe_rows(s.source.report, 'texts')}" if s else None,
    )
    reward = report.attempt("reward", lambda: [bind(part, key) for key, part in all_rewards(config).items()])
    if source is None or reward is None or report.errors > errors:
        return CheckedInputs(tokenizer, source.longest if source else None)
    new_stream = partial(PromptStream, source, prompts_per_step=config.rollout.prompts_per_step)
    repeats = config.rollout.samples_per_prompt
    stream = report.attempt("data", partial(new_stream, samples_per_prompt=repeats))
    if stream is not None:
        inputs = Inputs(tokenizer, source, held_out, stream, ptx)

        def try_rewards() -> None:
            check_models(config, inputs)
            check_rewards(all_rewards(config), inputs)
            try_functions(all_rewards(config), inputs)

        report.attempt("reward", try_rewards, lambda _: "ok (weights are not checked)")
    evaluated = 0 if held_out is None else min(len(held_out), config.eval.max_prompts or len(held_out))
    first = source.batch(range(min(len(source), MEAN_OF)))
    longest = max(s.longest for s in (source, held_out) if s is not None)
    return CheckedInputs(tokenizer, longest, float(first.mask.sum()) / len(first), evaluated)
