"""Tests that learn() gives the same weights on 1 to 4 real ranks, on each ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Path:
    folder = tmp_path_factory.mktemp("rank_counts")
    for ranks in (1, 2, 3, 4):
        rank_server.check("tests.ppo.rank_counts_worker:main", ranks, str(folder))
    return folder


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_weights_are_those_of_one_rank_without_zero(learned: Path, ranks: int, stage: int) -> None:
    before, expected = (load_file(learned / f"{name}-1-0.safetensors") for name in ("before", "after"))
    found = load_file(learned / f"after-{ranks}-{stage}.safetensors")
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=0, atol=1e-5)
    assert max((expected[name] - before[name]).abs().max() for name in expected) > 1e-2
