"""Tests perf/* and mem/* of a PPO step, computed by hand."""

import pytest

from ppo_ds.compute.sizes import Size
from ppo_ds.ppo.meter import Meter
from ppo_ds.run.performance import Capacity, UpdateCost
from tests.ppo.algo_cases import make_experience, without_critic

SIZE = Size(body=100, head=10, layers=1, width=2, kv_width=1)
TIMES = {"time/step": 10.0, "time/generate": 4.0, "time/update_actor": 2.0, "time/update_critic": 1.0}


@pytest.fixture
def meter(world):
    critic = UpdateCost(Size(body=50, head=0, layers=1, width=2, kv_width=1), 2)
    return Meter(
        world=world,
        capacity=Capacity(1000.0, 500.0),
        actor=UpdateCost(SIZE, 3),
        critic=critic,
        weight_bytes=2,
    )


@pytest.fixture
def rows():
    """Makes rows of 2 + 3 and 1 + 1 tokens. The 5 and 2 tokens attend to 15 and 3 positions."""
    return make_experience([2, 1], [3, 1])


def test_by_hand(meter, rows):
    seen = meter(rows, TIMES, {"policy/epochs_run": 2.0})
    # the last term is the head, applied at 4 response positions
    actor = 2 * 100 * 7 + 4 * 1 * 2 * 18 + 2 * 10 * 4
    critic = 2 * 50 * 7 + 4 * 1 * 2 * 18
    # the second and third tokens of the first response are decoded with 3 and 4 positions in the cache; keys
    # and values have one number each
    read = 2 * (110 * 2 + 2 * 1 * (3 + 4))
    assert {name: value for name, value in seen.items() if name.startswith("perf/")} == pytest.approx(
        {
            "perf/tokens_per_s": 0.7,
            "perf/tokens_per_s_gpu": 0.7,
            "perf/gen_tokens_per_s": 1.0,
            "perf/samples_per_s": 0.2,
            "perf/mfu_actor": 2 * 3 * actor / 2.0 / 1000,
            "perf/mfu_critic": 2 * 2 * critic / 1.0 / 1000,
            "perf/hbm_frac_decode": read / 4.0 / 500,
        }
    )


def test_dropped_rounds_were_generated_too(meter, rows):
    plain, seen = (
        meter(rows, TIMES, {"policy/epochs_run": 1.0} | more)
        for more in ({}, {"rollout/dropped_tokens": 4.0})
    )
    for name in ("perf/gen_tokens_per_s", "perf/hbm_frac_decode"):
        assert seen[name] == pytest.approx(2 * plain[name])
    assert seen["perf/tokens_per_s"] == plain["perf/tokens_per_s"]  # counts only the rows of the update


def test_a_phase_that_did_not_run_has_no_metric(meter, rows):
    times = {name: seconds for name, seconds in TIMES.items() if name != "time/update_actor"}
    seen = meter(without_critic(rows), times, {"policy/epochs_run": 1.0})
    assert "perf/mfu_actor" not in seen and "perf/mfu_critic" in seen
