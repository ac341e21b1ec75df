"""Tests the metrics of an experience, computed by hand."""

import math
from dataclasses import replace

import pytest
import torch

from ppo_ds.ppo.experience_metrics import describe
from tests.ppo.algo_cases import two_groups, without_critic


@pytest.fixture
def experience():
    return two_groups()


def test_by_hand(experience):
    seen = describe(experience, kl_coef=0.3, samples_per_prompt=2)
    # k3 is e^-d - 1 + d for d = 0.5, -0.2, 0.5 and 0.9
    k3 = [math.exp(-0.5) - 0.5, math.exp(0.2) - 1.2, math.exp(-0.5) - 0.5, math.exp(-0.9) - 0.1]
    assert seen == pytest.approx(
        {
            "reward/score_mean": 1.5,
            "reward/score_std": 1.5,  # scores 1, 1, 0 and 4
            "reward/score_min": 0.0,
            "reward/score_max": 4.0,
            "reward/missing_eos_frac": 0.25,
            "kl/ref_seq_mean": (0.3 + 0.5 + 0.0 + 0.9) / 4,
            "kl/ref_token_mean": 1.7 / 10,
            "kl/ref_token_max": 0.9,
            "kl/k3_token_mean": sum(k3) / 10,
            "kl/coef": 0.3,
            "parity/logp_abs_diff_mean": 0.1,  # (0.25 + 0.75) / 10 tokens
            "parity/logp_abs_diff_max": 0.75,
            "value/pred_mean": 1.5,
            "value/return_mean": 1.0,
            "value/return_std": math.sqrt(6 / 10),  # ten returns: 0 three times, 1 four times, 2 three times
            "rollout/prompt_len_mean": 1.5,
            "rollout/resp_len_mean": 2.5,
            "rollout/resp_len_max": 3.0,
            "rollout/stop_frac": 0.75,
            "rollout/truncated_frac": 0.25,
            "rollout/empty_frac": 0.25,
            "rollout/pad_frac": 4 / 20,
            "rollout/unique_frac": 0.75,
            "rollout/zero_std_group_frac": 0.5,
        },
        abs=1e-6,
    )


def test_a_single_token_that_is_no_end_token_is_a_response(experience):
    rows = experience.select(torch.tensor([1, 1])).trimmed()
    cut = replace(rows, finished=torch.tensor([True, False]))
    assert describe(cut, kl_coef=0.0, samples_per_prompt=1)["rollout/empty_frac"] == 0.5


def test_without_a_critic_there_are_no_values(experience):
    plain = without_critic(experience)
    seen, full = (describe(rows, kl_coef=0.3, samples_per_prompt=2) for rows in (plain, experience))
    assert full.keys() - seen.keys() == {"value/pred_mean", "value/return_mean", "value/return_std"}
    assert seen == {name: full[name] for name in seen}


def test_value_metrics_cover_the_trained_states(experience):
    """The second row gets a further trained state, with value 5 and return 3."""
    values, returns, mask = (
        experience.values.clone(),
        experience.returns.clone(),
        experience.value_mask.clone(),
    )
    values[1, 1], returns[1, 1], mask[1, 1] = 5.0, 3.0, True
    seen = describe(
        replace(experience, values=values, returns=returns, value_mask=mask),
        kl_coef=0.0,
        samples_per_prompt=1,
    )
    assert seen["value/pred_mean"] == pytest.approx(20 / 11) and seen["value/return_mean"] == pytest.approx(
        13 / 11
    )
