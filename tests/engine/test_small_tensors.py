"""Tests tensors with fewer elements than ranks, and the number format in which gradients are summed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tests.engine.small_tensors_worker import DECAY, LR, SIZES, STEPS, Vectors, inputs
from tests.support.ranks import RankServer


def expected() -> tuple[list[float], list[list[float]], list[list[float]]]:
    """Trains the model with torch's AdamW on all rows; returns norms, weights and their average."""
    module = Vectors(SIZES)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    # vectors have no weight decay, which applies to matrices only
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    norms, average = [], []
    for step in range(STEPS):
        if step == STEPS - 1:
            average = [
                (0.25 * old + 0.75 * new.detach()).tolist()
                for old, new in zip(before, module.parameters(), strict=True)
            ]
        optimizer.zero_grad()
        module(inputs(step).mean(0)).backward()
        norms.append(torch.cat([parameter.grad for parameter in module.parameters()]).norm().item())
        optimizer.step()
    return norms, [parameter.tolist() for parameter in module.parameters()], average


def close(a: list[list[float]], b: list[list[float]]) -> bool:
    return all(x == pytest.approx(y, abs=1e-6) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("small")
    rank_server.check("tests.engine.small_tensors_worker:small", 8, str(folder))
    return json.loads((folder / "small.json").read_text())


@pytest.mark.parametrize("stage", range(4))
def test_tensors_with_fewer_elements_than_ranks_train_as_in_plain_torch(small: dict, stage: int) -> None:
    assert DECAY > 0 and min(SIZES) == 1
    norms, weights, average = expected()
    assert small[str(stage)]["norms"] == pytest.approx(norms, rel=1e-5)
    assert close(small[str(stage)]["weights"], weights)
    assert close(small[str(stage)]["average"], average)
    assert small[str(stage)]["resumed"] is True


@pytest.mark.parametrize("stage", range(4))
def test_training_does_not_wait_for_the_device(small: dict, stage: int) -> None:
    """DeepSpeed's throughput timer, which is on by default, synchronizes from the third step."""
    assert small[str(stage)]["waits"] == 0


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("sums")
    rank_server.check("tests.engine.small_tensors_worker:sums", 2, str(folder))
    return json.loads((folder / "sums.json").read_text())


@pytest.mark.parametrize(("ranks", "mean"), [(64, 0.5), (65, (1 + 2**-9) / 2)])
@pytest.mark.parametrize("stage", range(4))
def test_above_64_ranks_deepspeed_sums_bf16_gradients_in_fp32(
    sums: dict, stage: int, ranks: int, mean: float
) -> None:
    assert sums[f"stage {stage} of {ranks}"][0] == mean


@pytest.mark.parametrize(("ranks", "dtype"), [(64, "bfloat16"), (65, "float32")])
def test_only_zero_2_and_3_sum_the_gradients_of_each_micro_batch(sums: dict, ranks: int, dtype: str) -> None:
    times = [sums[f"stage {stage} of {ranks}"][1] for stage in range(4)]
    assert times == [[dtype], [dtype], 3 * [dtype], 3 * [dtype]]
