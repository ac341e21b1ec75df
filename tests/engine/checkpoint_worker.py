"""Trains, saves and loads small models of every kind for test_checkpoint.py; writes the results as JSON."""

from __future__ import annotations

import itertools
import json
import math
import random
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint import shards
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.engine.checkpoint.files import CheckpointError
from ppo_ds.engine.checkpoint.state import consolidated, load_model, model_bytes, save_model
from ppo_ds.engine.master_weights import PARTS, optimizer_shares
from ppo_ds.engine.trained import LRSchedule, StepInfo, TrainedModel
from ppo_ds.engine.zero import deepspeed_config
from tests.engine.rank_results import Case, run_cases, same
from tests.engine.recorded_reads import recorded_reads

NOT_PERSISTENT = {"stage3_param_persistence_threshold": 0}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Tiny(nn.Module):
    """Has tied weights, odd sizes, a norm, biases, dropout, a frozen parameter and a buffer that changes."""

    def __init__(self, dropout: float = 0.1, width: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.hidden = nn.Linear(7, width)
        self.norm = nn.LayerNorm(width)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(width, 7)
        self.head = nn.Linear(7, 13, bias=False)
        self.head.weight = self.embed.weight
        self.scalar = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.full((3,), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += 1
        return (
            self.head(self.out(self.drop(self.norm(torch.tanh(self.hidden(self.embed(ids)))))))
            * self.scalar
            * self.frozen.sum()
        )


def allow_fp16_on_cpu() -> None:
    """Lets DeepSpeed build fp16 engines on every CPU.

    It refuses CPUs without oneDNN's fp16, though torch supports fp16 arithmetic on every CPU.
    """
    get_accelerator().is_fp16_supported = lambda: True


def make(
    world: World,
    stage: int,
    dtype: str,
    *,
    raw: dict[str, Any] | None = None,
    offload: bool = False,
    seed: int = 0,
    dropout: float = 0.1,
    eight_bit: bool = False,
) -> TrainedModel:
    """An 8-bit optimizer gets a model whose matrices, vectors and shares of 2 ranks have 8-bit moments."""
    torch.manual_seed(seed)
    return TrainedModel(
        Tiny(dropout, width=6007 if eight_bit else 11).to(DTYPES[dtype]),
        world=world,
        deepspeed_config=deepspeed_config(
            stage=stage, dtype=dtype, offload_optimizer=offload, grad_clip=1.0, raw=raw or {}
        ),
        schedule=LRSchedule(1e-2, "cosine", 0.1, 0.1, 12),
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        eight_bit=eight_bit,
    )


def train(model: TrainedModel, steps: range) -> list[StepInfo]:
    """Trains on batches of 8 rows over all ranks, in two micro-batches; a batch depends only on the step."""
    infos = []
    for step in steps:
        ids = torch.randint(0, 13, (8, 5), generator=torch.Generator().manual_seed(100 + step))
        halves = ids.chunk(model.world.size)[model.world.rank].chunk(2)
        for i, rows in enumerate(halves):
            logits = model(rows).float()
            loss = nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
            )
            model.backward(loss / 32 * model.world.size, last=i == len(halves) - 1)
        infos.append(model.step())
    return infos


def exact(
    world: World, root: Path, stage: int, dtype: str, *, offload: bool, eight_bit: bool = False, **raw: Any
) -> Case:
    """Compares 10 steps with a save after 5 to a new engine that loads this save and trains 5 steps."""
    kind = {"raw": raw, "offload": offload, "eight_bit": eight_bit}
    options = "".join(f" {key}={value}" for key, value in raw.items())
    label = f"{stage} {dtype}{' offload' if offload else ''}{' 8-bit' if eight_bit else ''}{options}"
    directory = root / "exact" / f"{world.size} {label}"
    model = make(world, stage, dtype, **kind)
    train(model, range(5))
    save_model(model, directory)
    saved, generator = consolidated(model), torch.get_rng_state()
    whole = train(model, range(5, 10))
    finished = consolidated(model)

    resumed = make(world, stage, dtype, seed=1, **kind)
    with recorded_reads() as reads:
        load_model(resumed, directory)
    loaded = consolidated(resumed)
    torch.set_rng_state(generator)
    rest = train(resumed, range(5, 10))
    return {
        "case": label,
        "loaded": same(saved, loaded),
        "learned": (saved is None or not same(saved, finished)) and not any(info.skipped for info in whole),
        "steps": whole == rest,
        "weights": same(finished, consolidated(resumed)),
        "shards": len(list(directory.glob("shard-*"))),
        "reads_its_share": 0 < reads.tensor_bytes <= share_bytes(resumed),
    }


def share_bytes(model: TrainedModel) -> int:
    """Returns the bytes of the elements that the optimizer of this rank updates, with their moments.

    They include padding of less than one element for each parameter and rank.
    """
    return 4 * len(PARTS) * sum(share.numel() for share in optimizer_shares(model))


def exact_cases(world: World, root: Path, full: bool) -> Iterator[Case]:
    for stage, dtype in itertools.product((0, 1, 2, 3), ("fp32", "bf16")):
        yield exact(world, root, stage, dtype, offload=False)
    for dtype in ("fp32", "bf16"):
        yield exact(world, root, 3, dtype, offload=False, zero_optimization=NOT_PERSISTENT)
    if full:
        for stage in (0, 1, 2, 3):
            yield exact(world, root, stage, "fp16", offload=False)  # begins with skipped steps
        for stage, dtype in itertools.product((1, 2, 3), ("fp32", "bf16", "fp16")):
            # a loss scale without overflows: after one, ZeRO-1 and 2 in fp16 with offload never recover
            # (deepspeed 0.19.8)
            scale = {"fp16": {"initial_scale_power": 6}} if dtype == "fp16" else {}
            yield exact(world, root, stage, dtype, offload=True, **scale)


def write_reference(world: World, root: Path) -> None:
    """Writes a checkpoint, its weights and the next gradient norms, to be read by other numbers of ranks."""
    for stage, dtype in itertools.product((0, 2, 3), ("fp32", "bf16")):
        directory = root / "other" / f"{world.size}-{stage}-{dtype}"
        model = make(world, stage, dtype, dropout=0.0)
        train(model, range(5))
        save_model(model, directory)
        weights = consolidated(model)
        rest = train(model, range(5, 10))
        if weights is not None:
            save_file(
                {name: tensor.clone() for name, tensor in weights.items()}, directory / "weights.safetensors"
            )
            (directory / "rest.json").write_text(json.dumps([[info.grad_norm, info.lr] for info in rest]))


def read_references(world: World, root: Path) -> Iterator[Case]:
    for directory in sorted((root / "other").glob("*")):
        size, stage, dtype = directory.name.split("-")
        if int(size) == world.size:
            continue
        for own_stage in sorted({int(stage), 3}):
            model = make(world, own_stage, dtype, seed=1, dropout=0.0)
            load_model(model, directory)
            equal = same(load_file(directory / "weights.safetensors"), consolidated(model))
            rest = train(model, range(5, 10))
            expected = json.loads((directory / "rest.json").read_text())
            gap = max(
                abs(info.grad_norm - norm) / norm for info, (norm, _) in zip(rest, expected, strict=True)
            )
            same_lr = [info.lr for info in rest] == [lr for _, lr in expected]
            yield {
                "case": f"{directory.name} -> {world.size}-{own_stage}",
                "weights": equal,
                "gap": gap,
                "lr": same_lr,
            }


def draws() -> list[float]:
    return [torch.rand(()).item(), float(np.random.normal()), random.random(), random.gauss(0, 1)]


def whole_run(world: World, root: Path) -> Case:
    """Saves two models and the loop's state, fails a second save on one rank, and loads the first."""
    checkpoints = Checkpoints(root / "run", world=world, keep_last=2)
    models = {
        "actor": make(world, 3, "bf16", raw={"zero_optimization": NOT_PERSISTENT}),
        "critic": make(world, 2, "fp32", seed=5),
    }
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(7 + world.rank)
    draws()
    for model in models.values():
        train(model, range(3))
    before = [consolidated(model) for model in models.values()]
    path = checkpoints.save(3, models, {"kl": 0.1, "nan": math.nan, "names": ["a"]})
    drawn = draws()
    infos = [train(model, range(3, 6)) for model in models.values()]

    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
    try:
        checkpoints.save(6, models, {})
        full = "no error"
    except CheckpointError as error:
        full = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    world.barrier()

    left = sorted(file.name for file in checkpoints.root.iterdir())
    fresh = {
        "actor": make(world, 3, "bf16", raw={"zero_optimization": NOT_PERSISTENT}, seed=9),
        "critic": make(world, 2, "fp32", seed=9),
    }
    latest = checkpoints.latest()
    assert latest is not None
    state = checkpoints.load(latest, fresh)
    tensors = {
        role: sum(file.stat().st_size for file in (path / role).glob("*.safetensors")) for role in models
    }
    return {
        "case": "whole run",
        "bytes": [(tensors[role], model_bytes(model)) for role, model in models.items()],
        "full": world.gather_objects(full),
        "left": left,
        "latest": latest == path,
        "state": state,
        "weights": all(same(a, consolidated(model)) for a, model in zip(before, fresh.values(), strict=True)),
        "draws": draws() == drawn,
        "draws_differ": len({tuple(d) for d in world.gather_objects(drawn)}) == world.size,
        "steps": [train(model, range(3, 6)) for model in fresh.values()] == infos,
    }


def ties(world: World) -> Case:
    weights = consolidated(make(world, 3, "bf16"))
    assert (weights is None) == (not world.is_main)
    module = Tiny()
    return {
        "case": "ties",
        "keys": weights is None or list(weights) == list(module.state_dict()),
        "tied": weights is None or weights["head.weight"] is weights["embed.weight"],
        "dtypes": weights is None
        or {t.dtype for name, t in weights.items() if name != "seen"} == {torch.bfloat16},
        "shapes": weights is None
        or all(weights[name].shape == t.shape for name, t in module.state_dict().items()),
    }


def eight_bit_cases(world: World, root: Path) -> Iterator[Case]:
    """Resumes with 8-bit moments, also at another stage, where the blocks of the moments are others."""
    for stage, dtype in itertools.product((0, 1, 2, 3), ("fp32", "bf16")):
        raw = {"zero_optimization": NOT_PERSISTENT} if stage == 3 else {}
        yield exact(world, root, stage, dtype, offload=False, eight_bit=True, **raw)
    for stage, dtype in ((0, "fp32"), (2, "bf16"), (3, "bf16")):
        (directory,) = (root / "exact").glob(f"{world.size} {stage} {dtype} 8-bit*")
        norms = []
        for own_stage in (stage, 5 - stage if stage else 3):
            model = make(world, own_stage, dtype, seed=1, dropout=0.0, eight_bit=True)
            load_model(model, directory)
            norms.append([info.grad_norm for info in train(model, range(5, 10))])
        states = list(model.engine.basic_optimizer.state.values())
        yield {
            "case": f"{stage} {dtype} moved",
            "gap": max(abs(a - b) / b for a, b in zip(*norms, strict=True)),
            "codes": all(state["state1"].dtype == torch.uint8 for state in states),
            "freed": not any("exp_avg" in state for state in states),
        }


def cases(world: World, root: Path, mode: str) -> Iterator[Case]:
    if mode == "eight_bit":
        yield from eight_bit_cases(world, root)
        return
    if mode != "references":
        yield from exact_cases(world, root, full=mode == "full")
    if mode == "full":
        return
    yield from read_references(world, root)
    if mode == "references":
        return
    write_reference(world, root)
    yield ties(world)
    if world.size > 1:
        yield whole_run(world, root)


def main() -> None:
    allow_fp16_on_cpu()
    shards.SHARD_BYTES = 500  # several shards, even for a tiny model
    run_cases(cases)
