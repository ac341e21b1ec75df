"""Generates in every way with a tiny actor, and then trains it, for test_hybrid_switch.py; writes JSON."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.distributed.world import World
from ppo_ds.engine.checkpoint.state import consolidated
from ppo_ds.engine.gather import GATHER_ELEMENTS
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.master_weights import optimizer_shares
from ppo_ds.engine.trained import LRSchedule, StepInfo, TrainedModel
from ppo_ds.engine.zero import deepspeed_config
from ppo_ds.models.lora import add_adapters
from ppo_ds.models.policy import Policy, unsharded_twin
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.rollout.hf import HFGenerator
from ppo_ds.types import Prompts, Rollout
from tests.engine.rank_results import Case, run_cases, same

V, ROWS, EOS = 23, 4, 2
GREEDY = SamplingParams(
    max_new_tokens=9,
    min_new_tokens=0,
    temperature=1.0,
    top_p=1.0,
    top_k=1,
    stop_token_ids=(EOS,),
    stop_strings=(),
)
# "tied" also makes every parameter persistent; DeepSpeed does so for small parameters
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied": True, "threshold": 10**6},
    "adapters": {"lora": True},
}


class Ids:
    """Provides the part of a tokenizer that a backend without stop strings uses."""

    pad_id = 0

    def decode(self, ids: Any, **_: Any) -> str:
        raise AssertionError("no text is asked for")


class Borrower(nn.Module):
    """A norm that also multiplies by a weight of another module."""

    def __init__(self, norm: nn.Module, owner: nn.Module):
        super().__init__()
        self.norm, self._owner = norm, [owner]  # in a list, so that the owner is not a submodule

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) * self._owner[0].weight


class Interrupted(Exception):
    """Raised inside generation mode on purpose."""


def make(
    world: World,
    stage: int,
    dtype: torch.dtype = torch.float32,
    *,
    lora: bool = False,
    tied: bool = False,
    threshold: int = 0,
    borrow: bool = False,
    gather_elements: int = GATHER_ELEMENTS,
    eps: float = 1e-6,
    engine: bool = False,
) -> HybridActor:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=V, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
        tie_word_embeddings=tied, initializer_range=0.3,
    )  # fmt: skip
    lm = LlamaForCausalLM(config).to(dtype)
    if lora:
        add_adapters(lm, rank=2, alpha=4, targets=None, seed=1, key="actor.lora")
    if borrow:
        lm.model.norm = Borrower(lm.model.norm, lm.model.layers[0].input_layernorm)
    return HybridActor(
        Policy(lm, temperature=1.0),
        # cannot copy a Borrower
        make_inference_copy=None if engine else (lambda *_: None) if borrow else unsharded_twin,
        timer=lambda _: nullcontext(),
        gather_elements=gather_elements,
        world=world,
        deepspeed_config=deepspeed_config(
            stage=stage,
            dtype="fp32" if dtype == torch.float32 else "bf16",
            grad_clip=1.0,
            raw={
                "zero_optimization": {
                    "stage3_param_persistence_threshold": threshold,
                    "reduce_bucket_size": 5000,
                }
            },
        ),
        schedule=LRSchedule(3e-2, "constant", 0.0, 0.0, 10),
        betas=(0.9, 0.95),
        eps=eps,
        weight_decay=0.0,
    )


def plan(
    actor: HybridActor, generate: str, offload_states: str = "never", critic: TrainedModel | None = None
) -> str:
    return actor.plan_generation(
        generation_gather=generate, offload_states=offload_states, decoding_bytes=0, critic=critic
    )


def prompts(world: World, seed: int) -> Prompts:
    """Returns this rank's prompts; lengths and limits differ between rows and ranks."""
    draw = torch.Generator().manual_seed(100 * seed + world.rank)
    lengths = torch.tensor([1 + world.rank, 2, 5, 3 + 2 * world.rank])
    ids = torch.randint(3, V, (ROWS, 6), generator=draw)
    mask = torch.arange(6) >= 6 - lengths[:, None]
    limits = torch.tensor([9, 1, 4, 2]) if world.rank else torch.tensor([3, 2, 1, 1])
    return Prompts(ids.masked_fill(~mask, 0), mask, limits, tuple({} for _ in range(ROWS)))


