"""Trains, saves and loads tiny models with NF4 weights for test_quantized_engines.py; writes JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ppo_ds.assemble.roles import build_reference, ppo_actor_module
from ppo_ds.config.schema import PPOConfig
from ppo_ds.config.types import replace
from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.reading import read_weights
from ppo_ds.engine.checkpoint.state import consolidated, load_model, save_model
from ppo_ds.engine.frozen import FrozenBase, FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel, parameter_counts
from ppo_ds.models.quantized import is_quantized
from tests.engine.lora_worker import (
    NEEDS,
    R,
    actor_of,
    batch,
    config,
    critic_of,
    decoded_gap,
    logprobs,
    plain_logprobs,
    train,
)  # fmt: skip
from tests.engine.rank_results import Case, run_cases, same


def quantized(root: Path, stage: int, dtype: str) -> PPOConfig:
    settings = config(root, stage, dtype)
    actor = replace(settings.actor, model=replace(settings.actor.model, quantization="nf4"))
    reference = replace(settings.reference.model, quantization="nf4")
    return replace(settings, actor=actor, reference=replace(settings.reference, model=reference))


def codes(model: TrainedModel) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.module.parameters() if is_quantized(p)]


def trained_actor(world: World, root: Path, stage: int, dtype: str) -> Case:
    """Compares 8 steps with a save after 4 to a new engine, and the export with the trained model."""
    settings, directory = quantized(root, stage, dtype), root / f"{world.size} {stage} {dtype}"
    actor = actor_of(settings, world)
    reference = build_reference(settings, world, NEEDS, actor)
    before, start = codes(actor), logprobs(reference)
    train(actor, range(4))
    save_model(actor, directory)
    saved, read = consolidated(actor), ppo_actor_module(settings)
    with torch.no_grad():
        read_weights(read, root, directory.name)
    whole = train(actor, range(4, 8))
    finished, last = consolidated(actor), logprobs(actor)
    again = actor_of(settings, world)
    load_model(again, directory)
    rest = train(again, range(4, 8))
    gap = 0.0
    if finished is not None:
        weights = {name.removeprefix("lm."): tensor for name, tensor in finished.items()}
        actor.module.save(directory / "model", weights)
        merged = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float32)
        gap = float((plain_logprobs(merged, world) - last).abs().max())
    files = [load_file(file) for file in directory.glob("*.safetensors")]
    return {
        "case": f"{world.size} {stage} {dtype}",
        "shared": isinstance(reference, FrozenBase) and torch.equal(logprobs(reference), start),
        "codes": len(before) == 12 and all(map(torch.equal, before, codes(actor))),
        "resumed": whole == rest and same(finished, consolidated(again)),
        "read": same(saved, saved and read.state_dict()),
        "adapters only": all(".lora_" in name for file in files for name in file),
        "moved": float((last - start).abs().max()),
        "exported gap": gap,
        "decoded gap": decoded_gap(actor),
        "counts": list(parameter_counts(actor.module)),
    }


def others(world: World, root: Path) -> Iterator[Case]:
    """Trains a quantized critic, and compares a frozen reference with one that is the actor's base."""
    settings = quantized(root, 2, "fp32")
    critic_model = replace(settings.critic.model, quantization="nf4")
    critic = critic_of(replace(settings, critic=replace(settings.critic, model=critic_model)), world)
    before = [info.grad_norm for info in train(critic, range(3))]
    frozen = replace(settings.reference.model, attn_implementation="eager")
    apart = replace(settings, reference=replace(settings.reference, model=frozen))
    actor: HybridActor = actor_of(settings, world)
    reference = build_reference(apart, world, NEEDS, actor)
    ids, mask = batch(0, world)
    yield {
        "case": f"{world.size} others",
        "learns": all(norm > 0 for norm in before),
        "values": bool(torch.isfinite(critic(ids, mask, R)).all()),
        "frozen": type(reference) is FrozenModel
        and any(is_quantized(p) for p in reference.module.parameters()),
        "gap": float((logprobs(reference) - logprobs(actor)).abs().max()),
    }


def cases(world: World, root: Path, mode: str) -> Iterator[Case]:
    for stage, dtype in ((0, "fp32"), (0, "bf16"), (1, "fp32"), (2, "fp32"), (2, "bf16")):
        yield trained_actor(world, root, stage, dtype)
    yield from others(world, root)


def main() -> None:
    run_cases(cases)
