"""Tests roles that share one base model in memory: critic and reward model, actor and reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from tests.engine.sharing_worker import V
from tests.engine.test_checkpoint import launch
from tests.support.ranks import RankServer

SIZES = dict(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    initializer_range=0.4,
)
CASES = ["zero0 fp32", "zero1 fp32", "zero2 fp32", "zero3 fp32", "zero2 bf16", "zero3 bf16"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("sharing")
    for seed, name in enumerate(("actor", "other")):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(root / name)
    LlamaForSequenceClassification(LlamaConfig(**SIZES, num_labels=1)).save_pretrained(root / "reward")
    return {case["case"]: case for case in launch(rank_server, 2, root, "all", "sharing_worker")}


def test_a_reference_needs_no_memory_beside_an_actor_with_adapters(found: dict[str, dict[str, Any]]) -> None:
    base, other = found["reference actor"], found["reference other"]
    assert base["shared"] and base["taken"] == 0
    assert not other["shared"] and other["taken"] >= other["actor"]


@pytest.mark.parametrize("label", CASES)
def test_a_critic_with_adapters_shares_its_weights_with_the_reward_model(
    found: dict[str, dict[str, Any]], label: str
) -> None:
    case = found[f"reward {label}"]
    assert case["shared"] and case["taken"] == 0
    assert case["notes"] == [
        "sharing    reward.model.path: the critic without its adapters, with its first head; "
        "no weights of its own"
    ]

    rounding = 0.1 if "bf16" in label else 1e-4
    assert case["gap"] < rounding < 0.3 < case["moved"] and case["spread"] > 0.3, case
    assert case["stays"] and case["critic undisturbed"], case
    assert case["resumed"] and case["only what was there"], case


def test_a_critic_without_adapters_does_not_share_weights(found: dict[str, dict[str, Any]]) -> None:
    case = found["reward zero0 fp32 whole"]
    assert not case["shared"] and case["taken"] >= case["model"] and case["notes"] == []
    assert case["gap"] < 1e-4 and case["stays"]
