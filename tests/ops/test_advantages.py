"""Tests advantage estimators: goldens of six systems, hand-computed numbers, masks with holes, bootstrapping,
and groups of a single row.
"""

import pytest
import torch

from ppo_ds.algorithm.credit.gae import compute_gae, length_adaptive_lambda
from ppo_ds.algorithm.credit.returns import discounted_sum
from ppo_ds.ops.masked import masked_whiten
from ppo_ds.ops.sequences import next_token_mask
from tests.ops.by_name import approx_kl, gdpo_advantages, group_advantages, remax_advantages, token_rewards
from tests.ops.golden import Close, Within, assert_no_stale_entries, check, outputs


def rounded(actual):
    return Close(actual, 1e-7, "integer masks make n / (n - 1) a float32 number")


# gae.json ---------------------------------------------------------------------------------------------------
def gae(c, mask=None):
    return compute_gae(
        c.rewards, c.values, c.mask if mask is None else mask, c.params["gamma"], c.params["lam"]
    )


def trl(which):
    """Puts the score one position after EOS, a separate state; whitening rewards keeps their mean."""

    def step(c):
        p, states = c.params, next_token_mask(c.mask)
        rewards = token_rewards(
            c.scores,
            c.mask,
            approx_kl(c.old_logprobs, c.ref_logprobs, p["estimator"]),
            p["kl_coef"],
            place="next_token",
        )
        if p["whiten_rewards"]:
            rewards = masked_whiten(rewards, states, shift_mean=False)
        advantages, returns = compute_gae(rewards, c.values, states, p["gamma"], p["lam"])
        return rounded(
            {"rewards": rewards, "returns": returns, "advantages": masked_whiten(advantages, c.mask)}[which]
        )

    return step


GAE = {
    # DeepSpeed-Chat keeps one position after the last token
    "dschat.advantages": lambda c: gae(c, next_token_mask(c.mask))[0],
    "dschat.returns": lambda c: gae(c, next_token_mask(c.mask))[1],
    "openrlhf.cumulative_returns": lambda c: discounted_sum(c.rewards, c.mask, c.params["gamma"]),
    "verl.advantages_whitened": lambda c: rounded(Within(masked_whiten(gae(c)[0], c.mask), c.mask)),
    "verl.returns": lambda c: Within(gae(c)[1], c.mask),
    "torchtune.advantages": lambda c: rounded(masked_whiten(gae(c)[0], c.mask, shift_mean=False)),
    "*.advantages": lambda c: gae(c)[0],
    "*.advantages_raw": lambda c: gae(c)[0],
    "*.returns": lambda c: gae(c)[1],
    "trl.rewards": trl("rewards"),
    "trl.advantages": trl("advantages"),
    "trl.returns": trl("returns"),
}
NOT_GAE = {
    "holes_*/openrlhf.*": (
        "takes the places of a hole for steps without reward that decay; we pass them over, as verl does"
    )
}


@pytest.mark.parametrize(("case", "key"), outputs("gae.json", NOT_GAE))
def test_golden_gae(case, key):
    check(case, key, GAE)


def test_every_table_entry_is_used():
    assert_no_stale_entries("gae.json", GAE, NOT_GAE)


# worked by hand ---------------------------------------------------------------------------------------------
NAN = float("nan")


def test_a_lambda_for_each_length():
    """With alpha 1/2 the lambdas of responses of 1, 2, 4 and 5 tokens are 0, 0, 1/2 and 3/5."""
    lengths = torch.tensor([1, 2, 4, 5])
    lam = length_adaptive_lambda(lengths, 0.5)
    torch.testing.assert_close(lam, torch.tensor([0.0, 0.0, 0.5, 0.6]))
    rewards, values = torch.randn(2, 4, 7, generator=torch.Generator().manual_seed(1)).double()
    mask = torch.arange(7) < lengths[:, None]
    advantages, returns = compute_gae(rewards, values, mask, 0.9, lam.double(), lam_critic=1.0)
    torch.testing.assert_close(returns, discounted_sum(rewards, mask, 0.9))
    for row, (length, own) in enumerate(zip([1, 2, 4, 5], [0.0, 0.0, 0.5, 0.6], strict=True)):
        r, v = rewards[row].tolist(), [*values[row, :length].tolist(), 0.0]
        errors = [r[t] + 0.9 * v[t + 1] - v[t] for t in range(length)]
        for t in range(length):  # the definition: the sum of (gamma lambda)^k delta_{t+k}
            expected = sum((0.9 * own) ** k * errors[t + k] for k in range(length - t))
            assert advantages[row, t].item() == pytest.approx(expected, abs=1e-6)


