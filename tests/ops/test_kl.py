"""Tests KL estimators and controllers: goldens, exact expectations, extreme values."""

import math

import pytest
import torch

from ppo_ds.algorithm.kl.controllers import AdaptiveKLController, ThresholdKLController
from tests.ops.by_name import approx_kl, kl_loss
from tests.ops.golden import assert_no_stale_entries, check, gradient, leaf, outputs

PEER_CLAMP = 10.0  # OpenRLHF limits every estimator to +-10, verl k3 only


def value(estimator, clamp=None):
    return lambda c: approx_kl(c.logprobs, c.ref_logprobs, estimator, clamp)


def grad(estimator, clamp=None):
    def of_logprobs(c):
        x = leaf(c.logprobs)
        return gradient(approx_kl(x, c.ref_logprobs, estimator, clamp).sum(), x)

    return of_logprobs


def expected(estimator):
    """Returns the exact expectation over the 7 outcomes."""

    def of_policy(c):
        logp, logq = c.policy_logits.log_softmax(0), c.ref_logits.log_softmax(0)
        return (logp.exp() * approx_kl(logp, logq, estimator)).sum()

    return of_policy


def expected_gradient_as_loss(estimator):
    """Returns E[d/d logits of the estimator], without differentiating the sampling distribution."""

    def of_logits(c):
        x = leaf(c.policy_logits)
        logp = x.log_softmax(0)
        return gradient(
            (logp.detach().exp() * approx_kl(logp, c.ref_logits.log_softmax(0), estimator)).sum(), x
        )

    return of_logits


def expected_gradient_in_reward(c):
    """Returns the REINFORCE gradient for the cost k1: E[k1 * d log pi / d logits]."""
    x = leaf(c.policy_logits)
    logp = x.log_softmax(0)
    cost = approx_kl(logp, c.ref_logits.log_softmax(0), "k1").detach()
    return gradient((logp.detach().exp() * cost * logp).sum(), x)


def where_unlimited(c):
    """Returns where k3 without a limit of its exponent agrees with ours: at log-ratios of at least -20."""
    unlimited = c.ref_logprobs - c.logprobs <= 20
    return approx_kl(c.logprobs, c.ref_logprobs, "k3").where(unlimited, c.outputs["trl.k3"])


TARGETS = {
    **{f"openrlhf.compute_approx_kl.{e}": value(e, PEER_CLAMP) for e in ("k1", "k2", "k3")},
    **{f"verl.kl_penalty.{e}": value(e) for e in ("k1", "abs", "k2")},
    "verl.kl_penalty.k3": value("k3", PEER_CLAMP),
    **{f"verl.kl_penalty.{e}.grad_logprob": grad(e) for e in ("k1", "abs", "k2", "k1+")},
    **{f"verl.kl_penalty.{e}.grad_logprob": grad(e, PEER_CLAMP) for e in ("k3", "k3+")},
    "trl.k1": value("k1"),
    "trl.k3": value("k3"),
    "extreme/trl.k3": where_unlimited,
    "nemo_aligner.abs": value("abs"),
    "nemo_aligner.k1": value("k1"),
    "exact.reverse_kl": expected("k1"),
    **{f"expected.{e}": expected(e) for e in ("k1", "k2", "k3")},
    **{f"expected_grad.{e}_as_loss": expected_gradient_as_loss(e) for e in ("k1", "k2", "k3")},
    "expected_grad.k1_in_reward": expected_gradient_in_reward,
    # straight-through estimators exist to give this gradient
    "exact.grad_reverse_kl": expected_gradient_as_loss("k1+"),
    "exact.grad_forward_kl": expected_gradient_as_loss("k3"),
}
NOT_TARGETS = {
    "exact.forward_kl": (
        "no estimator here has this value; the gradient of k3 is its gradient, which is compared"
    )
}


@pytest.mark.parametrize(("case", "key"), outputs("kl.json", NOT_TARGETS))
def test_golden(case, key):
    check(case, key, TARGETS)


def ziegler(c):
    return trace(
        AdaptiveKLController(c.params["init"], c.params["target"], horizon=c.params["horizon"]),
        c.kl,
        c.n_steps,
    )


def threshold(c):
    p = c.params
    assert (p["up"], p["down"]) == (1.5, 0.5)
    controller = ThresholdKLController(p["init"], p["target_seed_b"], 1e-4, 10.0)
    return trace(controller, c.kl_seed_b, c.n_steps)


def trace(controller, kl, n_steps):
    values = []
    for current, n in zip(kl, n_steps, strict=True):
        controller.update(current, n)
        values.append(controller.value)
    return values


CONTROLLERS = {"*.adaptive": ziegler, "seed_b.threshold": threshold}


@pytest.mark.parametrize(("case", "key"), outputs("kl_controller.json"))
def test_golden_controllers(case, key):
    check(case, key, CONTROLLERS)


def test_every_table_entry_is_used():
    assert_no_stale_entries("kl.json", TARGETS, NOT_TARGETS)
    assert_no_stale_entries("kl_controller.json", CONTROLLERS)


def test_a_clamp_bounds_one_token_in_a_loss():
    """Where the reference is 12 nats more likely, k3 is e^12 - 13 and its gradient 1 - e^12 (NeMo RL: 10, 0).

    The other token has d = 1: k3 = 1/e and the gradient 1 - 1/e.
    """
    ref, mask = torch.tensor([[-1.0, -2.0]]).double(), torch.ones(1, 2).bool()
    found = {}
    for clamp in (None, 10.0):
        x = leaf(torch.tensor([[-13.0, -1.0]]).double())
        loss = kl_loss(x, ref, mask, estimator="k3", clamp=clamp)
        found[clamp] = [loss.item(), *gradient(loss, x)[0].tolist()]
    other, slope = math.exp(-1) / 2, (1 - math.exp(-1)) / 2
    assert found[None] == pytest.approx([162741.7914 / 2 + other, (1 - math.exp(12)) / 2, slope])
    assert found[10.0] == pytest.approx([5 + other, 0, slope])


def test_only_the_policy_gets_gradients_and_low_precision_is_widened():
    ref = leaf(torch.zeros(3, dtype=torch.bfloat16))
    kl = approx_kl(leaf(torch.ones(3, dtype=torch.bfloat16)), ref, "k3")
    kl.sum().backward()
    assert kl.dtype == torch.float32 and ref.grad is None


def test_adaptive_controller_bounds():
    controller = AdaptiveKLController(0.2, target=6.0, horizon=100, min_coef=0.15, max_coef=0.25)
    assert trace(controller, [100.0] * 4, [50] * 4) == pytest.approx([0.22, 0.242, 0.25, 0.25])
    assert trace(controller, [0.0] * 8, [50] * 8)[-1] == 0.15
    controller.update(float("nan"), 50)
    assert controller.value == 0.15


def test_threshold_controller_is_strict_and_bounded():
    controller = ThresholdKLController(0.2, 0.01, 1e-4, 10.0)
    assert trace(controller, [0.02, 0.005], [1, 1]) == [0.2, 0.2]
    assert trace(controller, [0.0] * 40, [1] * 40)[-1] == 1e-4
    assert trace(controller, [1.0] * 40, [1] * 40)[-1] == 10.0
