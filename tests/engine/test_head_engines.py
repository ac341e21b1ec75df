"""Tests that training is the same with and without ZeRO-3 if the LM head returns log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPTJConfig, LlamaConfig

from tests.engine.head_worker import KINDS, STEPS, V
from tests.engine.test_checkpoint import launch
from tests.support.ranks import RankServer

SIZES = dict(
    vocab_size=V, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, initializer_range=0.3,
    pad_token_id=0,
)  # fmt: skip
FOLDERS = {
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False),
    "tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "biased": lambda: GPTJConfig(
        vocab_size=V, n_embd=8, n_layer=2, n_head=2, rotary_dim=2, initializer_range=0.3
    ),
    "capped": lambda: Gemma2Config(**SIZES, head_dim=4, final_logit_softcapping=3.0),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("heads")
    for name, config in FOLDERS.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(root / name)
    return {case["case"]: case for case in launch(rank_server, 2, root, "all", "head_worker")}


@pytest.mark.parametrize("kind", KINDS)
def test_steps_with_zero_3_equal_those_with_whole_weights(
    found: dict[str, dict[str, Any]], kind: str
) -> None:
    case = found[kind]
    relative, rounding = (0.05, 0.02) if "bf16" in kind else (2e-5, 2e-5)
    assert len(case["norms"]) == STEPS and all(
        a == pytest.approx(b, rel=relative) for a, b in case["norms"]
    ), case
    assert case["gap"] < rounding < case["moved"] / 2 and case["released"], case


@pytest.mark.parametrize("kind", KINDS)
def test_full_logits_are_computed_only_for_a_model_that_changes_them(
    found: dict[str, dict[str, Any]], kind: str
) -> None:
    assert found[kind]["fused"] == (not kind.startswith("capped"))
