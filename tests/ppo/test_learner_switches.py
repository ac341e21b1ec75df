"""Tests the switches of learn().

The switches are early stopping, training only the critic, training without a critic, a shared trunk,
pretraining texts, and a weight average.
"""

from dataclasses import replace

import pytest
import torch

from ppo_ds.run.health import Health
from ppo_ds.run.stage import StepContext
from tests.ppo.algo_cases import AS_IT_IS, timer, without_critic
from tests.ppo.learner_cases import (
    ANSWERS,
    LR,
    PROMPTS,
    Engine,
    TinyCritic,
    TinyPolicy,
    V,
    by_hand,
    learned,
    learner,
    old_around,
    same,
    shuffled,
    unpadded,
)


@pytest.fixture
def rows(experience):
    return old_around(experience(PROMPTS, ANSWERS))


# -- early stopping ------------------------------------------------------------------------------------------


@pytest.fixture
def near(experience):
    return old_around(experience(PROMPTS, ANSWERS), scale=0.02)


def distances(rows):
    """Returns the KL to the old policy before each optimizer step.

    It is the mean of r - 1 - ln r over the minibatch's tokens.
    """
    found = []
    for k, part in enumerate(shuffled(len(rows), 2, 4, seed=3)):
        actor, terms = by_hand(rows, steps=k)[0], []
        for i in part.tolist():
            logprobs = actor(*unpadded(rows, i)).logprobs[0].tolist()
            log_ratios = [new - float(old) for new, old in zip(logprobs, rows.old_logprobs[i], strict=False)]
            terms += [float(torch.tensor(x).exp()) - 1 - x for x in log_ratios]
        found.append(sum(terms) / len(terms))
    return found


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_target_kl_stops_further_minibatches(on_ranks, near, last, ranks):
    """The step whose KL exceeds the limit is still taken.

    All ranks use the KL over all rows, and stop together.
    """
    moved = distances(near)
    assert moved[0] < moved[1] < moved[2]
    target = 0.999 * moved[last]
    for seen, actor, critic in on_ranks(
        ranks, lambda world: learned(world, near, target_kl=target, budget=20)
    ):
        assert actor.steps == critic.steps == last + 1
        assert (seen["policy/early_stopped"], seen["policy/epochs_run"]) == (1.0, (last + 1) / 2)
        same((actor, critic), by_hand(near, steps=last + 1))


def test_an_excess_in_the_last_minibatch_has_no_effect(world, near):
    first, second, *_ = distances(near)
    seen, actor, _ = learned(world, near, epochs=1, target_kl=(first + second) / 2)
    assert actor.steps == 2 and (seen["policy/early_stopped"], seen["policy/epochs_run"]) == (0.0, 1.0)


# -- critics -------------------------------------------------------------------------------------------------


def test_the_critic_alone(world, rows):
    actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
    followed = []
    learn = learner(world, actor, critic, target_kl=1e-9, average=lambda: followed.append(0.0))
    _, seen = learn(rows, 0.0, 3, critic_only=True)
    same([critic], by_hand(rows)[1:])
    same([actor], [TinyPolicy(V, 1)])
    assert not actor.read and not actor.steps and not followed
    assert {name.split("/")[0] for name in seen} == {"value", "health", "policy", "perf"}
    assert {name for name in seen if name.startswith("policy/")} == {
        "policy/epochs_run",
        "policy/early_stopped",
    }
    _, seen = learn(rows, 0.0, 3)  # then trains both models
    assert actor.steps > 0 and "policy/loss" in seen


@pytest.mark.parametrize(("ranks", "budget"), [(1, 10_000), (2, 20)])
def test_each_optimizer_step_is_reported_with_the_log_probs_before_it(on_ranks, rows, ranks, budget):
    def work(world):
        actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
        seen = []

        def report(number, part, losses):
            now = actor.module(part.ids, part.attention_mask, part.response_width).logprobs.detach()
            means = {name: float(world.sum(loss)) / world.size for name, loss in losses.items()}
            seen.append((number, part, now, means))

        context = StepContext(world=world, timer=timer, health=Health(1000), report=report)
        learn = learner(world, actor, critic, budget=budget, context=context)
        learn(rows, 0.0, 3)
        learn(rows, 0.0, 3, critic_only=True)
        return seen

    for seen in on_ranks(ranks, work):
        assert [number for number, *_ in seen] == [1, 2, 3, 4] * 2
        fresh = TinyPolicy(V, 1)
        part = seen[0][1]
        before = fresh(part.ids, part.attention_mask, part.response_width).logprobs.detach()
        mask = part.response_mask
        torch.testing.assert_close(part.logprobs[mask].double(), before[mask], rtol=0, atol=1e-6)
        for _, part, after, losses in seen[:4]:
            mask = part.response_mask
            assert not torch.allclose(part.logprobs[mask].double(), after[mask], atol=1e-4)
            assert losses.keys() == {"actor", "critic"}
        assert all(part.logprobs is None and list(losses) == ["critic"] for _, part, _, losses in seen[4:])


def test_without_a_critic(world, rows):
    plain = without_critic(rows)
    actor = Engine(TinyPolicy(V, 1), world)
    seen = learner(world, actor, None, budget=20)(plain, 0.0, 3)[1]
    same([actor], by_hand(rows)[:1])
    assert not [name for name in seen if name.startswith("value/")]


