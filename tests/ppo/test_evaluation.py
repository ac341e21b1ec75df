"""Tests held-out evaluation: rows that only fill up a batch are ignored; all ranks get one result."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch

from ppo_ds.background.pending import Pending
from ppo_ds.distributed import heartbeat
from ppo_ds.ppo.evaluation import Evaluator
from ppo_ds.rewards.base import start_scoring
from ppo_ds.types import Prompts, Rollout, Scores

SAMPLING = object()


class Actor:
    generating = False
    steps = 0

    @contextmanager
    def generation_mode(self):
        self.generating = True
        yield
        self.generating = False


def batch(*numbers, weights):
    ids = torch.tensor([[n] for n in numbers])
    rows = tuple({"prompt_text": f"p{n}", "n": n} | ({"kind": "big"} if n > 1 else {}) for n in numbers)
    return Prompts(
        ids, torch.ones_like(ids, dtype=torch.bool), torch.full((len(ids),), 20), rows
    ), torch.tensor(weights)


def evaluator(world, batches, tokenizer, correct_above=None, more_scoring=None, reference=None):
    actor = Actor()

    def generator(prompts, sampling):
        """Answers prompt n with n tokens "a"; responses to odd prompts end with the end token."""
        assert actor.generating and sampling is SAMPLING and not torch.is_grad_enabled()
        lengths = torch.tensor([row["n"] for row in prompts.metadata])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.cat([prompts.ids, torch.full(mask.shape, 3)], 1)
        attention = torch.cat([prompts.mask, mask], 1)
        return Rollout(
            ids, attention, mask, lengths % 2 == 1, prompts.limits, torch.zeros(mask.shape), prompts.metadata
        )

    def reward(rollout):
        assert not actor.generating
        return Scores(rollout.response_mask.sum(1).float() / 2, torch.zeros(rollout.response_mask.shape), {})

    return Evaluator(
        batches,
        actor=actor,
        generator=generator,
        start_scoring=partial(start_scoring, reward),
        more_scoring=more_scoring or {},
        sampling=SAMPLING,
        correct_above=correct_above,
        reference=reference,
        tokenizer=tokenizer,
        world=world,
        check=lambda: None,
    )


def test_by_hand(world, tokenizer):
    found = evaluator(
        world, [batch(1, 2, weights=[1, 1]), batch(5, 9, weights=[1, 0])], tokenizer, correct_above=0.9
    )()
    assert found.metrics == pytest.approx(
        {
            "eval/score_mean": (0.5 + 1.0 + 2.5) / 3,
            "eval/score_std": (13 / 18) ** 0.5,  # of 0.5, 1 and 2.5; the variance is 7.5 / 3 - (4 / 3)^2
            "eval/resp_len_mean": 8 / 3,
            "eval/stop_frac": 2 / 3,
            "eval/accuracy": 2 / 3,
        }
    )
    assert [
        (row["prompt"], row["response"], row["score"], row["length"], row["finish"]) for row in found.rows
    ] == [("p1", "a", 0.5, 1, "stop"), ("p2", "aa", 1.0, 2, "length"), ("p5", "aaaaa", 2.5, 5, "stop")]


def test_more_rewards_are_measured_beside_the_first(world, tokenizer):
    def lengths(rollout):
        total = rollout.response_mask.sum(1).float()
        return Pending.of(Scores(total, torch.zeros(rollout.response_mask.shape), {}))

    def tokens(rollout):
        return Pending.of(Scores(torch.ones(len(rollout)), rollout.response_mask.float(), {}))

    batches = [batch(1, 2, weights=[1, 1]), batch(5, 9, weights=[1, 0])]
    found = evaluator(world, batches, tokenizer, more_scoring={"length": lengths, "tokens": tokens})()
    assert found.metrics["eval/score_mean"] == pytest.approx((0.5 + 1.0 + 2.5) / 3)
    assert found.metrics["eval/length_mean"] == pytest.approx(8 / 3)
    assert found.metrics["eval/length_std"] == pytest.approx((26 / 9) ** 0.5)  # of 1, 2 and 5
    assert found.metrics["eval/tokens_mean"] == pytest.approx(1 + 8 / 3)
    assert [row["rewards"] for row in found.rows] == [
        {"length": 1.0, "tokens": 2.0},
        {"length": 2.0, "tokens": 3.0},
        {"length": 5.0, "tokens": 6.0},
    ]


def test_the_scores_of_the_values_of_a_column(world, tokenizer):
    evaluate = evaluator(world, [batch(1, 2, weights=[1, 1]), batch(5, 9, weights=[1, 0])], tokenizer)
    evaluate.by = "kind"
    found = evaluate()
    assert {name: value for name, value in found.metrics.items() if name.startswith("eval/score_mean/")} == {
        "eval/score_mean/(none)": 0.5, "eval/score_mean/big": (1.0 + 2.5) / 2
    }  # fmt: skip
    assert [row["columns"] for row in found.rows] == [{"n": 1}, *({"n": n, "kind": "big"} for n in (2, 5))]


def test_scores_of_tokens_count(world, tokenizer):
    found = evaluator(world, [batch(3, weights=[1])], tokenizer, correct_above=7.0)
    found.start_scoring = lambda rollout: Pending.of(
        Scores(torch.tensor([5.0]), rollout.response_mask.float(), {})
    )
    metrics = found().metrics
    assert metrics["eval/score_mean"] == 5 + 3 and metrics["eval/accuracy"] == 1


def test_evaluation_sets_the_heartbeat_and_restores_it(world, tokenizer):
    found, phases = evaluator(world, [batch(1, weights=[1])], tokenizer), []
    start_scoring, generator = found.start_scoring, found.generator
    found.generator = lambda *asked: (phases.append(heartbeat.read().phase), generator(*asked))[1]
    found.start_scoring = lambda rollout: (phases.append(heartbeat.read().phase), start_scoring(rollout))[1]
    found.check = lambda: phases.append(heartbeat.read().phase)
    before = heartbeat.read().phase
    found()
    assert heartbeat.read().phase == before
    assert phases == [
        "generating, in an evaluation",
        "in an evaluation",
        "in the reward, in an evaluation",
        "in an evaluation",
    ]


def test_a_score_equal_to_the_threshold_does_not_pass(world, tokenizer):
    found = evaluator(world, [batch(2, 4, weights=[1, 1])], tokenizer, correct_above=1.0)()
    assert found.metrics["eval/accuracy"] == 0.5
    assert "eval/accuracy" not in evaluator(world, [batch(2, weights=[1])], tokenizer)().metrics


def test_ranks_share_one_result(on_ranks, world, tokenizer):
    shares = [[batch(1, 4, weights=[1, 1])], [batch(3, 3, weights=[1, 0])]]
    alone = evaluator(world, [batch(1, 4, 3, weights=[1, 1, 1])], tokenizer, 1.0)()
    both = on_ranks(2, lambda world: evaluator(world, shares[world.rank], tokenizer, 1.0)())
    for found in both:
        assert found.metrics == pytest.approx(alone.metrics)
    assert [[row["prompt"] for row in found.rows] for found in both] == [["p1", "p4", "p3"]] * 2


def test_an_evaluation_restores_the_random_state(world, tokenizer):
    found, generated = evaluator(world, [batch(1, 2, weights=[1, 1])], tokenizer), []
    generator = found.generator
    found.generator = lambda *given: (generated.append(float(torch.rand(()))), generator(*given))[1]
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    found()
    assert len(generated) == 1 and torch.equal(torch.rand(3), expected)
