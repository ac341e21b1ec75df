"""Tests weight copies: the average is exact, is used while swapped in, and does not affect training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.errors import UserError
from tests.engine.test_checkpoint import OneRank, launch
from tests.support.ranks import RankServer


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer
) -> dict[str, list[dict[str, Any]]]:
    """Returns the results of 2 ranks, of 1 rank, and of 2 ranks that read the files of 1 rank."""
    directory = tmp_path_factory.mktemp("copies")
    return {
        "two": launch(rank_server, 2, directory, "all", "weight_copy_worker"),
        "one": launch(rank_server, 1, directory, "all", "weight_copy_worker"),
        "back": launch(rank_server, 2, directory, "references", "weight_copy_worker"),
    }


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_copies_are_exact_are_used_while_swapped_in_and_do_not_affect_training(
    found: dict, ranks: str
) -> None:
    cases = [case for case in found[ranks] if "gap" in case]
    assert len(cases) == 13
    for case in cases:
        # the gap is five roundings of weights below 4; the average differs from the last weights
        assert case["gap"] < 1e-6 and case["moved"] > 1e-2, case
        assert case["lagged"] and case["undisturbed"], case
        assert case["module"] and case["forward"] and case["other forward"] > 0.1, case
        assert case["back"] and case["no training"], case
        assert case["kept"] and case["loaded"] and case["resumed"], case


def test_other_numbers_of_ranks_and_stages_read_the_same_copy(found: dict) -> None:
    cases = [case for case in found["one"] + found["back"] if "->" in case["case"]]
    assert len(cases) == 5 + 7
    assert all(case["same"] for case in cases), cases


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_an_exception_inside_restores_the_model_even_on_one_rank_alone(found: dict, ranks: str) -> None:
    cases = [case for case in found[ranks] if "interrupted" in case["case"]]
    assert len(cases) == 3
    assert all(case["found"] for case in cases), cases


@pytest.mark.parametrize("ranks", ["one", "two"])
def test_generation_uses_the_copy_inside_and_the_model_afterwards(found: dict, ranks: str) -> None:
    cases = [case for case in found[ranks] if "generated" in case["case"]]
    assert len(cases) == 3
    for case in cases:
        assert case["start"] and case["moved"] > 0.05 and case["back"] and case["not inside generation"], case


@pytest.mark.parametrize(
    ("trained", "name", "key"),
    [
        ("actor", "ema", "actor.ema.decay"),
        ("actor", "lagged", "algo.old_policy"),
        ("scorer", "ema", "scorer.ema.decay"),
    ],
)
def test_a_checkpoint_with_other_copies_than_the_run_is_refused(
    tmp_path: Path, trained: str, name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "ppo_ds.engine.checkpoint.checkpoints"
    for save in ("save_weight_copy", "save_model"):
        monkeypatch.setattr(f"{module}.{save}", lambda saved, directory: directory.mkdir() or [])
    for count in ("weight_copy_bytes", "model_bytes"):
        monkeypatch.setattr(f"{module}.{count}", lambda saved: 0)
    models = {trained: None}
    checkpoints = Checkpoints(tmp_path, world=OneRank(), keep_last=2)
    with_it, without = checkpoints.save(1, models, {}, copies={name: None}), checkpoints.save(2, models, {})
    with pytest.raises(
        UserError,
        match=f"^run.resume: .*step_000001 holds {name} weights, this run keeps none: keep {key} as it was$",
    ):
        checkpoints.load(with_it, models)
    with pytest.raises(
        UserError,
        match=f"^run.resume: .*step_000002 holds no {name} weights, this run keeps them: "
        f"keep {key} as it was$",
    ):
        checkpoints.load(without, models, {name: None})
