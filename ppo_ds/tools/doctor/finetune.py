"""Checks the inputs of supervised fine-tuning or of a reward model, and estimates the memory of the run.

The estimate assumes that all tokens of a row are learned. It leaves out the few answers that stage=sft
generates in its evaluations.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_ds.build.preflight import check_vocabulary
from ppo_ds.config.registry import import_target
from ppo_ds.config.schema import Config, averaged_models
from ppo_ds.models.size import planned_shape
from ppo_ds.ops.flops import causal_pairs, forward_flops
from ppo_ds.ops.memory import Shape
from ppo_ds.tools.doctor.estimate import BYTES, STATE_BYTES, Estimate, Hardware, Plan, RunMemory
from ppo_ds.tools.doctor.model_shapes import describe_shape
from ppo_ds.tools.doctor.report import Report

# stage -> functions that read the data (config) -> (tokenizer, training rows, held-out rows) and describe it
READERS = {
    "sft": ("ppo_ds.build.sft.read_demonstrations", "ppo_ds.build.sft.describe"),
    "reward_model": (
        "ppo_ds.build.reward_model.read_preferences",
        "ppo_ds.build.reward_model.describe_pairs",
    ),
}


@dataclass(frozen=True)
class Batch:
    """The rows of one optimizer step."""

    what: str  # rows or pairs
    size: int  # over all ranks
    texts: int  # texts in each of them, which a forward keeps together
    max_tokens: int  # of one text


def batch_of(config: Config) -> Batch:
    """Returns the size of an optimizer step."""
    if config.stage == "sft":
        return Batch("rows", config.sft.batch_size, 1, config.sft.max_tokens)
    return Batch("pairs", config.reward_model.batch_size, 2, config.reward_model.max_tokens)


def batch_line(config: Config, ranks: int) -> list[str]:
    """Returns the line on the size of an optimizer step."""
    batch = batch_of(config)
    return [f"update     {batch.size} {batch.what} per optimizer step, {-(-batch.size // ranks)} per rank"]


def plan_finetuning(config: Config, hardware: Hardware, report: Report) -> Plan | None:
    """Checks the inputs and reads the shape of the model; returns None if it cannot be read."""
    (name, role), batch = next(iter(averaged_models(config).items())), batch_of(config)
    key, errors = f"{name}.model.path", report.errors
    read, describe = map(import_target, READERS[config.stage])
    data = report.attempt("data", lambda: read(config), lambda _: None)
    longest, evaluated = batch.max_tokens, 0
    if data is not None:
        tokenizer, train, held_out = data
        longest = max(source.longest for source in (train, held_out) if source is not None)
        report.add("data", f"{train.path}: {describe(train)}; the longest text has {longest} tokens")
        if held_out is not None:
            report.add("held out", f"{held_out.path}: {describe(held_out)}")
            evaluated = min(len(held_out), config.eval.max_prompts or len(held_out))
        report.attempt(name, lambda: check_vocabulary(key, role.model, tokenizer, name), lambda _: None)
    shape = report.attempt(
        name,
        lambda: planned_shape(role.model, classifier=name == "scorer", trained=True, lora=role.lora, key=key),
        lambda shape: describe_shape(str(role.model.path), shape),
    )
    if shape is None or report.errors > errors:
        return None
    averaged = role.ema.decay is not None
    rows = batch.size * batch.texts
    forward = forward_flops(shape.size, rows * longest, rows * causal_pairs([longest]), rows * longest)
    return Plan(
        lambda changed: FinetuneMemory(changed, name, shape, hardware, longest, evaluated).estimate(),
        forward * (4 if role.model.gradient_checkpointing else 3),
        STATE_BYTES * shape.trained + 4 * averaged * shape.trained,
        BYTES[str(role.model.dtype)] * shape.parameters * (1 + averaged),
    )


class FinetuneMemory(RunMemory):
    """Computes the estimate of a run that trains one model."""

    def __init__(
        self, config: Config, name: str, shape: Shape, hardware: Hardware, longest: int, evaluated: int
    ):
        """Initializes the estimate; ``evaluated`` is the number of held-out rows or pairs."""
        batch = batch_of(config)
        rows = batch.texts * -(-batch.size // hardware.ranks)
        super().__init__(config, hardware, {name: shape}, {}, length=longest, rows=rows, unit=batch.texts)
        self.name, self.evaluated_rows = name, batch.texts * -(-evaluated // hardware.ranks)

    def estimate(self) -> Estimate:
        engine, memory = self.engines[self.name], self.config.memory
        resident = {self.name: engine.resident} | self.averages()
        rest = sum(resident.values())
        phases = {"loading": self.loading()}
        if self.evaluated_rows:
            tokens = self.forward_tokens(memory.score_tokens, self.evaluated_rows)
            phases["eval"] = rest + self.trained_forward(self.name, tokens, prefetch=True)
        update = max(self.backward(self.name), engine.gradients + engine.step)
        phases[f"update_{self.name}"] = rest + update
        return Estimate(resident, phases, engine.host if self.hardware.on_gpu else 0, self.engines, "")

    def head_positions(self, tokens: int) -> int:
        """Counts all tokens for a language model, and one per text for a score."""
        return tokens if self.shapes[self.name].head else tokens // self.length
