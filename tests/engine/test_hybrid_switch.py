"""Tests the switch to generation: both ZeRO-3 gathering modes decode alike, and training is unaffected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ppo_ds.engine.memory_budget import (
    GIB,
    GenerationPlan,
    MemoryBudget,
    describe_plan,
    free_bytes,
    plan_generation,
)
from ppo_ds.models.size import shape_of
from ppo_ds.planning.model_memory import decode_bytes_bound
from tests.engine.test_checkpoint import launch
from tests.support.ranks import RankServer

KINDS = ["plain", "tied", "adapters"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> dict[str, dict[str, Any]]:
    return {
        case["case"]: case
        for case in launch(rank_server, 2, tmp_path_factory.mktemp("switch"), "all", "switch_worker")
    }


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_by_layers_equals_decoding_with_whole_weights(found: dict, kind: str) -> None:
    case = found[kind]
    assert case["in step"] and case["tokens"] and case["gap"] < 1e-5 and case["moved"], case


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_not_affected_and_ranks_stay_in_lockstep(found: dict, kind: str) -> None:
    case = found[kind]
    assert case["released"] and case["ahead"] and case["steps"] and case["weights"], case
    assert case["gathered"] and case["gathered once"], case
    (first, second), (one, other) = case["lengths"], case["forwards"]
    assert max(first) < max(second) and one == other, case


def test_ranks_that_would_plan_different_numbers_of_chunks_stay_in_lockstep(found: dict) -> None:
    case = found["uneven"]
    assert (
        case["tokens"] and case["forwards"][0] == case["forwards"][1] and case["free"][0] != case["free"][1]
    ), case


def test_parameters_of_other_modules_are_gathered(found: dict) -> None:
    assert found["borrowed"]["gap"] < 1e-5 and found["borrowed"]["released"], found["borrowed"]


def test_an_exception_in_a_layer_leaves_everything_sharded_and_unchanged(found: dict) -> None:
    assert found["interrupted"]["found"] and found["interrupted"]["weights"], found["interrupted"]


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "torch.float32"), (2, "torch.bfloat16"), (3, "torch.float32")]
)
def test_optimizer_states_are_offloaded_and_restored_bit_by_bit(found: dict, stage: int, dtype: str) -> None:
    case = found[f"states {stage} {dtype}"]
    assert case["empty"] and case["full"] and case["steps"] and case["weights"], case
    assert "of optimizer states and gradient buffers offloaded" in case["line"] and case["gb"] > 0, case


@pytest.mark.parametrize("generate", ["whole", "layers"])
def test_neither_inference_copy_nor_cache_is_in_memory_during_training(found: dict, generate: str) -> None:
    case = found[f"alive after {generate}"]
    assert case["caches"] > 0 and case["alive"] == 0 and (case["inside"] > 0) == (generate == "whole"), case


# -- the plan, which may use 90 % of the free memory ------------------------------------------------


AUTO = ("auto", "auto")
PLAIN = (10, 0, 0)  # every rank has all weights


@pytest.mark.parametrize(
    ("sizes", "decoding", "offloadable", "settings", "on_gpu", "whole", "offloads"),
    [
        ((10, 6, 2), 3, 5, AUTO, True, True, False),  # needs 9 of 9
        ((10, 6, 2), 4, 5, AUTO, True, True, True),  # needs 10 of 9, and 5 can be offloaded
        ((10, 6, 2), 4, 5, AUTO, False, False, False),  # on a CPU, offloading frees nothing
        ((10, 12, 2), 3, 5, AUTO, True, False, False),  # whole weights need 15 of 14; one layer and 3 fit
        ((10, 12, 2), 8, 5, AUTO, True, False, True),  # layer by layer, and still 10 of 9
        ((10, 6, 2), 4, 0, AUTO, True, False, False),  # no states can be offloaded, as with offload_optimizer
        # explicit settings override the budget
        *(((free, 6, 2), 3, 1, ("whole", "never"), True, True, False) for free in (1, 100)),
        *(((free, 6, 2), 3, 1, ("layers", "always"), False, False, True) for free in (1, 100)),
        ((1, 6, 2), 3, 1, ("auto", "never"), True, False, False),
        ((1, 6, 2), 3, 1, ("whole", "auto"), True, True, True),
        (PLAIN, 5, 3, AUTO, True, True, False),  # weights as trained
        ((4, 0, 0), 5, 3, AUTO, True, True, True),
    ],
)
def test_the_plan_by_memory_budget(
    sizes: tuple[int, int, int],
    decoding: int,
    offloadable: int,
    settings: tuple[str, str],
    on_gpu: bool,
    whole: bool,
    offloads: bool,
) -> None:
    """The sizes are those of the free memory, the weights and a layer."""
    budget = MemoryBudget(*(size * GIB for size in (*sizes, decoding, offloadable)))
    gather, offload = settings
    found = plan_generation(budget, generation_gather=gather, offload_states=offload, on_gpu=on_gpu)
    assert found == GenerationPlan(gather_once=whole, offload_states=offloads)
    if sizes == PLAIN:
        assert describe_plan(budget, found, sharded=False) == ""


def test_the_plan_is_described_with_its_numbers() -> None:
    budget = MemoryBudget(
        free=int(14.2 * GIB),
        weights=int(0.9 * GIB),
        layer=50 * 2**20,
        decoding=GIB // 2,
        offloadable=int(3.1 * GIB),
    )
    assert describe_plan(budget, GenerationPlan(gather_once=True, offload_states=False), sharded=True) == (
        "generation weights gathered once per phase: 0.9 GiB, 0.5 GiB for cache and activations; "
        "14.2 GiB free"
    )
    assert describe_plan(budget, GenerationPlan(gather_once=False, offload_states=True), sharded=True) == (
        "generation weights gathered layer by layer in each forward: up to 50.0 MiB of 0.9 GiB, "
        "0.5 GiB for cache and activations; "
        "14.2 GiB free; 3.1 GiB of optimizer states and gradient buffers offloaded"
    )


def test_free_memory_on_a_cpu_is_a_share_and_on_a_gpu_includes_the_unused_cache_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1001))
    assert free_bytes(SimpleNamespace(device=torch.device("cpu"), threads=SimpleNamespace(ranks=4))) == 250
    for name, found in (("mem_get_info", (70, 100)), ("memory_reserved", 20), ("memory_allocated", 15)):
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    assert free_bytes(SimpleNamespace(device=torch.device("cuda", 0))) == 75


def test_decoding_takes_cache_activations_and_logits() -> None:
    shape = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=23, **shape))
    # in fp32, a token needs 2 layers x a key and a value of 4 numbers, and 4 x 8 + 3 x 12 activations; a row
    # needs four copies of its 23 logits
    assert decode_bytes_bound(shape_of(lm), 10, 3, 4, 16) == 10 * (64 + 272) + 3 * 368
    bf16 = lm.to(torch.bfloat16)
    assert decode_bytes_bound(shape_of(bf16), 10, 3, 2, 14) == 10 * (32 + 136) + 3 * (46 + 276)
