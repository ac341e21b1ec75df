"""Checks the inputs of supervised fine-tuning or a reward model, and collects the inputs of the estimates."""

from __future__ import annotations

from functools import partial

from ppo_ds.assemble.preflight import check_vocabulary
from ppo_ds.assemble.sft import answered_tokens
from ppo_ds.assemble.shared import evaluated_rows
from ppo_ds.compute.sizes import causal_pairs, forward_flops
from ppo_ds.config.registry import import_target
from ppo_ds.config.schema import SFTStageConfig, averaged_models
from ppo_ds.models.size import planned_shape
from ppo_ds.planning.finetune_memory import batch_of, estimate_finetuning
from ppo_ds.planning.run_memory import BYTES, Hardware
from ppo_ds.tools.doctor.model_shapes import describe_shape
from ppo_ds.tools.doctor.report import Report
from ppo_ds.tools.doctor.step_time import STATE_BYTES, FinetuneTime, Plan

# stage -> (function that reads the data of a config, function that describes rows); the first returns the
# tokenizer, the training rows and the held-out rows
READERS = {
    "sft": ("ppo_ds.assemble.sft.read_demonstrations", "ppo_ds.assemble.sft.describe"),
    "reward_model": (
        "ppo_ds.assemble.reward_model.read_preferences",
        "ppo_ds.assemble.reward_model.describe_pairs",
    ),
}


def batch_line(config: SFTStageConfig, ranks: int) -> list[str]:
    """Returns the line about the size of an optimizer step."""
    batch = batch_of(config)
    return [f"update     {batch.size} {batch.what} per optimizer step, {-(-batch.size // ranks)} per rank"]


def plan_finetuning(config: SFTStageConfig, hardware: Hardware, report: Report) -> Plan | None:
    """Checks the inputs and reads the shape of the model; returns None after an error about the model."""
    (name, role), batch = next(iter(averaged_models(config).items())), batch_of(config)
    key = f"{name}.model.path"
    read, describe = map(import_target, READERS[config.stage])
    data = report.attempt("data", lambda: read(config))
    errors = report.errors  # errors of the data do not end the plan: its longest text counts as max_tokens
    longest, evaluated, answers = batch.max_tokens, 0, (0, 0)
    if data is not None:
        tokenizer, train, held_out = data
        longest = max(source.longest for source in (train, held_out) if source is not None)
        report.add("data", f"{train.path}: {describe(train)}; the longest text has {longest} tokens")
        if held_out is not None:
            report.add("held out", f"{held_out.path}: {describe(held_out)}")
            evaluated = evaluated_rows(config, held_out)
            if config.stage == "sft":
                prompts = held_out.prompts(config.sft.samples, config.sft.sample_tokens)
                answers = (0, 0) if prompts is None else (len(prompts), answered_tokens(config, prompts))
        report.attempt(name, lambda: check_vocabulary(key, role.model, tokenizer, name))
    shape = report.attempt(
        name,
        lambda: planned_shape(role.model, classifier=name == "scorer", trained=True, lora=role.lora, key=key),
        lambda shape: describe_shape(str(role.model.path), shape),
    )
    if shape is None or report.errors > errors:
        return None
    averaged = role.ema.decay is not None
    rows = batch.size * batch.texts
    forward = forward_flops(shape, rows * longest, rows * causal_pairs([longest]), rows * longest)
    return Plan(
        partial(
            estimate_finetuning,
            hardware=hardware,
            name=name,
            shape=shape,
            longest=longest,
            evaluated=evaluated,
            answers=answers,
        ),
        lambda changed, machine, _: FinetuneTime(changed, machine, name, shape, rows, longest),
        shape,
        evaluated * batch.texts,
        forward * (4 if role.model.gradient_checkpointing else 3),
        STATE_BYTES * shape.trained + 4 * averaged * shape.trained,
        [BYTES[str(role.model.dtype)] * shape.parameters] * (1 + averaged),
    )
