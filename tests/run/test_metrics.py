"""Tests that metrics add sums and counts, and never average means."""

import pytest
import torch

from ppo_ds.engine.trained import StepInfo
from ppo_ds.run.metrics import MetricSums, step_metrics

NAN = float("nan")


def test_masked_means_ignore_what_lies_outside(world):
    sums = MetricSums()
    sums.add_mean(
        "a",
        torch.tensor([[1.0, 5.0, NAN], [3.0, float("inf"), NAN]]),
        torch.tensor([[1, 1, 0], [1, 0, 0]]).bool(),
    )
    sums.add_mean("b", torch.tensor([True, False, True, True]))
    sums.add_mean("none", torch.tensor([NAN]), torch.tensor([False]))
    assert sums.reduced(world) == {"a": 3.0, "b": 0.75, "none": 0.0}


def test_means_over_microbatches_and_ranks_are_those_of_all_values(on_ranks):
    values = torch.arange(10.0) ** 2
    parts = [[values[:1], values[1:2]], [values[2:3], values[3:]]]  # rank 1 has most values

    def work(world):
        sums = MetricSums()
        for part in parts[world.rank]:
            sums.add_mean("mean", part)
            sums.add_mean_and_std("x", part)
            sums.add_max("max", part.max())
            sums.add_max("top", -part.min() - 1)
        return sums.reduced(world)

    for seen in on_ranks(2, work):
        assert seen == pytest.approx(
            {
                "mean": 28.5,
                "x/mean": 28.5,
                "x/std": float(values.std(unbiased=False)),
                "max": 81.0,
                "top": -1.0,
            }
        )


def test_a_spread_without_variance_is_zero_and_not_nan(world):
    sums = MetricSums()
    sums.add_mean_and_std("x", torch.full((7,), 0.1))
    assert sums.reduced(world)["x/std"] == pytest.approx(0, abs=1e-8)


def test_spread_under_a_mask(world):
    sums = MetricSums()
    for name in ("adv", "eval/score"):
        sums.add_mean_and_std(name, torch.tensor([1.0, 3.0, NAN]), torch.tensor([True, True, False]))
    assert sums.reduced(world) == {
        "adv/mean": 2.0,
        "adv/std": 1.0,
        "eval/score_mean": 2.0,
        "eval/score_std": 1.0,
    }


def test_moments_become_an_explained_variance(on_ranks):
    """The returns are 1, 2, 3, 6 and the values 1, 2, 4, 4, so the errors are 0, 0, -1, 2.

    Var(returns) is 3.5, and Var(errors) is 1.1875.
    """
    returns, values = torch.tensor([1.0, 2.0, 3.0, 6.0]), torch.tensor([1.0, 2.0, 4.0, 4.0])

    def work(world):
        r = returns[2 * world.rank : 2 * world.rank + 2]
        e = r - values[2 * world.rank : 2 * world.rank + 2]
        sums = MetricSums()
        sums.add_parts(
            {"ev": torch.stack([torch.tensor(2.0), r.sum(), (r * r).sum(), e.sum(), (e * e).sum()])}
        )
        return sums.reduced(world)["ev"]

    assert on_ranks(2, work) == pytest.approx([1 - 1.1875 / 3.5] * 2)


def test_describe_steps():
    infos = {
        "policy": [StepInfo(1.0, 0.1, False, 8.0), StepInfo(3.0, 0.2, True, 4.0)],
        "value": [StepInfo(5.0, 0.3, False, 1.0), StepInfo(7.0, 0.4, True, 1.0)],
    }
    assert step_metrics(infos) == {
        "policy/grad_norm": 2.0,
        "policy/lr": 0.2,
        "value/grad_norm": 6.0,
        "value/lr": 0.4,
        "health/skipped_steps": 1.0,  # a step that both models skip counts once
        "health/loss_scale": 4.0,
    }


def test_describe_steps_of_a_critic_alone():
    assert step_metrics({"policy": [], "value": [StepInfo(5.0, 0.3, True, 2.0)]}) == {
        "value/grad_norm": 5.0,
        "value/lr": 0.3,
        "health/skipped_steps": 1.0,
        "health/loss_scale": 2.0,
    }
