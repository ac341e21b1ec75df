"""Tests the weights that the fake vLLM generates with on 2 ranks, while the actor is trained."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow
CASES = ["0 plain 1", "0 plain 2", "3 tied 2", "3 adapters 1"]  # ZeRO stage, model, ranks of a group


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("vllm")
    rank_server.check("tests.rollout.vllm_worker:main", 2, str(root), "all")
    return {case["case"]: case for case in json.loads((root / "all-2.json").read_text())}


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_those_of_the_training_engine_after_each_step(found: dict, name: str) -> None:
    assert found[name]["gap"] < 1e-5, found[name]


def test_only_the_adapters_are_sent_after_the_first_step(found: dict) -> None:
    """They have 2 x (16 + 12 + 12 + 16 + 3 x 20) elements in each of 2 layers, the base 1,368, in fp32."""
    sent = [round(gib * 2**30 / 4) for gib in found["3 adapters 1"]["sent"]]
    assert sent == [1368 + 464, 464, 464, 464]
    assert len(set(found["3 tied 2"]["sent"])) == 1


@pytest.mark.parametrize("name", CASES)
def test_generation_does_not_affect_training_and_ends_if_one_rank_stops(found: dict, name: str) -> None:
    assert found[name]["training"] and found[name]["stopped"], found[name]


def test_ranks_that_share_weights_draw_the_same_responses_as_separate_ranks(found: dict) -> None:
    alone, together = found["0 plain 1"]["drawn"], found["0 plain 2"]["drawn"]
    assert alone == together and alone[0] != alone[1]
