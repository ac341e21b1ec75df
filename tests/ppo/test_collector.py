"""Tests the collection of responses and their scores.

They cover the order of generation and reward, and dynamic sampling, which replaces prompts without a training
signal.
"""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch

from ppo_ds.ppo.collector import DynamicRolloutCollector, GreedyRolloutCollector, RolloutCollector
from ppo_ds.rewards.base import start_scoring
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import Prompts, Rollout, Scores

SAMPLING = object()
PER_ROUND, SAMPLES = 4, 2  # prompts over all ranks, responses per prompt


class Actor:
    generating = False

    @contextmanager
    def generation_mode(self):
        self.generating = True
        yield
        self.generating = False


def prompts_of(numbers):
    """Makes prompts; prompt n has 1 + n % 3 tokens, repeated for each of its responses."""
    numbers = [n for n in numbers for _ in range(SAMPLES)]
    width = max(1 + n % 3 for n in numbers)
    mask = torch.arange(width) >= width - 1 - torch.tensor(numbers)[:, None] % 3
    ids = torch.tensor(numbers)[:, None].expand(mask.shape)
    return Prompts(ids, mask, torch.full((len(ids),), 4), tuple({"n": n} for n in numbers))


def generate(prompts, sampling):
    """Generates responses of 1 to 4 tokens with id 5."""
    assert sampling is SAMPLING
    lengths = 1 + (prompts.ids[:, -1] + torch.arange(len(prompts)) % SAMPLES) % 4
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.cat([prompts.ids, torch.full(mask.shape, 5)], 1)
    return Rollout(
        ids,
        torch.cat([prompts.mask, mask], 1),
        mask,
        lengths < 4,
        prompts.limits,
        torch.zeros(mask.shape),
        prompts.metadata,
    )


def reward_for(useful):
    """Scores the responses to a useful prompt n with n and n + 0.5, and both responses to others with n."""

    def reward(rollout):
        numbers = torch.tensor([float(row["n"]) for row in rollout.metadata])
        second = torch.arange(len(numbers)) % SAMPLES == 1
        teaches = torch.tensor([row["n"] in useful for row in rollout.metadata])
        total = numbers + 0.5 * (second & teaches)
        return Scores(total, torch.zeros(rollout.response_mask.shape), {"half": total / 2})

    return reward


def parts(useful=(), reward=None, **changes):
    @contextmanager
    def timer(phase):
        yield

    return (
        dict(
            actor=Actor(),
            generator=generate,
            start_scoring=partial(start_scoring, reward or reward_for(useful)),
            sampling=SAMPLING,
            timer=timer,
            check=lambda: None,
        )
        | changes
    )


def dynamic(world, useful, max_rounds=10, reward=None):
    """Returns this rank's prompt numbers, the rollout, the metrics, and the number of sampled rounds."""
    share = PER_ROUND // world.size
    drawn = []

    def stream():
        for k in count():
            first = k * PER_ROUND + world.rank * share
            drawn.append(k)
            yield prompts_of(range(first, first + share))

    sampler = DynamicRolloutCollector(
        group_size=SAMPLES, max_rounds=max_rounds, world=world, prompts=stream(), **parts(useful, reward)
    )
    rollout, scores, seen = sampler()
    assert torch.equal(scores.result().total, rollout.scores)
    return [row["n"] for row in rollout.metadata], rollout, seen, len(drawn)


CASES = [
    ({0, 1, 2, 3}, 10, [0, 1, 2, 3], 1, 1.0),
    ({0, 2, 4, 5, 7}, 10, [0, 2, 4, 5], 2, 5 / 8),  # surplus prompts are dropped
    ({3, 8, 9, 11}, 10, [3, 8, 9, 11], 3, 4 / 12),
    ({1, 6}, 2, [1, 6, 0, 2], 2, 2 / 8),  # filled up with prompts of equal scores, in order
    ((), 3, [0, 1, 2, 3], 3, 0.0),
]