def test_a_greedy_baseline_worked_by_hand():
    """The baseline 2 is discounted like the score of 5, and the cost of each token is not."""
    rewards, mask = torch.tensor([[-1.0, -1.0, 4.0, NAN]]), torch.tensor([[1, 1, 1, 0]])
    made = remax_advantages(rewards, mask, 0.5, baselines=torch.tensor([2.0]))
    assert made.tolist() == [[-1 - 0.5 + 0.25 * 2, -1 + 0.5 * 2, 2.0, 0.0]]


def test_equal_scores_have_no_advantage_however_they_round():
    scores = torch.full((7,), 0.1)
    for kind in ("grpo", "rloo", "dr_grpo"):
        assert group_advantages(scores, torch.zeros(7, dtype=torch.long), kind).abs().max() < 1e-8


def test_the_standard_deviation_of_all_scores_divides():
    """The group means are 2 and 7, and the mean of all scores is 4.5.

    TRL's scale_rewards="batch" has the same numbers, with an eps of 1e-4.
    """
    scores, groups = torch.tensor([1.0, 3.0, 5.0, 9.0]).double(), torch.tensor([0, 0, 1, 1])
    made = group_advantages(scores - 0.5, groups, "lite_ppo", eps=0.0)  # a constant changes nothing
    variance = sum((x - 4.5) ** 2 for x in (1, 3, 5, 9)) / 3
    torch.testing.assert_close(made, torch.tensor([-1.0, 1.0, -2.0, 2.0]).double() / variance**0.5)
    equal = group_advantages(torch.full((4,), 0.1), groups, "lite_ppo")
    assert equal.abs().max() < 1e-8


def test_gdpo_worked_by_hand():
    """The second response of each group has one or both of two rewards, the first none, as in the paper.

    A normalised reward is -+1/sqrt(2), so the sums are -+0.71 and -+1.41, whose variance is 5/3. GRPO on the
    sum of the rewards gives both groups the same advantages.
    """
    rewards = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 1.0]]).double()
    groups = torch.tensor([4, 4, 2, 2])
    made = gdpo_advantages(rewards, groups, torch.ones(2))
    expected = torch.tensor([-1.0, 1.0, -2.0, 2.0]).double() * 0.5**0.5 / (5 / 3) ** 0.5
    torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)
    on_sums = group_advantages(rewards.sum(1), groups, "grpo")
    torch.testing.assert_close(on_sums[:2], on_sums[2:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("successes", [0, 1, 3, 8])
def test_maxrl_averages_the_scores_of_successes(successes):
    """Theorem 2 of Tajwar et al.: the gradient is the mean of grad log p over the successes of a group.

    With the control variate, the mean over all responses, the weights are 1/K - 1/N for each of the K
    successes and -1/N for the others; the mean over N responses multiplies them by N.
    """
    scores = (torch.arange(8) < successes).double()
    made = group_advantages(scores, torch.zeros(8, dtype=torch.long), "maxrl")
    weights = [(1 / successes if i < successes else 0) - 1 / 8 for i in range(8)] if successes else [0.0] * 8
    torch.testing.assert_close(made, 8 * torch.tensor(weights).double())


def test_maxrl_has_no_advantage_for_a_mean_that_is_not_positive():
    made = group_advantages(torch.tensor([-3.0, 1.0, 0.0, 0.0]), torch.tensor([0, 0, 1, 1]), "maxrl")
    assert made.tolist() == [0.0] * 4
