"""Trains, saves and loads tiny models with adapters for test_lora_engines.py; writes the results as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from ppo_ds.assemble.roles import CriticStart, build_actor, build_critic, build_reference, ppo_needs
from ppo_ds.config.reading import read
from ppo_ds.config.schema import Config, inherit
from ppo_ds.config.types import replace
from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.state import consolidated, load_model, save_model
from ppo_ds.engine.frozen import FrozenBase, FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.master_weights import MasterWeights
from ppo_ds.engine.trained import StepInfo, TrainedModel, parameter_counts
from ppo_ds.errors import UserError
from tests.engine.rank_results import Case, run_cases, same

V, P, R, ROWS = 19, 3, 5, 8
NEEDS = ppo_needs(V, P + R)
LR, LORA_LR, STEPS = 1e-3, 1e-2, 10
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def config(
    root: Path, stage: int, dtype: str = "fp32", *, checkpointing: bool = False, **zero: bool
) -> Config:
    role = {
        "zero": {"stage": stage, **zero},
        "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {},
        "optim": {"lr": LR, "weight_decay": 0.1, "schedule": "constant", "warmup_ratio": 0.0},
        "lora": {"rank": 2, "lr": LORA_LR},
    }
    tree = {
        "run": {"steps": 1, "seed": 3},
        "actor": {
            **role,
            "model": {"path": str(root / "actor"), "dtype": dtype, "gradient_checkpointing": checkpointing},
        },
        "critic": role,
        "reference": {"zero": {"stage": 3 if stage == 3 else 0}},
        "rollout": {"prompts_per_step": 2},
        "sampling": {"max_new_tokens": R},
        "data": {"path": "none.jsonl"},
        "reward": {"_target_": "none"},
    }
    config, problems = read(Config, tree)
    assert not problems, problems
    return inherit(config)


def actor_of(config: Config, world: World) -> HybridActor:
    return build_actor(config, world, NEEDS, STEPS, lambda _: nullcontext())


def critic_of(config: Config, world: World) -> TrainedModel:
    start = CriticStart(config.actor.model, zero_head=True, key="actor.model.path")
    return build_critic(config, start, world, NEEDS, STEPS)


def batch(step: int, world: World) -> tuple[Tensor, Tensor]:
    """Returns this rank's rows of a global batch, padded on both sides; it depends only on the step."""
    ids = torch.randint(0, V, (ROWS, P + R), generator=torch.Generator().manual_seed(100 + step))
    mask = torch.ones_like(ids, dtype=torch.bool)
    for row in range(ROWS):
        mask[row, : row % P] = False
        mask[row, P + R - row % 4 :] = False
    return ids.chunk(world.size)[world.rank], mask.chunk(world.size)[world.rank]


def logprobs(model: TrainedModel | FrozenModel, step: int = 0) -> Tensor:
    ids, mask = batch(step, SimpleNamespace(rank=dist.get_rank(), size=dist.get_world_size()))
    with torch.no_grad():
        return model(ids, mask, R).logprobs.masked_fill(~mask[:, -R:], 0.0)


def train(model: TrainedModel, steps: range) -> list[StepInfo]:
    """Trains a weighted sum of log-probs, or values towards 1, with two micro-batches per step."""
    infos = []
    for step in steps:
        halves = [half.chunk(2) for half in batch(step, model.world)]
        for i, (ids, mask) in enumerate(zip(*halves, strict=True)):
            out = model(ids, mask, R)
            if isinstance(model, HybridActor):
                weights = torch.sin(ids[:, -R:].float()) * mask[:, -R:]
                loss = -(out.logprobs * weights).sum()
            else:
                loss = ((out[:, :R] - 1).square() * mask[:, -R:]).sum()
            model.backward(loss / (ROWS * R) * model.world.size, last=i == 1)
        infos.append(model.step())
    return infos


