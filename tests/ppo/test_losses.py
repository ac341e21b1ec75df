"""Tests the losses of one micro-batch against values and gradients computed by hand."""

import math
from dataclasses import replace

import pytest
import torch

from ppo_ds.algorithm.loss.aggregation import batch_totals
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ppo.losses import PtxObjective, actor_loss
from tests.ppo.algo_cases import RUBBISH
from tests.ppo.learner_cases import policy_terms, value_objective

# Two responses, the first of two tokens and the second of one token; the padding holds arbitrary values.
# The values are log pi - log pi_old: the ratio of the first response is e^0.3, and of the second e^-0.1.
DIFFERENCES = [[0.1, 0.2], [-0.1]]
ADVANTAGES = [[1.0, 1.0], [-2.0]]
FROM_REFERENCE = [[0.5, -0.2], [1.0]]  # log pi - log pi_ref


def column(rows, rubbish=RUBBISH):
    return torch.tensor([[*row, *[rubbish] * (2 - len(row))] for row in rows], dtype=torch.float64)


@pytest.fixture
def micro(experience):
    made = experience([1, 1], [2, 1])
    old = column([[-1.0, -2.0], [-3.0]])
    now = now_of(old)
    return replace(
        made,
        old_logprobs=old,
        ref_logprobs=now - column(FROM_REFERENCE, 0.0),
        advantages=column(ADVANTAGES),
        weights=torch.ones(2, 2).double(),
    )


def now_of(old):
    return old + column(DIFFERENCES, 0.0)


def policy(micro, out=None, kl_coef=0.0, totals=None, **changes):
    """Returns the loss, its parts, and the gradient of the log-probs."""
    out = out or PolicyOutput(now_of(micro.old_logprobs), torch.full((2, 2), 5.0).double(), None, None)
    out = PolicyOutput(*(x.clone().requires_grad_() if x is not None else None for x in out))
    terms, totals = policy_terms(**changes), totals or batch_totals([micro.response_mask])
    loss, seen = actor_loss(terms, out, micro, totals, kl_coef)
    loss.backward()
    return loss.item(), seen, out


def gradient(x):
    return x.grad[torch.tensor([[True, True], [True, False]])].tolist()


def mean(part):
    total, count = part.tolist()
    return total / count


def test_token_by_token(micro):
    """Ratios e^0.1 and e^-0.1 are inside the clip range; e^0.2 is above it and has no gradient.

    The loss is a mean over three tokens.
    """
    loss, seen, out = policy(micro)
    assert loss == pytest.approx((-math.exp(0.1) - 1.2 + 2 * math.exp(-0.1)) / 3)
    assert gradient(out.logprobs) == pytest.approx([-math.exp(0.1) / 3, 0, 2 * math.exp(-0.1) / 3])
    assert mean(seen["policy/clipfrac"]) == pytest.approx(1 / 3) and mean(
        seen["policy/loss"]
    ) == pytest.approx(loss)


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_sum"])
def test_an_answer_as_one_action(micro, agg):
    """The ratios of the responses are e^0.3, clipped to 1.2, and e^-0.1.

    The loss is a mean over two responses, for every aggregation of tokens.
    """
    loss, seen, out = policy(micro, level="sequence", agg=agg)
    assert loss == pytest.approx((-1.2 + 2 * math.exp(-0.1)) / 2)
    assert gradient(out.logprobs) == pytest.approx([0, 0, 2 * math.exp(-0.1) / 2])
    assert mean(seen["policy/loss"]) == pytest.approx(loss)


def test_the_gradient_of_an_answer_is_that_of_its_summed_log_prob(micro):
    """With a wide clip, the gradient of each token of the first response is -A r / 2, whatever its length."""
    loss, _, out = policy(micro, level="sequence", clip_high=1.0)
    assert loss == pytest.approx((-math.exp(0.3) + 2 * math.exp(-0.1)) / 2)
    assert gradient(out.logprobs) == pytest.approx([-math.exp(0.3) / 2] * 2 + [math.exp(-0.1)])


@pytest.mark.parametrize(("kind", "ratios"), [("reinforce", [1.0, 1.0]), ("cispo", [1.2, math.exp(-0.1)])])
def test_other_objectives_of_whole_answers(micro, kind, ratios):
    """The loss is -A (clipped ratio) log pi(response).

    log pi(response) is the sum over its tokens, not their mean: -0.9 - 1.8 = -2.7, and -3.1.
    """
    loss, seen, out = policy(micro, level="sequence", kind=kind)
    assert loss == pytest.approx((-ratios[0] * -2.7 + 2 * ratios[1] * -3.1) / 2)
    assert gradient(out.logprobs) == pytest.approx([-ratios[0] / 2] * 2 + [ratios[1]])
    assert mean(seen["policy/loss"]) == pytest.approx(loss)


