"""Tests the histograms of a PPO step: scores, response lengths, advantages and ratios."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from ppo_ds.ops.histograms import RATIO_EDGES
from ppo_ds.ppo.experience_metrics import histograms
from tests.ppo.learner_cases import ANSWERS, PROMPTS, Engine, TinyCritic, TinyPolicy, V, learner, old_around


@pytest.fixture
def rows(experience):
    return old_around(experience(PROMPTS, ANSWERS))


def trained(world, rows, **changes):
    """Returns the learner and its actor's weights after training on ``rows``."""
    actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
    learn = learner(world, actor, critic, **changes)
    learn(rows, 0.0, 3)
    return learn, list(actor.module.parameters())


def expected_ratios(rows):
    """Counts with NumPy the ratios of the fresh policy, before any optimizer step."""
    with torch.no_grad():
        fresh = TinyPolicy(V, 1)(rows.ids, rows.attention_mask, rows.response_width).logprobs
    ratios = (fresh - rows.old_logprobs).exp()[rows.response_mask]
    return np.histogram(ratios.clamp(max=1.999).numpy(), bins=RATIO_EDGES)[0].tolist()


@pytest.mark.parametrize(("ranks", "budget"), [(1, 1), (1, 10_000), (2, 20)])
def test_ratios_of_one_optimizer_step(on_ranks, rows, ranks, budget):
    one_step = dict(epochs=1, minibatch_size=len(rows), counts_ratios=True, budget=budget)

    def work(world):
        learn, _ = trained(world, rows, **one_step)
        return learn.ratios.take(), learn.ratios.take()

    for found, again in on_ranks(ranks, work):
        assert found.edges == RATIO_EDGES and found.counts == expected_ratios(rows)
        assert len(np.nonzero(found.counts)[0]) > 5 and again is None  # taken once


def test_all_optimizer_steps_count_and_the_weights_do_not_change(world, rows):
    learn, weights = trained(world, rows, counts_ratios=True)
    assert sum(learn.ratios.take().counts) == 2 * int(rows.response_mask.sum())  # two epochs
    plain, expected = trained(world, rows)
    assert plain.ratios is None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, expected, strict=True))


def test_the_first_optimizer_step_has_ratio_1(world, rows):
    """Without old log-probs, the update itself computes them."""
    fresh = replace(rows, logprobs=None, old_logprobs=None)
    learn, _ = trained(world, fresh, epochs=1, minibatch_size=len(rows), counts_ratios=True)
    counts = learn.ratios.take().counts
    assert counts[RATIO_EDGES.index(1.0)] == sum(counts) == int(rows.response_mask.sum())


def test_scores_lengths_and_advantages(rows):
    rows = replace(rows, scores=torch.tensor([0.0, 1, 1, 1, 0, 0, 0, 4]))
    found = histograms(rows)
    assert found.keys() == {"reward/score_hist", "rollout/resp_len_hist", "adv/hist"}
    score, length = found["reward/score_hist"], found["rollout/resp_len_hist"]
    assert (score.edges[0], score.edges[-1]) == (0, 4)
    assert (score.counts[0], score.counts[16], score.counts[-1]) == (4, 3, 1)
    assert (length.edges[0], length.edges[-1], sum(length.counts)) == (1, 6, 8)
    tokens = rows.advantages[rows.response_mask].double().numpy()
    assert found["adv/hist"].counts == np.histogram(tokens, bins=64)[0].tolist()
