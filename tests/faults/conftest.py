"""Fixtures of the fault tests: the program on forked ranks, and a folder with tiny models and prompts."""

from pathlib import Path

import pytest

from tests.faults.forked import Ranks
from tests.invariant import invariant_assets
from tests.support.ranks import RankServer


@pytest.fixture(scope="module")
def ranks(rank_server: RankServer) -> Ranks:
    return Ranks(rank_server)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("faults")
    invariant_assets.make(root)
    return root