@pytest.mark.parametrize(
    ("kind", "slopes"), [("reinforce", [-1, -1, 2]), ("cispo", [-math.exp(0.1), -1.2, 2 * math.exp(-0.1)])]
)
def test_other_objectives_of_tokens(micro, kind, slopes):
    assert gradient(policy(micro, kind=kind)[2].logprobs) == pytest.approx([slope / 3 for slope in slopes])


def test_bounds_of_the_ratio(micro):
    """clip_high 0.05 clips both tokens of the first response.

    With advantage -2 and ratio e^1.5, a dual clip of 3 limits the loss to 6.
    """
    loss, seen, _ = policy(micro, clip_high=0.05)
    assert loss == pytest.approx((-1.05 - 1.05 + 2 * math.exp(-0.1)) / 3)
    far = replace(micro, old_logprobs=micro.old_logprobs - column([[0.0, 0.0], [1.6]], 0.0))
    out = PolicyOutput(now_of(micro.old_logprobs), None, None, None)
    plain, _, _ = policy(far, out, entropy_kind="sample")
    bounded, seen, bounded_out = policy(far, out, entropy_kind="sample", dual_clip=3.0)
    assert plain == pytest.approx((-math.exp(0.1) - 1.2 + 2 * math.exp(1.5)) / 3)
    assert bounded == pytest.approx((-math.exp(0.1) - 1.2 + 6) / 3)
    assert (
        mean(seen["policy/clipfrac_low"]) == pytest.approx(1 / 3) and gradient(bounded_out.logprobs)[2] == 0
    )


def test_importance_weights_multiply_the_surrogate(micro):
    weighed = replace(micro, weights=column([[2.0, 1.0], [0.5]]))
    loss, _, out = policy(weighed, entropy_coef=0.0)
    assert loss == pytest.approx((-2 * math.exp(0.1) - 1.2 + 0.5 * 2 * math.exp(-0.1)) / 3)
    assert gradient(out.logprobs) == pytest.approx([-2 * math.exp(0.1) / 3, 0, math.exp(-0.1) / 3])


# -- entropy, KL, balance ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "n"), [("token", 3), ("sequence", 2)])
def test_entropy_is_a_bonus(micro, level, n):
    """All exact entropies are 5.

    The bonus is the mean over three tokens. On level sequence it is the mean over two responses, whose
    entropy is the sum over their tokens.
    """
    plain, _, _ = policy(micro, level=level)
    loss, seen, out = policy(micro, level=level, entropy_coef=0.1)
    assert loss == pytest.approx(plain - 0.1 * 15 / n) and mean(seen["policy/entropy"]) == pytest.approx(5)
    assert gradient(out.entropy) == pytest.approx([-0.1 / n] * 3)


@pytest.mark.parametrize(("level", "n"), [("token", 3), ("sequence", 2)])
def test_the_entropy_of_the_sample(micro, level, n):
    """The estimate is -log p of the sampled tokens, 0.9 + 1.8 + 3.1; a bonus decreases their log-probs."""
    plain, _, before = policy(micro, level=level)
    loss, seen, out = policy(micro, level=level, entropy_coef=0.1, entropy_kind="sample")
    assert loss == pytest.approx(plain - 0.1 * 5.8 / n) and mean(seen["policy/entropy"]) == pytest.approx(
        5.8 / 3
    )
    pushed = [x - y for x, y in zip(gradient(out.logprobs), gradient(before.logprobs), strict=True)]
    # only the estimate has a gradient
    assert pushed == pytest.approx([0.1 / n] * 3) and out.entropy.grad is None


@pytest.mark.parametrize(
    ("level", "agg", "expected"),
    [
        ("token", "token_mean", (0.125 + 0.02 + 0.5) / 3),
        ("token", "seq_mean_token_mean", (0.145 / 2 + 0.5) / 2),
        ("sequence", "token_mean", (0.145 + 0.5) / 2),  # the KL of a response is summed over its tokens
    ],
)
def test_the_kl_in_the_loss(micro, level, agg, expected):
    """For log ratios 0.5, -0.2 and 1, k2 is 0.125, 0.02 and 0.5; the metric is its mean over tokens."""
    plain, seen, _ = policy(micro, level=level, agg=agg)
    assert "policy/kl_loss" not in seen
    loss, seen, _ = policy(micro, level=level, agg=agg, kl_in_loss=True, kl_coef=0.7)
    assert loss == pytest.approx(plain + 0.7 * expected)
    assert mean(seen["policy/kl_loss"]) == pytest.approx(0.645 / 3)


