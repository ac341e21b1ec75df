"""Makes each run once, on one rank or on two; the tests compare the results."""

from __future__ import annotations

import pytest

from tests.invariant import invariant_assets
from tests.invariant.invariant_cases import CORE, ON_ONE_RANK, ON_TWO_RANKS
from tests.invariant.invariant_runs import Case, Launches
from tests.support.ranks import RankServer


@pytest.fixture(scope="session")
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer
) -> Launches:
    """Returns the runs of CORE, and all other runs if tests marked slow are selected."""
    root = tmp_path_factory.mktemp("invariant")
    invariant_assets.make(root)
    launches = Launches(root, rank_server)
    everything = any(
        "runs" in getattr(item, "fixturenames", ()) and item.get_closest_marker("slow")
        for item in request.session.items
    )

    def wanted(ranks: int, cases: list[Case]) -> list[Case]:
        return [case for case in cases if everything or f"{ranks}/{case['label']}" in CORE]

    launches.launch(1, wanted(1, ON_ONE_RANK))  # records the rollouts that all others replay
    launches.launch(2, wanted(2, ON_TWO_RANKS))
    return launches
