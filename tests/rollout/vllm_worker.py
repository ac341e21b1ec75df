"""Trains a tiny actor that generates with the fake vLLM on 2 ranks, for test_vllm_ranks.py; writes JSON."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ppo_ds.distributed.subgroup import Subgroup
from ppo_ds.distributed.world import World
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.rng import fork_rng
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.keys import VLLMConfig
from ppo_ds.rollout.vllm import VLLMGenerator
from ppo_ds.types import Prompts, Rollout
from tests.engine.rank_results import Case, run_cases, same
from tests.engine.switch_worker import KINDS, Ids, everything, make, train
from tests.support import fake_vllm

SAMPLING = SamplingParams(9, 0, 1.0, 1.0, 0, (), ())


def own_prompts(world: World) -> Prompts:
    """Returns two prompts, other ones on each rank."""
    ids = torch.tensor([[0, 3 + world.rank, 5, 6], [7, 8, 9, 10 + world.rank]])
    return Prompts(ids, ids > 0, torch.tensor([50, 50]), ({}, {}))


def start(world: World, actor: HybridActor, group: Subgroup | None, stop: list[bool]) -> VLLMGenerator:
    with fork_rng(world), actor.generation_mode():
        generator = VLLMGenerator(
            lambda: actor.lm,
            tokenizer=Ids(),
            token_budget=100,
            settings=VLLMConfig(),
            kv_cache=2**20,
            longest=300,
            temperature=1.0,
            group=group,
            should_stop=lambda: bool(stop),
        )
    actor.connect(generator.loaded, adapters=generator.adapter_slot is not None)
    return generator


def gap_of(actor: HybridActor, rollout: Rollout) -> float:
    """Returns the largest difference between the log-probs of a rollout and those of the training engine."""
    with torch.no_grad():
        found = actor(rollout.ids, rollout.attention_mask, rollout.response_mask.shape[1]).logprobs
    return float((found - rollout.logprobs)[rollout.response_mask].abs().max())


def case(world: World, stage: int, kind: str, size: int) -> Case:
    actor, other = (make(world, stage, engine=engine, **KINDS[kind]) for engine in (True, False))
    stop: list[bool] = []
    generator = start(world, actor, Subgroup(world, size) if size > 1 else None, stop)
    prompts, gaps, steps, drawn, sent = own_prompts(world), [], [], [], []
    for step in range(4):
        torch.manual_seed(10 * world.rank + step)
        with actor.generation_mode():
            rollout = generator(prompts, SAMPLING)
        drawn.append(rollout.response_ids.tolist())
        assert torch.equal(rollout.ids[:, : prompts.ids.shape[1]], prompts.ids)
        sent.append(actor.take_switched_gb())
        gaps.append(gap_of(actor, rollout))
        steps.append(train(actor) == train(other))
    if world.rank == 1:
        stop.append(True)
    with actor.generation_mode():  # ends early on the ranks of a group that one of them stops
        short = len(generator(prompts, SamplingParams(200, 0, 1.0, 1.0, 0, (), ())))
    return {
        "case": f"{stage} {kind} {size}",
        "gap": max(world.gather_objects(max(gaps))),
        "sent": sent,
        "training": all(steps) and same(everything(actor), everything(other)),
        "drawn": world.gather_objects(drawn),
        "stopped": short == 2,
    }


def cases(world: World, root: Path, mode: str) -> Iterator[Case]:
    with pytest.MonkeyPatch.context() as patch:
        fake_vllm.install(patch)
        for each in ((0, "plain", 1), (0, "plain", 2), (3, "tied", 2), (3, "adapters", 1)):
            yield case(world, *each)


def main() -> None:
    run_cases(cases)
