"""Trains policies with and without ZeRO-3 for test_head_engines.py; writes the results as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn

from ppo_ds.compute import matmul
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.trained import LRSchedule, TrainedModel
from ppo_ds.engine.zero import deepspeed_config
from ppo_ds.models import lm_head
from ppo_ds.models.lm_head import LMHead
from ppo_ds.models.lora import add_adapters
from ppo_ds.models.policy import Policy, load_policy, sharded_loading
from tests.engine.rank_results import Case, run_cases

V, T, R, ROWS, STEPS = 29, 9, 5, 4, 5
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {},
    "biased": {},
    "capped": {},
    "tied, checkpointed": {"checkpointing": True},
    "tied, adapters": {"lora": True},
    "tied, values": {"value_head": True},
    "llama, bf16": {"dtype": "bf16"},
    "capped, logits as on a GPU": {},
    "llama, oneDNN": {},
    "tied, checkpointed, oneDNN": {"checkpointing": True},
    "tied, adapters, oneDNN": {"lora": True},
    "biased, oneDNN": {},
}


def load(
    folder: Path,
    dtype: str = "fp32",
    checkpointing: bool = False,
    lora: bool = False,
    value_head: bool = False,
) -> Policy:
    policy = load_policy(
        ModelConfig(
            path=str(folder), dtype=dtype, attn_implementation="eager", gradient_checkpointing=checkpointing
        ),
        temperature=0.7,
        value_head=value_head,
        key="actor.model.path",
    )
    if lora:
        add_adapters(policy.lm, rank=2, alpha=4, targets=None, seed=1, key="actor.lora")
    return policy


def trained(world: World, folder: Path, stage: int, dtype: str = "fp32", **options: Any) -> TrainedModel:
    raw = {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if stage == 3 else {}
    config = deepspeed_config(stage=stage, dtype=dtype, grad_clip=1.0, raw=raw)
    with sharded_loading(config) if stage == 3 else nullcontext():
        policy = load(folder, dtype, **options)
    schedule = LRSchedule(1e-2, "constant", 0.0, 0.0, STEPS)
    return TrainedModel(
        policy,
        world=world,
        deepspeed_config=config,
        schedule=schedule,
        betas=(0.9, 0.95),
        eps=1e-6,
        weight_decay=0.0,
    )


def step(model: TrainedModel) -> float:
    """Runs one optimizer step and returns the gradient norm.

    The step has two micro-batches of different widths, and a forward without gradients between them.
    """
    world = model.world
    draw = torch.Generator().manual_seed(model.steps)
    ids = torch.randint(1, V, (ROWS * world.size, T), generator=draw).chunk(world.size)[world.rank]
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, 2 + world.rank :], mask[1, :2] = False, False
    mask[0, : T - R] = True
    for i, part in enumerate((slice(0, 3), slice(3, 4))):
        out = model(ids[part], mask[part], R, with_entropy=True, entropy_gradient=i == 0)
        response = mask[part, T - R :]
        loss = -(out.logprobs * torch.sin(ids[part, T - R :].float()))[response].sum()
        if i == 0:
            loss = loss + 0.1 * out.entropy[response].sum()
        if out.values is not None:
            loss = loss + (out.values[:, :-1] - 1)[response].square().sum()
        model.backward(loss / 40, last=i == 1)
        with torch.no_grad():
            model(ids, mask, R)
    return model.step().grad_norm


def case(world: World, root: Path, kind: str) -> Case:
    options = KINDS[kind]
    sharded, whole = (trained(world, root / kind.partition(",")[0], stage, **options) for stage in (3, 0))
    start = consolidated(whole)
    norms = []
    for _ in range(STEPS):
        with products_of("onednn" if "oneDNN" in kind else "torch"):
            norm = step(sharded)
        norms.append((norm, step(whole)))
    head = sharded.module.lm.get_output_embeddings()
    ours, theirs = consolidated(sharded), consolidated(whole)
    return {
        "case": kind,
        "fused": isinstance(head, LMHead) and all(sharded.module.head_probe),
        "released": released(sharded.module),
        "norms": norms,
        "gap": 0.0 if ours is None else distance(ours, theirs),
        "moved": 0.0 if ours is None else distance(start, theirs),
    }


@contextmanager
def products_of(library: matmul.Library) -> Iterator[None]:
    """Computes all fp32 products of linear layers and heads by the library, however small they are."""
    smallest = 0 if library == "onednn" else matmul.SMALLEST
    with mock.patch.object(matmul, "SMALLEST", smallest), mock.patch.object(matmul, "_library", library):
        yield


def released(module: nn.Module) -> bool:
    return all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE and p.numel() == 0 for p in module.parameters())


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name].float() - b[name].float()).abs().max()) for name in a)


def cases(world: World, root: Path, mode: str) -> Iterator[Case]:
    for kind in KINDS:
        with mock.patch.object(lm_head, "has_fp32_products", return_value="as on a GPU" in kind):
            yield case(world, root, kind)


def main() -> None:
    run_cases(cases)
