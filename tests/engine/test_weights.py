"""Tests the weights that an inference engine receives: those of an exported model, for every ZeRO stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.test_checkpoint import launch
from tests.support.ranks import RankServer

CASES = ["0 plain", "0 tied", "0 adapters", "1 plain", "2 plain", "3 plain", "3 tied", "3 adapters"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> dict[str, dict[str, Any]]:
    return {
        case["case"]: case
        for case in launch(rank_server, 2, tmp_path_factory.mktemp("weights"), "all", "weights_worker")
    }


@pytest.mark.parametrize("name", CASES)
def test_each_rank_receives_the_weights_of_the_exported_model_and_training_is_not_affected(
    found: dict, name: str
) -> None:
    case = found[name]
    assert case["equal"] and case["changed"] and case["ranks"], case
    assert case["training"] and case["sharded"] and not case["lockstep"] and case["gb"] > 0, case


def test_tied_weights_are_yielded_once(found: dict) -> None:
    assert "lm_head.weight" in found["3 plain"]["names"]
    assert "lm_head.weight" not in found["3 tied"]["names"] + found["0 tied"]["names"]