@pytest.mark.parametrize(("useful", "max_rounds", "chosen", "rounds", "fraction"), CASES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_prompts_with_equal_scores_are_replaced(
    on_ranks, ranks, useful, max_rounds, chosen, rounds, fraction
):
    """Any number of ranks gives the same rows in the same order, with an equal share on each rank."""
    found = on_ranks(ranks, lambda world: dynamic(world, useful, max_rounds))
    # response tokens of each prompt
    answered = [sum(1 + (n + i) % 4 for i in range(SAMPLES)) for n in range(rounds * PER_ROUND)]
    dropped = sum(answered) - sum(answered[n] for n in chosen)
    assert [n for numbers, *_ in found for n in numbers] == [n for n in chosen for _ in range(SAMPLES)]
    for numbers, rollout, seen, drawn in found:
        assert len(rollout) == PER_ROUND * SAMPLES // ranks and drawn == rounds
        assert seen == {
            "rollout/rounds": float(rounds),
            "rollout/useful_group_frac": fraction,
            "rollout/dropped_tokens": dropped,
        }
        # all columns contain the selected rows only, and the padding is cut to their width
        for i, n in enumerate(numbers):
            assert set(rollout.ids[i][rollout.attention_mask[i]].tolist()) == {n, 5}
            expected = n + (0.5 if i % SAMPLES and n in useful else 0.0)
            assert rollout.scores[i] == expected and rollout.components[i] == {"half": expected / 2}
            assert rollout.response_lengths[i] == 1 + (n + i % SAMPLES) % 4 and rollout.limits[i] == 4
        assert (
            rollout.prompt_width == rollout.prompt_lengths.max()
            and rollout.response_width == rollout.response_lengths.max()
        )


# -- greedy responses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_greedy_response_to_each_prompt_is_generated_and_scored_too(on_ranks, ranks):
    """Prompts 1 to 4 have two responses each. All responses are generated in one generation phase."""

    def collected(world):
        calls, phases, actor = [], [], Actor()

        @contextmanager
        def timer(phase):
            phases.append(phase)
            yield

        def generator(prompts, sampling):
            assert actor.generating
            calls.append((prompts.ids[:, -1].tolist(), sampling.top_k))
            return generate(prompts, SAMPLING)

        def reward(rollout):
            assert not actor.generating
            return reward_for({1, 2, 3, 4})(rollout)

        own = [1, 2, 3, 4][4 // ranks * world.rank :][: 4 // ranks]
        collect = GreedyRolloutCollector(
            prompts=iter([prompts_of(own)]),
            **parts(actor=actor, generator=generator, reward=reward, timer=timer)
            | dict(sampling=SamplingParams(4, 0, 1.0, 1.0, 0, (2,), ()), group_size=SAMPLES, world=world),
        )
        rollout, scores, seen = collect()
        return own, calls, phases, rollout, scores.result(), seen

    for own, calls, phases, rollout, scores, seen in on_ranks(ranks, collected):
        assert calls == [([n for n in own for _ in range(SAMPLES)], 0), (own, 1)]
        assert phases == ["generate", "reward", "reward"]
        assert [row["n"] for row in rollout.metadata] == calls[0][0]
        assert scores.total.tolist() == [n + half for n in own for half in (0.0, 0.5)]
        assert scores.greedy.metadata == tuple({"n": n} for n in own)
        # the reward gives every second row half a point more
        assert scores.greedy.scores.tolist() == [n + 0.5 * (i % 2) for i, n in enumerate(own)]
        assert seen == {"rollout/greedy_tokens": sum(greedy_lengths(ranks))}


def greedy_lengths(ranks):
    """Returns the lengths that ``generate`` gives the greedy responses to the prompts 1 to 4."""
    return [1 + (n + i % (4 // ranks) % SAMPLES) % 4 for i, n in enumerate([1, 2, 3, 4])]


def test_a_response_without_tokens_is_an_error(world):
    collect = RolloutCollector(**parts({2}) | dict(prompts=iter([prompts_of([1])])))
    rollout = generate(prompts_of([1]), SAMPLING)
    empty = replace(rollout, attention_mask=rollout.attention_mask & False)
    with pytest.raises(AssertionError, match="at least one token"):
        collect.score(empty)


class Observer:
    """Stands in for data.difficulty."""

    metrics = {"rollout/settled_frac": 0.25}

    def __init__(self):
        self.scores = []

    def observe(self, scores):
        self.scores.append(scores.tolist())


def test_difficulty_observes_the_scores_of_every_round_and_of_sampled_responses_only(world):
    """Prompt n has the scores n and n + 0.5 if it is useful, else n and n."""
    greedy = dict(
        sampling=SamplingParams(4, 0, 1.0, 1.0, 0, (2,), ()), generator=lambda p, _: generate(p, SAMPLING)
    )
    cases = {
        RolloutCollector: ({}, [[1, 1, 2, 2.5]]),
        GreedyRolloutCollector: (greedy | dict(group_size=2, world=world), [[1, 1, 2, 2.5]]),
        DynamicRolloutCollector: (
            dict(group_size=2, world=world, max_rounds=3), [[1, 1, 2, 2.5], [3, 3, 4, 4.5]],
        ),
    }  # fmt: skip
    for kind, (options, expected) in cases.items():
        seen, rounds = Observer(), iter([prompts_of([1, 2]), prompts_of([3, 4])])
        collect = kind(**parts({2, 4}) | dict(prompts=rounds, difficulty=seen) | options)
        _, scores, metrics = collect()
        scores.result()
        assert seen.scores == expected and metrics["rollout/settled_frac"] == 0.25
