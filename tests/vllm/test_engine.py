"""The real engine decodes greedily as ``static`` does, and samples from the model's distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import RankServer


@pytest.mark.slow
def test_greedy_output_and_sampled_tokens(start: Path, rank_server: RankServer) -> None:
    rank_server.check("tests.vllm.engine_worker:main", 1, str(start / "model"))