def decode_rollout(actor: HybridActor, seed: int, token_budget: int = 30) -> Rollout:
    generator = HFGenerator(
        lambda: actor.lm, tokenizer=Ids(), token_budget=token_budget, lockstep_max=actor.lockstep_max
    )
    with actor.generation_mode():
        return generator(prompts(actor.world, seed), GREEDY)


def train(actor: TrainedModel) -> StepInfo:
    """Runs one optimizer step of two micro-batches on rows that are independent of generation."""
    draw = torch.Generator().manual_seed(7 + actor.steps)
    ids = torch.randint(3, V, (4 * actor.world.size, 8), generator=draw).chunk(actor.world.size)[
        actor.world.rank
    ]
    for i, rows in enumerate(ids.chunk(2)):
        out = actor(rows, torch.ones_like(rows), 5)
        actor.backward(-(out.logprobs * torch.sin(rows[:, -5:].float())).sum() / 40, last=i == 1)
    return actor.step()


def everything(model: TrainedModel) -> dict[str, Tensor]:
    """Returns the weights and this rank's part of the optimizer states."""
    states = model.engine.basic_optimizer.state.values()
    kept = [
        *optimizer_shares(model),
        *(x for state in states for x in state.values() if isinstance(x, Tensor)),
    ]
    return {str(i): x.detach().clone() for i, x in enumerate(kept)} | (consolidated(model) or {})


def sharded_again(actor: HybridActor) -> bool:
    return actor.module.training and all(
        p.ds_status == ZeroParamStatus.NOT_AVAILABLE and p.numel() == 0 for p in actor.module.parameters()
    )


def forwards_of(actor: HybridActor) -> list[int]:
    """Returns a list that counts the forwards of generation, recognized by eval mode."""
    counted = [0]

    def count(lm: nn.Module, *_: Any) -> None:
        counted[0] += not lm.training

    (actor._copy or actor.module.lm).register_forward_hook(count)
    return counted


def ways(world: World, kind: str) -> Case:
    """Compares five steps after generation with whole weights, layer by layer, and without generation."""
    whole, layers, never = (make(world, 3, **KINDS[kind]) for _ in range(3))
    plan(whole, "whole"), plan(layers, "layers")
    steps, pairs, released, ahead, forwards = [], [], True, True, forwards_of(layers)
    for step in range(5):
        pair = [decode_rollout(actor, step) for actor in (whole, layers)]
        # DeepSpeed prefetches only with a complete trace
        ahead &= layers.engine.optimizer.parameter_offload.get_param_coordinator().is_complete_trace()
        released &= sharded_again(layers)
        pairs.append(pair)
        steps.append([train(actor) for actor in (whole, layers, never)])
    return {
        "case": kind,
        "in step": layers.lockstep and not whole.lockstep,
        "tokens": all(
            torch.equal(a.ids, b.ids) and torch.equal(a.response_mask, b.response_mask) for a, b in pairs
        ),
        "gap": max(float((a.logprobs - b.logprobs).abs().max()) for a, b in pairs),
        "lengths": world.gather_objects([int(a.response_mask.sum(1).max()) for a, _ in pairs]),
        "moved": not torch.equal(pairs[0][0].logprobs[:, 0], pairs[-1][0].logprobs[:, 0]),
        "forwards": world.gather_objects(forwards[0]),
        "ahead": ahead,
        "released": released,
        "steps": all(a == b == c for a, b, c in steps),
        "weights": same(everything(whole), everything(never)) and same(everything(layers), everything(never)),
        "gathered": layers.take_switched_gb() == forwards[0] * layers._weight_bytes / 2**30
        and layers.take_switched_gb() == 0,
        "gathered once": whole.take_switched_gb() == 5 * whole._weight_bytes / 2**30,
    }


def borrowed(world: World) -> Case:
    """Generates with a module that uses another module's parameter, before any forward of the engine."""
    actor = make(world, 3, borrow=True)
    plan(actor, "layers")
    rollout = decode_rollout(actor, 0)
    released = sharded_again(actor)
    with torch.no_grad():
        logprobs = actor(rollout.ids, rollout.attention_mask, rollout.response_mask.shape[1]).logprobs
    return {
        "case": "borrowed",
        "gap": float((logprobs - rollout.logprobs)[rollout.response_mask].abs().max()),
        "released": released,
    }


