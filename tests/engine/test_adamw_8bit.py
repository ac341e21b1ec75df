"""Tests AdamW with 8-bit moments: its table, its steps, checkpoints that resume bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ppo_ds.engine.adamw_8bit import add_fp32_moments, decoded, encoded, make_adamw_8bit, remove_fp32_moments
from tests.engine.test_checkpoint import assert_exact, launch
from tests.support.ranks import RankServer

pytest.importorskip("bitsandbytes", reason="the extra bitsandbytes is not installed")

SIGNED = torch.tensor([-0.75, -0.5, 0.0, 0.25, 1.0])  # like the real table: 1 is in it, -1 is not


def test_moments_are_decoded_by_hand() -> None:
    codes = torch.tensor([4, 0, 2, *[3] * 253, 1, 4], dtype=torch.uint8)
    values = decoded(codes, SIGNED, torch.tensor([8.0, 2.0]))
    assert values.tolist() == [8.0, -6.0, 0.0, *[2.0] * 253, -1.0, 2.0]


def test_values_are_encoded_by_hand() -> None:
    """The second block has a negative number of the largest magnitude, the third one only zeros."""
    values = torch.tensor([8.0, -5.8, *[0.0] * 254, -6.0, 2.1, *[0.0] * 254, 0.0])
    codes, scales = encoded(values, SIGNED)
    assert scales.tolist() == [8.0, 8.0, 0.0]
    assert codes[[0, 1, 2, 256, 257]].tolist() == [4, 0, 2, 0, 3]
    assert decoded(codes, SIGNED, scales)[-1] == 0.0


def trained(optimizer: torch.optim.Optimizer, parameter: Tensor, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        noise = torch.randn(parameter.shape, generator=draw) * torch.randn(parameter.shape, generator=draw)
        parameter.grad = parameter.detach() - 3 + noise
        optimizer.step()


@pytest.mark.parametrize("size", [3, 256, 100_001])
def test_stored_moments_are_those_of_the_optimizer_to_the_bit(size: int) -> None:
    weights = [nn.Parameter(torch.zeros(size)) for _ in range(2)]
    first, second = (make_adamw_8bit([{"params": [weight]}], lr=0.01) for weight in weights)
    trained(first, weights[0], range(7))
    add_fp32_moments(first, [weights[0]])
    saved = {name: first.state[weights[0]][name].clone() for name in ("exp_avg", "exp_avg_sq")}
    remove_fp32_moments(first, store=False)
    weights[1].data.copy_(weights[0])
    add_fp32_moments(second, [weights[1]])
    for name, values in saved.items():
        second.state[weights[1]][name].copy_(values)
    remove_fp32_moments(second, store=True)
    second.state[weights[1]]["step"] = 7
    trained(first, weights[0], range(7, 12))
    trained(second, weights[1], range(7, 12))
    assert torch.equal(*weights) and "exp_avg" not in first.state[weights[0]]
    assert first.state[weights[0]]["state1"].dtype == torch.uint8


def test_steps_are_close_to_those_of_adamw_with_fp32_moments() -> None:
    """100 steps towards 3 from 0 with noise: the mean difference stays below 2 % of the way."""
    weights = [nn.Parameter(torch.zeros(8192)) for _ in range(2)]
    options = dict(lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    trained(make_adamw_8bit([{"params": [weights[0]]}], **options), weights[0], range(100))
    trained(torch.optim.AdamW([weights[1]], **options), weights[1], range(100))
    assert 1.0 < weights[1].mean() < 3.5
    difference = (weights[0] - weights[1]).abs()
    assert 0 < difference.mean() < 0.02 * weights[1].mean(), difference.mean()


def test_a_resumed_run_equals_an_uninterrupted_one_at_every_stage(
    tmp_path: Path, rank_server: RankServer
) -> None:
    cases = launch(rank_server, 2, tmp_path, "eight_bit", "checkpoint_worker")
    moved = [case for case in cases if "moved" in case["case"]]
    assert len(cases) == 11 and len(moved) == 3
    assert_exact([case for case in cases if case not in moved])
    for case in moved:  # the blocks are others, so that moments are rounded once more
        assert case["codes"] and case["freed"] and 0 < case["gap"] < 0.05, case
