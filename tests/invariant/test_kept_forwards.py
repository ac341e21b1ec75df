"""Tests that an update on kept graphs gives the bits of an update with a second forward of the same rows.

Each case is a run of four steps on two ranks with one optimizer step each, on one ZeRO stage. It runs with
kept graphs, and with graphs that are dropped before the update, which then computes them again.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ppo_ds.assemble.generator import settle_old_logprobs
from ppo_ds.planning.forwards import kept_roles
from tests.invariant import invariant_assets
from tests.invariant.invariant_runs import ASSETS, Case, Launches, case, staged
from tests.ppo.preset_runs import composed
from tests.support.ranks import RankServer

STEPS = 4
ONE_STEP: dict[str, Any] = {
    "run": {"steps": STEPS},
    "data": {"path": f"{ASSETS}/same.jsonl"},  # similar lengths, so that a rank needs one micro-batch
    "algo": {"epochs": 1, "minibatch_size": None},
    "memory": {"rollout_tokens": 4096, "score_tokens": 4096, "train_tokens": 4096},
}
DROPPED = "graphs dropped before the update"
SOURCES = {  # setting -> keys, and the models whose forward is kept
    "both graphs": ({"memory": {"reuse_forwards": "all"}}, {"actor", "critic"}),
    "decoded log-probs": ({"algo": {"old_logprobs": "rollout"}}, {"critic"}),
    "log-probs of the update": ({"algo": {"kl": {"place": "loss"}}}, {"critic"}),
}
WITH = [
    *((2, "both graphs"), (3, "both graphs")),
    *((0, "decoded log-probs"), (3, "decoded log-probs"), (2, "log-probs of the update")),
]


def cases() -> list[Case]:
    found = []
    for stage, source in WITH:
        overlays = [ONE_STEP, SOURCES[source][0], staged(stage)]
        for label, switches in (("kept", {}), ("dropped", {"mistake": DROPPED})):
            found.append(case(f"{stage} {source} {label}", *overlays, generate="sample", **switches))
    return found


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Launches:
    root = tmp_path_factory.mktemp("kept")
    invariant_assets.make(root)
    found = Launches(root, rank_server)
    found.launch(2, cases())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "source"), WITH)
def test_results_are_those_of_a_second_forward(launches: Launches, stage: int, source: str) -> None:
    kept, dropped = (launches[f"2/{stage} {source} {label}"] for label in ("kept", "dropped"))
    # forwards with gradients: one for each step, and one more for each graph that was dropped
    models = SOURCES[source][1]
    assert kept.found["layer_runs"] == {"actor": STEPS, "critic": STEPS}
    assert dropped.found["layer_runs"] == {
        name: STEPS * (2 if name in models else 1) for name in ("actor", "critic")
    }
    assert kept.steps == dropped.steps and kept.found["norms"] == dropped.found["norms"]
    assert kept.tensors.keys() == dropped.tensors.keys()
    for name, tensor in kept.tensors.items():
        assert torch.equal(tensor, dropped.tensors[name]), name
    # the runs have trained
    assert min(min(norms) for norms in kept.found["norms"].values()) > 0


ALL = "memory.reuse_forwards=all"


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ((), ("actor",)),
        ((ALL,), ("actor", "critic")),
        (("memory.reuse_forwards=off",), ()),
        # no forward of the actor comes before the update
        (("algo.old_logprobs=rollout",), ("critic",)),
        (("algo.kl.place=loss",), ("critic",)),
        (("algo.kl.place=loss", "memory.reuse_forwards=off"), ()),
        (("algo.old_logprobs=rollout", "critic.lora.rank=2"), ()),
        # a second optimizer step
        (("algo.epochs=2", ALL), ()),
        (("algo.minibatch_size=1", ALL), ()),
        # a model with other forwards before its backward
        (("algo.old_policy=lagged", ALL), ("critic",)),
        (("actor.lora.rank=2", ALL), ("critic",)),
        (("actor.lora.rank=2",), ()),
        (("critic.lora.rank=2", ALL), ("actor",)),
        (("algo.policy.top_entropy=0.5", ALL), ("critic",)),
        (("critic.share_trunk=true", ALL), ("actor",)),
    ],
)
def test_models_whose_graph_is_kept(overrides: tuple[str, ...], kept: tuple[str, ...]) -> None:
    one_step = ("algo.epochs=1", "algo.minibatch_size=null")
    assert kept_roles(composed("standard", *one_step, *overrides)) == kept


EXACT = (2e-7, 1e-6)


@pytest.mark.parametrize(
    ("overrides", "gap", "source"),
    [
        ((), EXACT, "rollout"),
        ((), (2e-5, 2e-5), "recompute"),
        ((), (2e-7, 2e-4), "recompute"),
        ((), (math.nan, math.nan), "recompute"),
        (("algo.old_logprobs=recompute",), EXACT, "recompute"),
        (("algo.old_logprobs=rollout",), (0.02, 0.3), "rollout"),
        # settings that compare with the actor's forward, or use its other outputs
        (("algo.rollout_is.kind=mask",), EXACT, "recompute"),
        (("algo.old_policy=lagged",), EXACT, "recompute"),
        (("algo.policy.top_entropy=0.5",), EXACT, "recompute"),
        (("critic.share_trunk=true",), EXACT, "recompute"),
        # in 16 bits, a few short rows may agree by chance
        (("actor.model.dtype=bf16",), EXACT, "recompute"),
        # no forward of the actor comes before the update
        (("algo.epochs=1", "algo.minibatch_size=null", "algo.kl.place=loss"), EXACT, "recompute"),
        # a resumed run may change these keys
        (("health.parity_action=warn", "health.max_parity=null"), EXACT, "rollout"),
        (("algo.epochs=1", "algo.minibatch_size=null"), EXACT, "rollout"),
        (("algo.epochs=1", "algo.minibatch_size=null", "memory.reuse_forwards=off"), EXACT, "rollout"),
    ],
)
def test_source_of_the_old_logprobs(
    overrides: tuple[str, ...], gap: tuple[float, float], source: str
) -> None:
    config = composed("standard", "actor.model.dtype=fp32", "algo.minibatch_size=1", *overrides)
    assert settle_old_logprobs(config, gap, ranks=1).algo.old_logprobs == source