def uneven_chunks(world: World) -> Case:
    """Generates with a token budget so small that ranks would plan different numbers of chunks."""
    actor, alone = make(world, 3), make(world, 3)
    plan(actor, "layers"), plan(alone, "whole")
    forwards, free = forwards_of(actor), forwards_of(alone)
    pairs = [
        (decode_rollout(actor, seed, token_budget=12), decode_rollout(alone, seed, token_budget=12))
        for seed in range(2)
    ]
    return {
        "case": "uneven",
        "tokens": all(torch.equal(a.ids, b.ids) for a, b in pairs),
        "forwards": world.gather_objects(forwards[0]),
        "free": world.gather_objects(free[0]),
    }


def interrupted(world: World) -> Case:
    """Raises in a layer of a decoding forward on all ranks, then generates and trains again."""
    actor, calm = make(world, 3), make(world, 3)
    plan(actor, "layers"), plan(calm, "layers")
    found = []
    for step in range(4):
        calls = [0]

        def fail(*_: Any, calls: list[int] = calls) -> None:
            calls[0] += 1
            if calls[0] == 2:
                raise Interrupted

        hook = actor.module.lm.model.layers[1].mlp.register_forward_pre_hook(fail)
        try:
            decode_rollout(actor, step)
            found.append(False)
        except Interrupted:
            found.append(sharded_again(actor))
        hook.remove()
        a, b = decode_rollout(actor, step), decode_rollout(calm, step)
        found += [torch.equal(a.ids, b.ids), torch.equal(a.logprobs, b.logprobs), train(actor) == train(calm)]
    return {"case": "interrupted", "found": all(found), "weights": same(everything(actor), everything(calm))}


def states_offloaded(world: World, stage: int, dtype: torch.dtype) -> Case:
    """Offloads the optimizer states of two models in each generation, once with an exception inside."""
    actor, critic, calm = (make(world, stage, dtype) for _ in range(3))
    line = plan(actor, "auto", "always", critic)
    empty, full, steps = True, True, []
    for step in range(4):
        before = [everything(model) for model in (actor, critic)]
        try:
            with actor.generation_mode():
                kept = [
                    x
                    for m in (actor, critic)
                    for state in m.engine.basic_optimizer.state.values()
                    for x in state.values()
                ]
                empty &= all(x.untyped_storage().nbytes() == 0 for x in kept if x.dim())
                if stage > 0:
                    empty &= all(
                        x.untyped_storage().nbytes() == 0
                        for m in (actor, critic)
                        for x in optimizer_shares(m)
                    )
                decode_rollout(actor, step)
                if step == 2:
                    raise Interrupted
        except Interrupted:
            pass
        full &= all(same(a, everything(model)) for a, model in zip(before, (actor, critic), strict=True))
        steps.append([train(model) for model in (actor, critic, calm)])
    return {
        "case": f"states {stage} {dtype}",
        "line": line,
        "empty": empty,
        "full": full,
        "steps": all(a == b == c for a, b, c in steps),
        "weights": same(everything(actor), everything(calm)) and same(everything(critic), everything(calm)),
        "gb": actor.take_switched_gb(),
    }


def alive_after(world: World, generate: str) -> Case:
    """Counts storages of weights and cache that are alive after generation, without gc."""
    actor = make(world, 3)
    plan(actor, generate)
    made: list[StorageWeakRef] = []

    def watch(module: Any, inputs: Any, output: Any) -> None:
        made.extend(
            StorageWeakRef(x.untyped_storage())
            for layer in output.past_key_values.layers
            for x in (layer.keys, layer.values)
        )

    (actor._copy or actor.module.lm).register_forward_hook(watch)
    gc.collect()
    gc.disable()
    with actor.generation_mode():
        weights = (
            [StorageWeakRef(p.untyped_storage()) for p in actor.lm.parameters()]
            if generate == "whole"
            else []
        )
        inside = sum(not ref.expired() for ref in weights)
        decode_rollout(actor, 0)
    alive = sum(not ref.expired() for ref in made + weights)
    gc.enable()
    return {"case": f"alive after {generate}", "inside": inside, "caches": len(made), "alive": alive}


def cases(world: World, *_: object) -> Iterator[Case]:
    for kind in KINDS:
        yield ways(world, kind)
    yield borrowed(world)
    yield uneven_chunks(world)
    yield interrupted(world)
    for stage, dtype in ((0, torch.float32), (2, torch.bfloat16), (3, torch.float32)):
        yield states_offloaded(world, stage, dtype)
    for generate in ("whole", "layers"):
        yield alive_after(world, generate)


def main() -> None:
    run_cases(cases)
