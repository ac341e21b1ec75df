"""Tests that all ranks of a world of 8 or 16 call the same collectives in an order that cannot deadlock.

The trainings run on CPUs over gloo, which executes the collectives of each group in threads of its own. NCCL
executes them on the GPU in the order of their launch, so that ranks that launch collectives of overlapping
groups in different orders may wait for one another for ever. Groups must also be created in the same order on
all ranks, since their names count them.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_sim.collective_worker import HANG
from tests.invariant import invariant_assets
from tests.invariant.invariant_runs import ASSETS, base, merged, staged
from tests.invariant.test_eight_ranks import make
from tests.support.collectives import Call, differences, find_cycle, read_calls
from tests.support.ranks import RankServer

pytestmark = [pytest.mark.slow, pytest.mark.ranks]

PROMPTS, SAMPLES = 16, 2
COMMON: dict[str, Any] = {
    "run": {"steps": 2},
    "actor": {"model": {"path": f"{ASSETS}/small"}},
    "critic": {"model": {"path": f"{ASSETS}/small_scorer"}},
    "rollout": {"prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES},
    "data": {"path": f"{ASSETS}/rows.jsonl", "eval_path": f"{ASSETS}/heldout.jsonl", "shuffle": False},
    "algo": {"epochs": 1, "minibatch_size": PROMPTS},
    "memory": {"rollout_tokens": 100, "score_tokens": 60, "train_tokens": 60},
    "eval": {"every": 2},
}
LORA = {role: {"lora": {"rank": 1, "targets": ["k_proj", "down_proj"]}} for role in ("actor", "critic")}
GRPO = {
    "algo": {"advantage": {"estimator": "grpo", "whiten": "none"}},
    "critic": {"init": "auto", "model": {"path": None}},
}


def hpz(size: int) -> dict[str, Any]:
    own = {"deepspeed": {"zero_optimization": {"zero_hpz_partition_size": size}}}
    return {"actor": own, "critic": own}


def vllm(size: int) -> dict[str, Any]:
    """Generates with groups of ``size`` ranks, which must divide the four attention heads of the model."""
    return {
        "actor": {"model": {"path": f"{ASSETS}/actor"}},
        "critic": {"model": {"path": f"{ASSETS}/scorer"}},
        "rollout": {"backend": "vllm", "vllm": {"tensor_parallel": size}},
    }


def divided(size: int) -> dict[str, Any]:
    """Lets groups of ``size`` ranks divide rows; it divides the four key-value heads of the models."""
    models = {
        role: {"model": {"path": f"{ASSETS}/{name}"}}
        for role, name in (("actor", "actor"), ("critic", "scorer"))
    }
    return {"memory": {"sequence_parallel": size}} | models


LAYERS = {"actor": {"zero": {"generation_gather": "layers"}}}
CASES: dict[int, dict[str, list[dict[str, Any]]]] = {
    8: {
        "ppo zero0": [staged(0)],
        "ppo zero1 bf16": [staged(1, "bf16")],
        "ppo zero2": [staged(2)],
        "ppo zero3 bf16": [staged(3, "bf16")],
        "ppo zero3 layers": [staged(3), LAYERS],
        "ppo zero3 hpz": [staged(3), hpz(4)],
        "ppo zero2 vllm": [staged(2), vllm(2)],
        "ppo zero2 vllm divided": [staged(2), vllm(2), divided(4)],
        "grpo zero1": [staged(1), GRPO],
        "grpo zero3": [staged(3), GRPO],
        "lora zero0": [staged(0), LORA],
        "lora zero2": [staged(2), LORA],
        "lora zero3": [staged(3), LORA],
        "lora zero3 vllm": [staged(3), LORA, vllm(4)],
    },
    # calls every collective of 8 ranks
    16: {
        "ppo zero0": [staged(0)],
        "lora zero3 hpz layers": [staged(3), LORA, hpz(8), LAYERS],
        "grpo zero3 vllm hpz divided": [staged(3), vllm(4), divided(2), GRPO, hpz(8)],
    },
}


class Records:
    """The records of all ranks of a world, as a whole and for each case."""

    def __init__(self, folder: Path):
        files = sorted(folder.glob("rank*.jsonl"), key=lambda file: int(file.stem.removeprefix("rank")))
        self.ranks = [read_calls(file) for file in files]
        self._marks: dict[str, int] = json.loads((folder / "marks.json").read_text())

    def counts(self) -> dict[str, dict[str, int]]:
        """Returns for each case how often rank 0 calls each collective, by the size of the group."""
        starts = [0, *self._marks.values()]
        return {
            label: dict(Counter(f"{call.name} on {len(call.group)}" for call in self.ranks[0][start:end]))
            for (label, end), start in zip(self._marks.items(), starts, strict=False)
        }


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> dict[int, Records]:
    """Returns the records by the number of ranks; a launch has half of them on each of two nodes."""
    root = tmp_path_factory.mktemp("worlds")
    invariant_assets.make(root)
    make(root)
    found = {}
    for size, cases in CASES.items():
        folder = root / str(size)
        folder.mkdir()
        configs = {
            label: reduce(merged, overlays, merged(base(), COMMON)) for label, overlays in cases.items()
        }
        (folder / "cases.json").write_text(json.dumps(configs).replace(f"{ASSETS}/", f"{root}/"))
        target, limit = "tests.gpu_sim.collective_worker:main", HANG * len(configs)
        rank_server.check(target, size, str(root), nodes=2, limit=limit)
        found[size] = Records(folder)
    return found


@pytest.fixture(params=CASES)
def records(worlds: dict[int, Records], request: pytest.FixtureRequest) -> Records:
    return worlds[request.param]


def test_all_ranks_of_a_group_call_the_same_collectives(records: Records) -> None:
    assert differences(records.ranks) == []


def test_no_collectives_wait_for_one_another(records: Records) -> None:
    assert find_cycle(records.ranks) == []


def test_each_group_is_created_by_all_ranks_in_the_same_order_before_its_use(records: Records) -> None:
    orders = [[call for call in calls if call.name.startswith("new_group")] for calls in records.ranks]
    assert orders == len(orders) * orders[:1] and len(orders[0]) > 20
    world = tuple(range(len(records.ranks)))
    for calls in records.ranks:
        created = {f"new_group {list(world)}"}
        for call in calls:
            created.add(call.name)
            assert f"new_group {list(call.group)}" in created, call


def test_each_case_calls_its_collectives(records: Records) -> None:
    """Shows the counts with ``pytest -s``."""
    size, counts = len(records.ranks), records.counts()
    print(json.dumps({f"{label} on {size} ranks": found for label, found in counts.items()}, indent=1))
    for label, found in counts.items():
        gathered = {
            int(name.rpartition(" ")[2]) for name in found if name.startswith("all_gather_into_tensor")
        }
        assert (size in gathered) == ("zero0" not in label), label
        group = {"vllm": 4 if "zero3" in label else 2, "hpz": size // 2}
        assert gathered - {size} == {n for word, n in group.items() if word in label}, label


def test_sixteen_ranks_call_every_collective_of_eight(worlds: dict[int, Records]) -> None:
    eight, sixteen = ({call.name.split()[0] for call in worlds[size].ranks[0]} for size in CASES)
    assert len(eight) > 6 and sixteen == eight


def mistaken(tmp_path: Path, rank_server: RankServer, kind: str) -> list[list[Call]]:
    codes, output = rank_server.run("tests.gpu_sim.collective_worker:mistake", 3, str(tmp_path), kind)
    assert codes == 3 * [0], output[-3000:]
    return [read_calls(tmp_path / f"rank{i}.jsonl") for i in range(3)]


def test_a_further_collective_of_one_rank_is_found(tmp_path: Path, rank_server: RankServer) -> None:
    calls = mistaken(tmp_path, rank_server, "extra")
    assert [line[: line.index(":")] for line in differences(calls)] == ["rank 1, call 7", "rank 2, call 7"]


def test_a_cycle_that_gloo_resolves_is_found(tmp_path: Path, rank_server: RankServer) -> None:
    calls = mistaken(tmp_path, rank_server, "cycle")
    assert differences(calls) == []  # each pair of ranks has one collective in common
    assert sorted(set(find_cycle(calls))) == [
        f"call 1 of group [{first}, {second}]" for first, second in ((0, 1), (0, 2), (1, 2))
    ]
