"""Tests the memory of a vLLM engine with sizes worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppo_ds.compute.sizes import Shape
from ppo_ds.planning.vllm_memory import (
    BATCHED_TOKENS,
    COMMUNICATOR,
    GRAPHS,
    SEQUENCES,
    VllmMemory,
    engine_memory,
    vllm_activation_bytes,
    vllm_cache_bytes,
    vllm_cache_tokens,
    vllm_weight_bytes,
)
from ppo_ds.rollout.keys import VLLMConfig
from ppo_ds.rollout.vllm_support import parallel_problem
from ppo_ds.tools.doctor.suggest import with_settings
from tests.config.commands import MINIMAL, compose

# Qwen2.5-72B: two embeddings of 152,064 x 8,192; in each of 80 layers the queries and the output (8,192 x
# 8,192), keys and values (8,192 x 1,024), three matrices of 8,192 x 29,568, biases and norms
EMBEDDING = 152_064 * 8192
LAYER = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 29_568 + (8192 + 2 * 1024) + 2 * 8192
PARAMETERS = 2 * EMBEDDING + 80 * LAYER + 8192
QWEN_72B = Shape(
    body=PARAMETERS - 2 * EMBEDDING,
    parameters=PARAMETERS,
    trained=PARAMETERS,
    largest_trained=EMBEDDING,
    largest_tensor=EMBEDDING,
    head=EMBEDDING,
    vocabulary=152_064,
    layers=80,
    hidden=8192,
    inner=29_568,
    gated=True,
    heads=64,
    width=8192,
    kv_width=1024,
)


def test_eight_ranks_hold_an_eighth_of_the_weights_each() -> None:
    assert PARAMETERS == 72_706_203_648  # as the model card says
    assert vllm_weight_bytes(QWEN_72B, 1, 2) == 145_412_407_296
    assert vllm_weight_bytes(QWEN_72B, 8, 2) == 18_176_550_912


def test_adapters_are_merged_into_the_weights() -> None:
    adapted = replace(QWEN_72B, parameters=PARAMETERS + 8_000_000, trained=8_000_000)
    assert vllm_weight_bytes(adapted, 8, 2) == 18_176_550_912


def test_more_ranks_than_key_heads_repeat_the_heads() -> None:
    # 16 ranks and 8 heads: each rank has one head, 1/8 instead of 1/16 of the keys' and values' matrices
    repeated = 2 * 80 * 8192 * 1024 // 16
    assert vllm_weight_bytes(QWEN_72B, 16, 2) == 2 * (PARAMETERS // 16 + repeated)
    tokens = 49_152
    assert vllm_cache_bytes(QWEN_72B, tokens, 16, 2) == 2 * vllm_cache_bytes(QWEN_72B, tokens, 8, 2)


def test_the_cache_of_a_rank_is_as_large_as_without_tensor_parallelism() -> None:
    # 2 tensors x 80 layers x 1,024 numbers of 2 bytes are 320 KiB for each token
    for ranks in (1, 2, 4, 8):
        assert vllm_cache_bytes(QWEN_72B, 32 * 1536, ranks, 2) == 32 * 1536 * 320 * 1024


def test_activations_of_a_prefill_and_of_sampling() -> None:
    # three hidden states and an eighth of three MLP states in bf16, and a count of 4 bytes for each token of
    # each sequence; logits in bf16, in fp32 and three copies
    prefill = BATCHED_TOKENS * 2 * (3 * 8192 + 3 * 29_568 // 8) + SEQUENCES * 152_064 * 4
    sampling = SEQUENCES * 152_064 * (2 + 4 + 12)
    assert vllm_activation_bytes(QWEN_72B, 8, 2, sampled=12) == max(prefill, sampling) == sampling
    fewer = prefill - SEQUENCES * (152_064 - 1000) * 4
    assert vllm_activation_bytes(replace(QWEN_72B, vocabulary=1000), 8, 2, sampled=12) == fewer


def test_sleeping_frees_weights_and_cache() -> None:
    levels = [VllmMemory(weights=1000, kv_cache=200, activations=30, kept=4, sleep=i) for i in range(3)]
    assert {memory.awake for memory in levels} == {1234}
    assert [memory.between for memory in levels] == [1204, 4, 4]
    assert [memory.host for memory in levels] == [0, 1000, 0]


def test_a_cache_has_room_for_one_row_of_the_group() -> None:
    # 1,536 tokens are 12 blocks of 128, and two more make 1,792, of which 8 ranks bring 224 each
    assert vllm_cache_tokens(49_152, 1536, 8) == 49_152
    assert vllm_cache_tokens(100, 1536, 8) == 224
    assert vllm_cache_tokens(100, 1536, 1) == 1792


def test_the_engine_sleeps_deeply_on_a_gpu() -> None:
    assert [VLLMConfig(sleep=setting).sleep_level(True) for setting in ("auto", 0, 1, 2)] == [2, 0, 1, 2]
    assert VLLMConfig().sleep_level(False) == 0


@pytest.mark.parametrize(
    ("ranks", "graphs", "on_gpu", "kept"),  # enforce_eager records no graphs
    [
        (8, True, True, GRAPHS + COMMUNICATOR),
        (8, False, True, COMMUNICATOR),
        (1, True, True, GRAPHS),
        (8, False, False, 0),
    ],
)
def test_graphs_and_communicator_are_kept(ranks: int, graphs: bool, on_gpu: bool, kept: int) -> None:
    section = {"tensor_parallel": ranks, "enforce_eager": not graphs, "kv_cache_gb": 5}
    config = with_settings(
        compose(*MINIMAL, "rollout.backend=vllm"),
        [(f"rollout.vllm.{name}", value) for name, value in section.items()],
    )
    found = engine_memory(config, QWEN_72B, 2, 1536, on_gpu)
    assert found is not None and (found.kept, found.kv_cache) == (kept, 5 * 2**30)


@pytest.mark.parametrize(
    ("heads", "keys", "inner", "ranks", "fits"),
    [
        (64, 8, 29_568, 8, None),  # Qwen2.5-72B; 29,568 = 2^7 x 3 x 7 x 11
        (64, 8, 29_568, 16, None),  # each head of the keys twice
        (64, 8, 29_568, 3, "1, 2"),
        (28, 4, 18_944, 8, "1, 2, 4"),  # Qwen2.5-7B; 18,944 = 2^9 x 37
        (28, 4, 18_944, 7, "1, 2, 4"),
        (24, 6, 4096, 4, "1, 2"),  # 6 heads of the keys, neither divided nor repeated
    ],
)
def test_numbers_of_ranks_that_vllm_cannot_divide_a_model_among(
    heads: int, keys: int, inner: int, ranks: int, fits: str | None
) -> None:
    found = parallel_problem(heads, keys, inner, ranks)
    assert found is None if fits is None else str(found).endswith(f"among {ranks} ranks; use one of {fits}")
