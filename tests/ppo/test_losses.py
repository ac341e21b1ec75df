"""Tests the losses of one micro-batch against values and gradients computed by hand."""

import math
from dataclasses import replace

import pytest
import torch

from ppo_ds.algorithm.loss.aggregation import batch_totals
from ppo_ds.models.policy import PolicyOutput
from ppo_ds.ppo.losses import PtxObjective, actor_loss
from tests.ppo.algo_cases import RUBBISH
from tests.ppo.learner_cases import policy_terms

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


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_sum"])
def test_an_answer_as_one_action(micro, agg):
    """The ratios of the responses are e^0.3, clipped to 1.2, and e^-0.1.

    The loss is a mean over two responses, for every aggregation of tokens.
    """
    loss, seen, out = policy(micro, level="sequence", agg=agg)
    assert loss == pytest.approx((-1.2 + 2 * math.exp(-0.1)) / 2)
    assert gradient(out.logprobs) == pytest.approx([0, 0, 2 * math.exp(-0.1) / 2])
    assert mean(seen["policy/loss"]) == pytest.approx(loss)


@pytest.mark.parametrize(("kind", "ratios"), [("reinforce", [1.0, 1.0]), ("cispo", [1.2, math.exp(-0.1)])])
def test_other_objectives_of_whole_answers(micro, kind, ratios):
    """The loss is -A (clipped ratio) log pi(response).

    log pi(response) is the sum over its tokens, not their mean: -0.9 - 1.8 = -2.7, and -3.1.
    """
    loss, seen, out = policy(micro, level="sequence", kind=kind)
    assert loss == pytest.approx((-ratios[0] * -2.7 + 2 * ratios[1] * -3.1) / 2)
    assert gradient(out.logprobs) == pytest.approx([-ratios[0] / 2] * 2 + [ratios[1]])
    assert mean(seen["policy/loss"]) == pytest.approx(loss)


# -- entropy, KL, balance ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "n"), [("token", 3), ("sequence", 2)])
@pytest.mark.parametrize(("kind", "total"), [("exact", 15), ("sample", 5.8)])
def test_entropy_is_a_bonus(micro, level, n, kind, total):
    """All exact entropies are 5; the estimates are -log p of the sampled tokens, 0.9 + 1.8 + 3.1.

    The bonus is the mean over three tokens, or over two responses, with the sum over their tokens.
    """
    plain, _, before = policy(micro, level=level)
    loss, seen, out = policy(micro, level=level, entropy_coef=0.1, entropy_kind=kind)
    assert loss == pytest.approx(plain - 0.1 * total / n)
    assert mean(seen["policy/entropy"]) == pytest.approx(total / 3)
    pushed = [x - y for x, y in zip(gradient(out.logprobs), gradient(before.logprobs), strict=True)]
    if kind == "exact":
        assert gradient(out.entropy) == pytest.approx([-0.1 / n] * 3) and pushed == [0, 0, 0]
    else:  # a bonus decreases the log-probs of the sample; only the estimate has a gradient
        assert pushed == pytest.approx([0.1 / n] * 3) and out.entropy.grad is None


def test_the_kl_in_the_loss_of_whole_answers(micro):
    """For log ratios 0.5, -0.2 and 1, k2 is 0.125, 0.02 and 0.5, summed over the tokens of a response."""
    plain, seen, _ = policy(micro, level="sequence")
    assert "policy/kl_loss" not in seen
    loss, seen, _ = policy(micro, level="sequence", kl_in_loss=True, kl_coef=0.7)
    assert loss == pytest.approx(plain + 0.7 * (0.145 + 0.5) / 2)
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


def test_pretraining_texts(micro):
    """The loss is the mean of -log p over the 6 text tokens of the whole step, 3 of them in this forward."""
    out = PolicyOutput(column([[-1.0, -2.0], [-3.0]]).requires_grad_(), None, None, None)
    loss, seen = PtxObjective(10.0, iter(()))(out, micro, batch_totals([torch.ones(2, 3)]))
    assert loss.item() == pytest.approx(10 * 6 / 6) and seen["policy/ptx_loss"].tolist() == [6.0, 3.0]
    loss.backward()
    assert gradient(out.logprobs) == pytest.approx([-10 / 6] * 3) and out.logprobs.grad[1, 1] == 0