@torch.no_grad()
def plain_logprobs(lm: nn.Module, world: World) -> Tensor:
    """Computes log-probs with only transformers, one unpadded row at a time."""
    found = torch.zeros(ROWS // world.size, R)
    for row, (ids, mask) in enumerate(zip(*batch(0, world), strict=True)):
        n = int(mask[-R:].sum())
        kept = ids[mask]
        table = lm(input_ids=kept[None]).logits[0].float().log_softmax(-1)
        found[row, :n] = table[-n - 1 : -1].gather(1, kept[-n:, None])[:, 0]
    return found


def adapters_after_a_failure(reference: FrozenModel, actor: HybridActor) -> bool:
    """Returns whether the adapters are enabled after the forward of the reference has raised."""
    before = logprobs(actor)
    layer = actor.module.lm.model.norm
    raising = layer.register_forward_hook(lambda *_: 1 / 0)
    try:
        logprobs(reference)
    except ZeroDivisionError:
        raising.remove()
        return torch.equal(logprobs(actor), before)
    return False


@torch.no_grad()
def decoded_gap(actor: HybridActor) -> float:
    """Returns the largest difference between the log-probs of the decoding model and of the engine."""
    ids, mask = batch(0, actor.world)
    with actor.generation_mode():
        logits = actor.lm(
            input_ids=ids, attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp(min=0)
        ).logits[:, -R - 1 : -1]
    decoded = (
        logits.float().log_softmax(-1).gather(2, ids[:, -R:, None])[..., 0].masked_fill(~mask[:, -R:], 0.0)
    )
    return float((decoded - logprobs(actor)).abs().max())


@torch.no_grad()
def exported_gaps(actor: HybridActor, folder: Path, base: Path) -> dict[str, float]:
    """Returns how far the log-probs of the exported model and adapter, loaded without ppo_ds, are off."""
    state, expected = consolidated(actor), logprobs(actor)
    if state is None:
        return {}
    weights = {name.removeprefix("lm."): x for name, x in state.items()}
    actor.module.save_adapter(folder / "adapter", weights)
    actor.module.save(folder / "model", weights)
    merged = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    on_base = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder / "adapter"
    )
    gaps = {
        name: plain_logprobs(lm, actor.world) - expected
        for name, lm in (("model", merged), ("adapter", on_base))
    }
    return {name: float(gap.abs().max()) for name, gap in gaps.items()}


def trained_actor(world: World, root: Path, stage: int, dtype: str = "fp32", **how: bool) -> Case:
    label = " ".join([f"{world.size} zero{stage} {dtype}", *how])
    settings = config(root, stage, dtype, **how)
    actor = actor_of(settings, world)
    reference = build_reference(settings, world, NEEDS, actor)
    base = AutoModelForCausalLM.from_pretrained(root / "actor", dtype=DTYPES[dtype])
    first, start = consolidated(actor), logprobs(reference)
    found = {"case": label, "reference starts as the actor": torch.equal(logprobs(actor), start)}
    found["norms"] = [info.grad_norm for info in train(actor, range(5))]
    trained, last, stays = logprobs(actor), consolidated(actor), logprobs(reference)
    if first is not None and last is not None:
        adapters = {name: x for name, x in last.items() if ".lora_" in name}
        found |= {
            "base untouched": all(
                torch.equal(first[name], x) for name, x in last.items() if name not in adapters
            ),
            "all adapters changed": len(adapters) == 28
            and not any(torch.equal(first[name], x) for name, x in adapters.items()),
            "B starts at 0, A does not": all(
                bool((first[name] == 0).all()) == (".lora_B." in name) for name in adapters
            ),
        }
        save_file(
            {
                f"{when}/{name}": state[name].clone()
                for when, state in (("first", first), ("last", last))
                for name in adapters
            },
            root / f"{label}.safetensors",
        )
    found |= {
        "shared": isinstance(reference, FrozenBase),
        "reference stays": torch.equal(start, stays),
        "adapters on again": torch.equal(logprobs(actor), trained)
        and adapters_after_a_failure(reference, actor),
        "gap to the base": float((stays - plain_logprobs(base, world)).abs().max()),
        "moved": float((trained - stays).abs().max()),
        "decoded gap": decoded_gap(actor),
        "exported gaps": exported_gaps(actor, root / "exported" / label, root / "actor"),
        "counts": list(parameter_counts(actor.module)),
    }
    actor.engine.destroy()
    return found