def test_a_kl_with_coefficient_zero_is_not_in_the_loss(micro):
    """The reference returns log-probs of -inf.

    With coefficient 0 they change neither the loss nor the gradient.
    """
    plain, _, before = policy(micro)
    loss, seen, out = policy(
        replace(micro, ref_logprobs=micro.ref_logprobs * math.inf), kl_in_loss=True, kl_coef=0.0
    )
    assert loss == plain and gradient(out.logprobs) == gradient(before.logprobs)
    assert not math.isfinite(mean(seen["policy/kl_loss"]))


@pytest.mark.parametrize(
    ("estimator", "slopes"),
    [
        ("k1", [1, 1, 1]),
        ("abs", [1, -1, 1]),
        ("k2", [0.5, -0.2, 1.0]),
        ("k3", [1 - math.exp(-0.5), 1 - math.exp(0.2), 1 - math.exp(-1.0)]),
    ],
)
def test_the_gradient_of_each_estimator(micro, estimator, slopes):
    plain, _, before = policy(micro)
    _, _, out = policy(micro, kl_in_loss=True, kl_estimator=estimator, kl_coef=0.3)
    pulled = [x - y for x, y in zip(gradient(out.logprobs), gradient(before.logprobs), strict=True)]
    assert pulled == pytest.approx([0.3 * slope / 3 for slope in slopes])


def test_the_balance_loss_of_a_forward_counts_by_its_tokens(micro):
    """This forward has 3 of the step's 12 tokens.

    Gradients are averaged over 2 ranks, so the balance loss of 4 contributes 0.1 * 4 * 3 / 12 * 2.
    """
    totals = batch_totals([torch.ones(3, 4)], dp_size=2)
    out = PolicyOutput(
        now_of(micro.old_logprobs), torch.zeros(2, 2).double(), None, torch.tensor(4.0).double()
    )
    plain, seen, _ = policy(micro, out, totals=totals)
    assert "policy/aux_loss" not in seen
    loss, seen, out = policy(micro, out, totals=totals, aux_coef=0.1)
    assert loss == pytest.approx(plain + 0.2) and out.aux.grad.item() == pytest.approx(0.05)
    assert seen["policy/aux_loss"].tolist() == [12.0, 3.0] and not seen["policy/aux_loss"].requires_grad


# -- values and other texts ----------------------------------------------------------------------------------


def test_values(micro):
    """The errors are 1, 2 and 3; one of the three states is after the first response's end.

    The loss is half the mean square, times 0.1. A clip of 0.5 increases the loss of the last state.
    """
    states = torch.tensor([[True, False, True], [True, False, False]])
    rows = replace(
        micro,
        values=torch.zeros(2, 3),
        returns=torch.tensor([[1.0, 8.0, 2.0], [-4.0, 8.0, 8.0]]),
        value_mask=states,
    )
    values = torch.tensor([[0.0, 9.0, 0.0], [-1.0, 9.0, 9.0]], requires_grad=True)
    totals = batch_totals([states])
    loss, seen = value_objective(clip=None, coef=0.1)(values, rows, totals)
    assert loss.item() == pytest.approx(0.1 * (1 + 4 + 9) / 2 / 3) and mean(
        seen["value/loss"]
    ) == pytest.approx(14 / 6)
    loss.backward()
    assert (
        values.grad[states].tolist() == pytest.approx([-0.1 / 3, -0.2 / 3, 0.3 / 3])
        and values.grad[~states].abs().max() == 0
    )
    clipped, _ = value_objective(clip=0.5, half=False)(values, rows, totals)
    assert clipped.item() == pytest.approx((1 + 4 + 3.5**2) / 3)


def test_one_value_for_each_answer(micro):
    """On level sequence each response has one value, whatever its length; the errors are 1 and 3."""
    states = torch.tensor([[False, False, True], [False, True, False]])
    rows = replace(micro, values=torch.zeros(2, 3), returns=torch.full((2, 3), 1.0), value_mask=states)
    loss, _ = value_objective(clip=None, half=False, coef=0.5)(
        torch.tensor([[9.0, 9, 0], [9, 4, 9]]), rows, batch_totals([states])
    )
    assert loss.item() == pytest.approx(0.5 * (1 + 9) / 2)


def test_pretraining_texts(micro):
    """The loss is the mean of -log p over the 6 text tokens of the whole step, 3 of them in this forward."""
    out = PolicyOutput(column([[-1.0, -2.0], [-3.0]]).requires_grad_(), None, None, None)
    loss, seen = PtxObjective(10.0, iter(()))(out, micro, batch_totals([torch.ones(2, 3)]))
    assert loss.item() == pytest.approx(10 * 6 / 6) and seen["policy/ptx_loss"].tolist() == [6.0, 3.0]
    loss.backward()
    assert gradient(out.logprobs) == pytest.approx([-10 / 6] * 3) and out.logprobs.grad[1, 1] == 0
