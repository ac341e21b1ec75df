"""Tests ZeRO-3 with zero_hpz_partition_size: each group of ranks holds a copy of the weights.

The copies hold the same numbers as the shards, so every result must be bit-identical.
"""

from __future__ import annotations

import pytest
import torch

from tests.invariant import invariant_assets
from tests.invariant.invariant_runs import ASSETS, Launches, case, staged
from tests.support.ranks import RankServer

RANKS = 4
TWO_STEPS = {"run": {"steps": 2}}  # of four optimizer steps each
PERSISTENT = {"zero_optimization": {"stage3_param_persistence_threshold": 20}}  # norms and biases stay whole
HPZ = {"zero_optimization": {"zero_hpz_partition_size": 2}}
COPIES = {"actor": {"deepspeed": HPZ}, "critic": {"deepspeed": HPZ}}
FULL = [staged(3), TWO_STEPS, {"actor": {"deepspeed": PERSISTENT}, "critic": {"deepspeed": PERSISTENT}}]
STOPPED = {"run": {"stop_at_step": 1}, "checkpoint": {"every": 1}}
RESUMED = {"run": {"resume": f"{ASSETS}/{RANKS}/full stopped/checkpoints/step_000001"}}
CASES = [
    case("full", *FULL, generate="sample"),
    case("full copies", *FULL, COPIES, generate="sample"),
    case("full stopped", *FULL, COPIES, STOPPED, generate="sample"),
    case("full resumed", *FULL, COPIES, RESUMED, generate="sample"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Launches:
    root = tmp_path_factory.mktemp("node_copies")
    invariant_assets.make(root)
    launches = Launches(root, rank_server)
    launches.launch(RANKS, CASES)
    return launches


@pytest.mark.slow
@pytest.mark.parametrize("way", ["copies", "resumed"])
def test_copies_of_the_weights_on_each_node_change_no_bit(runs: Launches, way: str) -> None:
    plain, other = runs[f"{RANKS}/full"], runs[f"{RANKS}/full {way}"]
    assert len(plain.steps) == 2
    assert other.steps[-1] == plain.steps[-1]
    for role in ("actor", "critic"):
        mine, theirs = other.weights(role), plain.weights(role)
        assert mine.keys() == theirs.keys()
        for name, weight in mine.items():
            assert torch.equal(weight, theirs[name]), (role, name)
