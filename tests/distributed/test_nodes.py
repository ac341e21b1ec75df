"""Tests actions that run on the first rank of a node first, on four ranks of two simulated nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import RankServer


@pytest.mark.slow
def test_an_action_runs_on_the_first_rank_of_each_node_first(rank_server: RankServer, tmp_path: Path) -> None:
    rank_server.check("tests.distributed.node_worker:main", 4, str(tmp_path), nodes=2)