def trained_critic(world: World, root: Path, stage: int) -> Case:
    """Measures the updates of the head and of B in the first steps, and checks the export."""
    critic = critic_of(config(root, stage), world)
    moves, lrs = [], []
    for step in range(5):
        lrs += [info.lr for info in train(critic, range(step, step + 1))]
        state = consolidated(critic) or {}
        moves.append(
            {
                kind: max((float(x.abs().max()) for name, x in state.items() if kind in name), default=0.0)
                for kind in ("score", "lora_B")
            }
        )
    ids, mask = batch(0, world)
    mask[:] = True
    with torch.no_grad():
        values = critic(ids, mask, R)
    gap = None
    if state:
        critic.module.save(
            root / "exported" / f"critic {world.size} {stage}",
            {name.removeprefix("model."): x for name, x in state.items()},
        )
        plain = AutoModelForSequenceClassification.from_pretrained(
            root / "exported" / f"critic {world.size} {stage}", dtype=torch.float32
        )
        with torch.no_grad():
            gap = float(
                (plain.score(plain.model(ids).last_hidden_state)[:, -R - 1 :, 0] - values).abs().max()
            )
    critic.engine.destroy()
    return {
        "case": f"critic {world.size} zero{stage}",
        "moves": moves,
        "lrs": lrs,
        "gap": gap,
        "values": float(values.abs().max()),
    }


def resumed(world: World, root: Path, stage: int, dtype: str, role: str) -> Case:
    """Compares 8 steps with a save after 4 to a new engine that loads this save and trains 4 steps."""
    make = actor_of if role == "actor" else critic_of
    settings = config(root, stage, dtype)
    directory = root / "resumed" / f"{world.size} {stage} {dtype} {role}"
    model = make(settings, world)
    train(model, range(4))
    save_model(model, directory)
    saved = consolidated(model)
    whole = train(model, range(4, 8))
    finished = consolidated(model)
    again = make(settings, world)
    load_model(again, directory)
    loaded = consolidated(again)
    rest = train(again, range(4, 8))
    found = {
        "case": f"resumed {world.size} zero{stage} {dtype} {role}",
        "loaded": same(saved, loaded),
        "steps": whole == rest,
        "weights": same(finished, consolidated(again)) and (saved is None or not same(saved, finished)),
        "only what is trained": all(
            ".lora_" in name or name == "model.score.weight" for name in MasterWeights(again).parameters
        ),
    }
    for one in (model, again):
        one.engine.destroy()
    return found


def refused(world: World, root: Path) -> Case:
    """Collects the errors of loading adapters with other settings."""
    directory = root / "refused"

    def actor(**lora: Any) -> HybridActor:
        settings = config(root, 0)
        return actor_of(
            replace(settings, actor=replace(settings.actor, lora=replace(settings.actor.lora, **lora))), world
        )

    def complaint(**lora: Any) -> str:
        model = actor(**lora)
        try:
            load_model(model, directory)
        except UserError as error:
            return str(error)
        finally:
            model.engine.destroy()
        return ""

    saved = actor()
    save_model(saved, directory)
    saved.engine.destroy()
    return {
        "case": "refused",
        "same": complaint(),
        "written out": complaint(alpha=4.0),  # the default, which is twice the rank
        "alpha": complaint(alpha=64.0),
        "rank": complaint(rank=4),
        "targets": complaint(targets=["q_proj"]),
    }


def cases(world: World, root: Path, mode: str) -> Iterator[Case]:
    for stage in (0, 3) if world.size == 1 else (0, 1, 2, 3):
        yield trained_actor(world, root, stage)
    if world.size == 1:
        yield resumed(world, root, 0, "fp32", "actor")
        yield refused(world, root)
        return
    for stage in (2, 3):
        yield trained_actor(world, root, stage, "bf16")
    yield trained_actor(world, root, 3, checkpointing=True)
    yield trained_actor(world, root, 2, offload_optimizer=True)
    yield trained_actor(world, root, 3, offload_optimizer=True, offload_params=True)
    for stage in (0, 3):
        yield trained_critic(world, root, stage)
    for stage, dtype, role in ((2, "bf16", "actor"), (3, "bf16", "actor"), (3, "fp32", "critic")):
        yield resumed(world, root, stage, dtype, role)


def main() -> None:
    run_cases(cases)
