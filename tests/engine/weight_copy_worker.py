"""Trains engines of every kind with weight copies for test_weight_copy.py; writes the results as JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint import shards
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.engine.checkpoint.state import consolidated, load_weight_copy, save_weight_copy
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.master_weights import PARTS, WEIGHT, MasterWeights
from ppo_ds.engine.trained import LRSchedule, TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.engine.zero import deepspeed_config
from ppo_ds.models.policy import Policy, unsharded_twin
from tests.engine.checkpoint_worker import DTYPES, NOT_PERSISTENT, Tiny, make, train
from tests.engine.rank_results import Case, run_cases, same

DECAY = 0.75
IDS = torch.randint(0, 13, (3, 5), generator=torch.Generator().manual_seed(7))
Weights = dict[str, Tensor]


class Interrupted(Exception):
    """Raised inside swapped() on purpose."""


def trained(model: TrainedModel) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.module.named_parameters() if p.requires_grad}


def weights(model: TrainedModel) -> Weights:
    """Returns the gathered fp32 weights of DeepSpeed; without ZeRO they are the parameters."""
    if model.zero_stage == 0:
        return {name: p.detach().clone() for name, p in trained(model).items()}
    return {name: safe_get_full_fp32_param(p).clone() for name, p in trained(model).items()}


def moments(model: TrainedModel) -> Weights:
    masters = MasterWeights(model)
    return {
        f"{part}/{name}": masters.get(name, part).clone()
        for name in masters.parameters
        for part in PARTS
        if part != WEIGHT
    }


def module_weights(model: TrainedModel) -> Weights:
    """Returns the weights that forwards use, on rank 0, without the buffer that counts forwards."""
    return {name: x for name, x in (consolidated(model) or {}).items() if name != "seen"}


def everything(model: TrainedModel) -> Weights:
    return (
        weights(model) | moments(model) | {f"module/{name}": x for name, x in module_weights(model).items()}
    )


def shares(model: TrainedModel) -> list[Tensor]:
    """Returns the bits of this rank's master weights, padding included."""
    optimizer = model.engine.optimizer
    flats = getattr(optimizer, "fp32_partitioned_groups_flat", None) or [
        flat for group in optimizer.param_groups for flat in group["params"]
    ]
    return [flat.detach().clone().view(torch.int32) for flat in flats]


