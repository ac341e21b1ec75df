"""Tests the plans of forwards: micro-batches cover each row exactly once, in equal numbers on all ranks."""

import pytest

from ppo_ds.run.microbatches import filled, microbatches, scoring_plan
from tests.ppo.algo_cases import real

PROMPTS, ANSWERS = [3, 7, 1, 5, 2, 2, 9, 4], [6, 1, 2, 8, 3, 3, 1, 5]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("budget", [1, 16, 25, 40, 10_000])
def test_microbatches_cover_the_minibatch_once_over_all_ranks(on_ranks, experience, ranks, budget):
    rows = experience(PROMPTS, ANSWERS)
    dealt = on_ranks(ranks, lambda world: microbatches(rows, budget, world))
    assert len({len(micros) for micros in dealt}) == 1  # the same number of forwards on each rank
    assert {sum(len(micro) for micro in micros) for micros in dealt} == {8 // ranks}
    assert sorted(row for micros in dealt for micro in micros for row in real(micro)) == sorted(real(rows))
    for micro in (micro for micros in dealt for micro in micros):
        assert len(micro) * micro.attention_mask.sum(1).max() <= budget or len(micro) == 1
        assert micro.prompt_width == micro.prompt_lengths.max()
        assert micro.response_width == micro.response_lengths.max()


def test_ranks_have_the_same_number_of_microbatches(on_ranks, experience):
    """Rank 0 has 10 + 8 tokens, too many for one forward; rank 1 has 9 + 8, which would fit."""
    rows = experience([5, 5, 4, 4], [5, 4, 4, 4])
    dealt = on_ranks(2, lambda world: microbatches(rows, 18, world))
    assert [[len(micro) for micro in micros] for micros in dealt] == [[1, 1], [1, 1]]


def test_scoring_plans_agree_over_ranks(on_ranks, experience):
    shares = [experience([1, 1, 1], [1, 1, 1]), experience([9, 9, 9], [9, 9, 9])]
    plans = on_ranks(2, lambda world: scoring_plan(shares[world.rank], 20, world))
    assert [len(plan) for plan in plans] == [3, 3]
    assert len(scoring_plan(shares[0], 20, on_ranks(1, lambda world: world)[0])) == 1


@pytest.mark.parametrize(("ranks", "rows"), [(1, 3), (2, 4), (3, 3), (4, 4), (8, 8)])
def test_rows_are_filled_up_to_the_ranks_without_a_loss(experience, ranks, rows):
    given = experience([5, 2, 4], [5, 4, 3])
    full = filled(given, ranks)
    assert len(full) == rows and real(full)[:3] == real(given)
    assert int(full.response_mask.sum()) == 5 + 4 + 3 and not full.response_mask[3:].any()
    assert full.attention_mask[3:].all(1).tolist() == given.attention_mask[2:].all(1).tolist() * (rows - 3)