@pytest.mark.parametrize(("ranks", "budget"), [(1, 10_000), (1, 20), (2, 1), (4, 24)])
def test_the_critic_learns_the_states_that_are_trained(on_ranks, rows, ranks, budget):
    """Trained states include states after the end and exclude some response tokens.

    The loss is a mean over all trained states.
    """
    # trained states of each row; the responses have 2, 6, 1, 3, 4, 1, 5 and 2 tokens
    taken = [[0], [0, 6], [0, 1], [], [4], [0, 1], [1, 2, 3], [2]]
    mask, returns = (
        torch.zeros_like(rows.value_mask),
        torch.randn(rows.returns.shape, generator=torch.Generator().manual_seed(5)),
    )
    for i, columns in enumerate(taken):
        mask[i, columns] = True
    rows = replace(rows, value_mask=mask, returns=returns)
    expected = TinyCritic(1, 2)
    errors = [
        (expected(*unpadded(rows, i))[0, t] - float(returns[i, t])) ** 2 / 2
        for i, columns in enumerate(taken)
        for t in columns
    ]
    torch.stack(errors).mean().backward()
    for parameter in expected.parameters():
        parameter.data -= LR * parameter.grad
    settings = dict(minibatch_size=8, epochs=1, budget=budget, value=dict(clip=None))
    for seen, _, critic in on_ranks(ranks, lambda world: learned(world, rows, **settings)):
        same([critic], [expected])
        assert seen["value/loss"] == pytest.approx(float(torch.stack(errors).detach().mean()), rel=1e-6)


@pytest.mark.parametrize(("ranks", "budget"), [(1, 10_000), (1, 20), (2, 1), (2, 24)])
def test_a_shared_trunk_has_one_backward_for_both_losses(on_ranks, rows, ranks, budget):
    settings = dict(policy=dict(entropy_coef=0.3), value=dict(coef=0.1))
    expected, _ = by_hand(rows, **settings, shared=True)
    apart, _ = by_hand(rows, **settings)
    assert (expected.embed - apart.embed).abs().max() > 1e-3  # the value loss changes the trunk

    def work(world):
        actor = Engine(TinyPolicy(V, 1, shared=True), world)
        return learner(world, actor, None, budget=budget, **settings)(rows, 0.0, 3)[1], actor

    for seen, actor in on_ranks(ranks, work):
        same([actor], [expected])
        assert actor.steps == 4 and len(actor.read) == sum(actor.backwards)
        assert {
            "value/loss",
            "value/clipfrac",
            "value/explained_var",
            "policy/loss",
        } <= seen.keys() and "value/lr" not in seen


# -- additional losses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_advantages_whitened_by_the_minibatch(on_ranks, rows, ranks, unbiased):
    advantages = rows.advantages.clone()
    for part in shuffled(8, 1, 4, seed=3):
        found = torch.cat([rows.advantages[i, : ANSWERS[i]] for i in part]).double()
        for i in part:
            advantages[i] = ((rows.advantages[i] - found.mean()) / found.std(unbiased=unbiased)).float()
    expected = by_hand(replace(rows, advantages=advantages), epochs=1)
    whitening = replace(AS_IT_IS, over="minibatch", unbiased=unbiased)
    for _, *engines in on_ranks(
        ranks, lambda world: learned(world, rows, epochs=1, whitening=whitening, budget=20)
    ):
        for engine, module in zip(engines, expected, strict=True):
            for ours, theirs in zip(engine.module.parameters(), module.parameters(), strict=True):
                # looser, since whitening is in float32
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# -- truncated responses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("agg", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
@pytest.mark.parametrize(("ranks", "budget"), [(1, 20), (2, 1), (4, 10_000)])
def test_truncated_responses_are_in_no_loss(on_ranks, rows, agg, ranks, budget):
    """Two rows of the first and one of the second minibatch are cut; the means are over the other rows."""
    (first, second), settings = shuffled(8, 1, 4, seed=3), dict(policy=dict(agg=agg), value=dict(agg=agg))
    finished = torch.ones(8, dtype=torch.bool)
    finished[torch.cat([first[:2], second[3:]])] = False
    rows = replace(rows, finished=finished)
    expected = by_hand(rows, epochs=1, mask_truncated=True, **settings)
    for seen, *engines in on_ranks(
        ranks, lambda world: learned(world, rows, epochs=1, mask_truncated=True, budget=budget, **settings)
    ):
        same(engines, expected)
        assert seen["value/mean"] == seen["value/mean"] and seen["policy/loss"] != 0


def test_truncated_responses_count_in_the_whitening_of_a_minibatch(world, rows):
    """The statistics are those of all rows, and only the rows that ended are trained."""
    finished = torch.tensor([True, False, True, True, True, False, True, True])
    rows, whitening = replace(rows, finished=finished), replace(AS_IT_IS, over="minibatch")
    whole = whitening.whiten(rows.advantages, rows.response_mask)
    settings = dict(epochs=1, minibatch_size=8, mask_truncated=True)
    _, *engines = learned(world, rows, whitening=whitening, **settings)
    same(engines, by_hand(replace(rows, advantages=whole), **settings))