def same_bits(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def logits(model: TrainedModel) -> Tensor:
    with torch.no_grad():
        return model(IDS)


def plain_logits(given: Weights, dtype: torch.dtype) -> Tensor:
    """Computes the logits of a plain module with these weights."""
    module = Tiny(0.0).to(dtype)
    module.load_state_dict(given, strict=False)
    with torch.no_grad():
        return module(IDS)


def copy_of(model: TrainedModel) -> WeightCopy:
    return WeightCopy(model, chunk_elements=16)  # several chunks, even for a tiny model


def of(copy: WeightCopy) -> Weights:
    with copy.swapped():
        return weights(copy.model)


def gap(a: Weights, b: Weights) -> float:
    return max(float((a[name].double() - b[name].double()).abs().max()) for name in a)


def refused(action: Any) -> bool:
    try:
        action()
    except AssertionError:
        return True
    return False


def enter(copy: WeightCopy) -> None:
    with copy.swapped():
        pass


def followed(world: World, root: Path, stage: int, dtype: str, *, offload: bool = False, **zero: Any) -> Case:
    """Trains with an average and a lagging copy, swaps, saves and resumes; compares to a plain run."""
    label = f"{stage} {dtype}{' offload' if offload else ''}{''.join(f' {key}' for key in zero)}"
    kind: dict[str, Any] = {"raw": {"zero_optimization": zero}, "offload": offload, "dropout": 0.0}
    undisturbed = make(world, stage, dtype, **kind)
    whole = train(undisturbed, range(6))

    model = make(world, stage, dtype, **kind)
    ema, lagged = copy_of(model), copy_of(model)
    expected = {name: w.double() for name, w in weights(model).items()}
    infos, third = [], {}
    for step in range(5):
        infos += train(model, range(step, step + 1))
        ema.ema_update(DECAY)
        now = weights(model)
        expected = {name: DECAY * e + (1 - DECAY) * now[name].double() for name, e in expected.items()}
        if step == 2:
            lagged.copy()
            third = now

    before, bits, outside = everything(model), shares(model), logits(model)
    with ema.swapped():
        inside, in_module, there = weights(model), module_weights(model), logits(model)
        no_training = (
            refused(model.step)
            and refused(lambda: model.backward(torch.zeros(()), last=True))
            and refused(lambda: enter(lagged))
        )
    back = (
        same(before, everything(model))
        and same_bits(bits, shares(model))
        and torch.equal(outside, logits(model))
    )
    cast = {name: w.to(DTYPES[dtype]) for name, w in inside.items()}

    checkpoints = Checkpoints(root / "followed" / f"{world.size} {label}", world=world, keep_last=1)
    path = checkpoints.save(5, {"actor": model}, {}, copies={"ema": ema, "lagged": lagged})
    kept = same(before, everything(model))
    resumed = make(world, stage, dtype, seed=1, **kind)
    both = copy_of(resumed), copy_of(resumed)
    checkpoints.load(path, {"actor": resumed}, dict(zip(("ema", "lagged"), both, strict=True)))
    loaded = same(of(both[0]), inside) and same(of(both[1]), third) and same(before, everything(resumed))
    infos += train(model, range(5, 6))
    train(resumed, range(5, 6))
    for average in (ema, both[0]):
        average.ema_update(DECAY)

    last, averaged = weights(model), of(ema)
    lagged.ema_update(1.0)
    unmoved = same(of(lagged), third)
    lagged.ema_update(0.0)
    return {
        "case": label,
        "gap": gap(inside, expected),
        "moved": gap(inside, now),
        "module": all(torch.equal(in_module[name], cast[name]) for name in cast) if world.is_main else True,
        "forward": torch.allclose(
            there, plain_logits(cast, DTYPES[dtype]), atol=1e-6 if dtype == "fp32" else 1e-2
        ),
        "other forward": float((there - outside).abs().max()),
        "back": back,
        "no training": no_training,
        "lagged": unmoved and same(of(lagged), last),
        "undisturbed": infos == whole and same(everything(model), everything(undisturbed)),
        "kept": kept,
        "loaded": loaded,
        "resumed": same(everything(model), everything(resumed)) and same(averaged, of(both[0])),
    }


def interrupted(world: World, root: Path, stage: int, dtype: str) -> Case:
    """Raises inside swapped() on all ranks, then only on the last rank, which must not wait."""
    model = make(world, stage, dtype, raw={"zero_optimization": NOT_PERSISTENT}, dropout=0.0)
    copy = copy_of(model)
    train(model, range(4))
    before, bits, outside = everything(model), shares(model), logits(model)
    found = []
    left = root / f"left {world.size} {stage} {dtype}"
    for ranks in (range(world.size), [world.size - 1]):
        try:
            with copy.swapped():
                if world.rank in ranks:
                    raise Interrupted
                waited = wait_for(left)
        except Interrupted:
            waited = True
        found.append(waited and same_bits(bits, shares(model)))
        if len(ranks) == 1:
            left.touch()
        found += [torch.equal(outside, logits(model)), same(before, everything(model))]
    return {"case": f"interrupted {stage} {dtype}", "found": all(found)}


def wait_for(file: Path) -> bool:
    deadline = time.monotonic() + 120
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return file.exists()


def generated(world: World, stage: int, dtype: str, only: str) -> Case:
    """Generates outside, inside and after swapped(); trains parameters whose name contains ``only``."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=0,
    )
    policy = Policy(LlamaForCausalLM(config).to(DTYPES[dtype]), temperature=1.0)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(only in name)
    actor = HybridActor(
        policy,
        make_inference_copy=unsharded_twin,
        timer=lambda _: nullcontext(),
        world=world,
        deepspeed_config=deepspeed_config(
            stage=stage, dtype=dtype, raw={"zero_optimization": NOT_PERSISTENT}
        ),
        schedule=LRSchedule(0.1, "constant", 0.0, 0.0, 10),
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
    )
    copy = copy_of(actor)
    start = next_token_logits(actor)
    for _ in range(4):
        actor.backward(actor(IDS, torch.ones_like(IDS), 3).logprobs.sum(), last=True)
        actor.step()
    outside = next_token_logits(actor)
    with copy.swapped():
        inside = next_token_logits(actor)
        inside_again = next_token_logits(actor)
    with actor.generation_mode():
        no_swap = refused(lambda: enter(copy))
    return {
        "case": f"generated {stage} {dtype} {only}",
        "start": torch.equal(inside, start) and torch.equal(inside_again, start),
        "moved": float((inside - outside).abs().max()),
        "back": torch.equal(next_token_logits(actor), outside),
        "not inside generation": no_swap,
    }


def next_token_logits(actor: HybridActor) -> Tensor:
    with torch.no_grad(), actor.generation_mode():
        return actor.lm(IDS, use_cache=False).logits.clone()


def write_reference(world: World, root: Path, stage: int, dtype: str) -> None:
    model = make(world, stage, dtype, dropout=0.0)
    copy = copy_of(model)
    for step in range(4):
        train(model, range(step, step + 1))
        copy.ema_update(DECAY)
    directory = root / "ranks" / f"{world.size}-{stage}-{dtype}"
    save_weight_copy(copy, directory)
    average = of(copy)
    if world.is_main:
        save_file(average, directory / "average.safetensors")


def read_references(world: World, root: Path, tag: str) -> Iterator[Case]:
    """Reads the files of other numbers of ranks, and writes them again with ``tag`` in their names."""
    for directory in sorted((root / "ranks").glob("*")):
        size, stage, dtype, *tags = directory.name.split("-")
        if int(size) == world.size:
            continue
        for own_stage in sorted({int(stage), 3}):
            copy = copy_of(make(world, own_stage, dtype, seed=1, dropout=0.0))
            load_weight_copy(copy, directory)
            found, written = of(copy), load_file(directory / "average.safetensors")
            yield {"case": f"{directory.name} -> {world.size}-{own_stage}", "same": same(found, written)}
            again = root / "ranks" / f"{world.size}-{own_stage}-{dtype}-{tag}{stage}"
            save_weight_copy(copy, again)
            if world.is_main:
                save_file(written, again / "average.safetensors")


def cases(world: World, root: Path, mode: str) -> Iterator[Case]:
    if mode == "references":
        yield from read_references(world, root, "again")
        return
    for stage in (0, 1, 2, 3):
        for dtype in ("fp32", "bf16"):
            yield followed(world, root, stage, dtype, **(NOT_PERSISTENT if stage == 3 else {}))
    yield followed(world, root, 3, "bf16")  # every parameter is persistent
    yield followed(world, root, 3, "bf16", sub_group_size=30, **NOT_PERSISTENT)
    yield followed(world, root, 2, "bf16", offload=True)
    yield followed(world, root, 3, "fp32", offload=True, **NOT_PERSISTENT)
    yield followed(world, root, 3, "bf16", offload=True, offload_param={"device": "cpu"}, **NOT_PERSISTENT)
    for stage, dtype in ((0, "fp32"), (2, "bf16"), (3, "bf16")):
        yield interrupted(world, root, stage, dtype)
    for stage, dtype, only in ((2, "fp32", ""), (3, "fp32", ""), (3, "bf16", "layers.1.mlp")):
        yield generated(world, stage, dtype, only)
    if world.size == 1:
        yield from read_references(world, root, "from")
        return
    for stage, dtype in ((0, "fp32"), (2, "bf16"), (3, "bf16")):
        write_reference(world, root, stage, dtype)


def main() -> None:
    shards.SHARD_BYTES = 500
    run_cases(cases)
