"""Builds roles that share one model on every ZeRO stage for test_sharing.py; writes the results as JSON."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from ppo_ds.assemble.reward_models import RewardModels
from ppo_ds.assemble.roles import (
    CLASSIFIER,
    CriticStart,
    build_actor,
    build_critic,
    build_reference,
    ppo_needs,
)
from ppo_ds.config.reading import read
from ppo_ds.config.schema import Config, inherit
from ppo_ds.config.sections.models import FrozenZeroConfig, ModelConfig
from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.state import consolidated, load_model, save_model
from ppo_ds.engine.frozen import FrozenBase, FrozenModel
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.models.value import load_reward_model
from tests.engine.rank_results import Case, run_cases

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
V, T, R, ROWS = 19, 8, 5, 8
NEEDS = ppo_needs(V, T)


def config(root: Path, stage: int, dtype: str, lora: int = 2, reference: str = "actor") -> Config:
    role = {
        "zero": {"stage": stage},
        "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {},
        "optim": {"lr": 1e-2, "schedule": "constant", "warmup_ratio": 0.0},
        "lora": {"rank": lora},
    }
    tree = {
        "run": {"steps": 1},
        "actor": {**role, "model": {"path": str(root / "actor"), "dtype": dtype}},
        "critic": {**role, "init": "reward"},
        "reference": {"model": {"path": str(root / reference)}},
        "rollout": {"prompts_per_step": 2},
        "sampling": {"max_new_tokens": R},
        "data": {"path": "none.jsonl"},
        "reward": {"_target_": CLASSIFIER, "model": {"path": str(root / "reward"), "dtype": dtype}},
    }
    config, problems = read(Config, tree)
    assert not problems, problems
    return inherit(config)


def storages() -> dict[int, torch.UntypedStorage]:
    """Maps addresses to the storages of all tensors of this process.

    As long as the result is kept, no later tensor can have one of these addresses.
    """
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def taken_since(before: dict[int, torch.UntypedStorage]) -> int:
    """Returns the bytes of new tensors; memory that was freed meanwhile is not subtracted."""
    return sum(storage.nbytes() for address, storage in storages().items() if address not in before)


def batch() -> tuple[Tensor, Tensor]:
    """Returns texts of different lengths, padded on the right, the same on every rank."""
    ids = torch.randint(0, V, (ROWS, T), generator=torch.Generator().manual_seed(1))
    return ids, torch.arange(T) < torch.tensor([T - row % 4 for row in range(ROWS)])[:, None]


def scored(scorer: FrozenModel) -> Tensor:
    with scorer.resident():
        return scorer(*batch(), token_type_ids=None)


@torch.no_grad()
def by_transformers(folder: Path, dtype: torch.dtype) -> Tensor:
    """Computes scores with transformers, one unpadded text at a time."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype)
    model.config.pad_token_id = None
    return torch.stack(
        [model(input_ids=ids[mask][None]).logits[0, 0].float() for ids, mask in zip(*batch(), strict=True)]
    )


def train(critic: TrainedModel, steps: int) -> None:
    """Trains all values towards 1."""
    ids, mask = batch()
    for _ in range(steps):
        critic.backward((critic(ids, mask, R) - 1).square().mean() * critic.world.size, last=True)
        critic.step()


def shared_reward(world: World, root: Path, stage: int, dtype: str, lora: int = 2) -> Case:
    settings = config(root, stage, dtype, lora)
    model = ModelConfig(**settings.reward["model"])
    start = CriticStart(model, zero_head=False, key="reward.model.path", reward=model)
    notes: list[str] = []

    def build() -> tuple[TrainedModel, FrozenModel, int]:
        """Returns the critic, the reward model, and the bytes that the reward model adds."""
        critic, place = build_critic(settings, start, world, NEEDS, 20), RewardModels(world, notes.append)
        place.offer(critic, start, settings)
        before = storages()
        module, scorer = place(load_reward_model, model, FrozenZeroConfig(), "reward.model.path")
        assert module.vocab_size == V and module.is_decoder
        return critic, scorer, taken_since(before)

    critic, scorer, taken = build()
    first, values = scored(scorer), critic(*batch(), R).detach()
    train(critic, 5)
    moved = (critic(*batch(), R).detach() - values).abs().max()
    trained, last = critic(*batch(), R).detach(), scored(scorer)
    found = {
        "case": f"reward zero{stage} {dtype}" + ("" if lora else " whole"),
        "shared": isinstance(scorer, FrozenBase),
        "taken": taken,
        "model": sum(p.nbytes for p in load_reward_model(model).parameters()),
        "gap": float((first - by_transformers(root / "reward", DTYPES[dtype])).abs().max()),
        "stays": torch.equal(first, last),
        "spread": float(first.std()),
        "moved": float(moved),
        "critic undisturbed": torch.equal(critic(*batch(), R).detach(), trained)
        and after_a_failure(scorer, critic, trained),
        "notes": notes[:1],
    }
    state = consolidated(critic) or {}
    found["only what was there"] = not any("kept" in name for name in state)
    if lora:
        save_model(critic, root / "saved" / str(found["case"]))
        again, scorer, _ = build()
        load_model(again, root / "saved" / str(found["case"]))
        found["resumed"] = torch.equal(scored(scorer), first) and torch.equal(
            again(*batch(), R).detach(), trained
        )
        again.engine.destroy()
    critic.engine.destroy()
    return found


def after_a_failure(scorer: FrozenModel, critic: TrainedModel, trained: Tensor) -> bool:
    """Returns whether the critic has its trained adapters and head after the reward's forward has raised."""
    raising = critic.module.model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    try:
        scored(scorer)
    except ZeroDivisionError:
        raising.remove()
        return torch.equal(critic(*batch(), R).detach(), trained)
    return False


def reference_of_adapters(world: World, root: Path, reference: str) -> Case:
    """Measures the memory of a reference beside an actor with adapters."""
    settings = config(root, 0, "fp32", reference=reference)
    actor = build_actor(settings, world, NEEDS, 4, lambda _: nullcontext())
    before = storages()
    kept = build_reference(settings, world, NEEDS, actor)
    found = {
        "case": f"reference {reference}",
        "taken": taken_since(before),
        "shared": isinstance(kept, FrozenBase),
    }
    found["actor"] = sum(p.nbytes for name, p in actor.module.named_parameters() if ".lora_" not in name)
    actor.engine.destroy()
    return found


def cases(world: World, root: Path, mode: str) -> Iterator[Case]:
    for reference in ("actor", "other"):
        yield reference_of_adapters(world, root, reference)
    for stage, dtype in ((0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "bf16")):
        yield shared_reward(world, root, stage, dtype)
    yield shared_reward(world, root, 0, "fp32", lora=0)


def main() -> None:
    run_cases(cases)
