"""Tests that a run whose ranks divide the tokens of each row trains like one rank (memory.sequence_parallel).

Generation is replayed. The runs on two ranks form one sequence group, those on four ranks two groups or one.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.invariant import invariant_assets
from tests.invariant.invariant_cases import ALGORITHMS, CALM, CHECKPOINTED, ONE_STEP, OTHER_REFERENCE
from tests.invariant.invariant_runs import ASSETS, Launches, case, merged, staged
from tests.invariant.test_training import gaps
from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow

# one row in each forward: most ranks then have no label of some rows, which are shorter than a rank's share
ROW_BY_ROW = {"memory": {"score_tokens": 1, "train_tokens": 1}}
# the update computes the old log-probs
ONE_UPDATE = {"algo": {"epochs": 1, "minibatch_size": 16, "kl": {"place": "loss", "estimator": "k3"}}}
ADAPTED = {"actor": {"lora": {"rank": 2}}, "critic": {"lora": {"rank": 2}}}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "checkpointed": [CHECKPOINTED],
    "row by row": [ROW_BY_ROW],
    "one update": [ONE_UPDATE],
    "lora": [CALM, ADAPTED],
    "measured kl": [CALM, OTHER_REFERENCE, {"algo": {"kl": {"after_update": True}}}],
    "ptx": [CALM, {"algo": {"ptx": {"coef": 0.5}}, "data": {"ptx_path": f"{ASSETS}/texts.jsonl"}}],
    **{name: [merged(merged(CALM, OTHER_REFERENCE), ONE_STEP), how] for name, how in ALGORITHMS.items()},
}
STAGES = (0, 1, 2, 3)
ON_FOUR_RANKS = ((0, 4), (1, 2), (2, 4), (3, 2), (3, 4))  # ZeRO stage and ranks of a group


def divided(ranks: int) -> dict[str, Any]:
    return {"memory": {"sequence_parallel": ranks}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Launches:
    root = tmp_path_factory.mktemp("divided")
    invariant_assets.make(root)
    texts = [{"text": 2 * prompt} for prompt in invariant_assets.PROMPTS]
    (root / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    launches = Launches(root, rank_server)
    one = [case("plain", staged(0), generate="record")]
    launches.launch(1, one + [case(name, staged(0), *how) for name, how in VARIANTS.items()], "one")
    two = [case(f"zero{stage}", staged(stage), divided(2)) for stage in STAGES]
    two += [case(name, staged(3), divided(2), *how) for name, how in VARIANTS.items()]
    launches.launch(2, two, "2")
    cases = [case(f"zero{stage} {size}", staged(stage), divided(size)) for stage, size in ON_FOUR_RANKS]
    launches.launch(4, cases, "4")
    return launches


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_that_divide_rows_train_like_one(runs: Launches, stage: int) -> None:
    assert gaps(runs["one/plain"], runs[f"2/zero{stage}"]) == []


@pytest.mark.parametrize("name", VARIANTS)
def test_every_algorithm_trains_like_one_rank(runs: Launches, name: str) -> None:
    assert gaps(runs[f"one/{name}"], runs[f"2/{name}"]) == []


@pytest.mark.parametrize(("stage", "size"), ON_FOUR_RANKS)
def test_four_ranks_in_two_groups_or_one_train_like_one_rank(runs: Launches, stage: int, size: int) -> None:
    assert gaps(runs["one/plain"], runs[f"4/zero{stage} {size}"]) == []
