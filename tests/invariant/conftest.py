"""All runs are made once, by one launch for each number of ranks; the tests compare what they left."""

from __future__ import annotations

import pytest

from tests.invariant import invariant_assets
from tests.invariant.invariant_cases import MORE_ON_TWO_RANKS, ON_ONE_RANK, ON_TWO_RANKS
from tests.invariant.invariant_runs import Launches


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    root = tmp_path_factory.mktemp("invariant")
    invariant_assets.make(root)
    launches = Launches(root)
    launches.launch(1, ON_ONE_RANK)  # records the rollouts that all others replay
    launches.launch(2, ON_TWO_RANKS)
    return launches


@pytest.fixture(scope="session")
def more_runs(runs: Launches) -> Launches:
    """Also those for which there is not always time."""
    runs.launch(2, MORE_ON_TWO_RANKS, name="more")
    return runs
