"""Micro-batches within a token budget, and rows to ranks."""

import pytest
import torch

from ppo_ds.ops.batching import deal, plan_microbatches


def lengths(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 60, (n,), generator=generator), torch.randint(1, 200, (n,), generator=generator)


def cost(rows, prompts, responses):
    return len(rows) * int(prompts[rows].max() + responses[rows].max())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("budget", [1, 200, 1000, 10**6])
@pytest.mark.parametrize("at_least", [1, 7, 23])
def test_a_plan_covers_every_row_once_within_the_budget(seed, budget, at_least):
    prompts, responses = lengths(23, seed)
    plan = plan_microbatches(prompts, responses, budget, at_least)
    assert sorted(torch.cat(plan).tolist()) == list(range(23))
    assert len(plan) >= at_least
    assert all(rows.dtype == torch.int64 and len(rows) > 0 for rows in plan)
    assert all(len(rows) == 1 or cost(rows, prompts, responses) <= budget for rows in plan)
    totals = (prompts + responses)[torch.cat(plan)]
    assert torch.equal(totals, totals.sort(descending=True).values)  # the longest first


def test_a_plan_worked_by_hand():
    prompts, responses = torch.tensor([1, 4, 2, 1, 9]), torch.tensor([3, 4, 2, 3, 20])
    # by total length: row 4 (29), 1 (8), then 0, 2, 3 (4 each)
    plan = plan_microbatches(prompts, responses, 16)
    assert [rows.tolist() for rows in plan] == [[4], [1, 0], [2, 3]]  # 2 * (4 + 4) = 16 fits, with row 2 it would be 24
    plan = plan_microbatches(prompts, responses, 16, at_least=4)
    assert [rows.tolist() for rows in plan] == [[4], [1], [0], [2, 3]]  # 16 is the costliest that can be split
    assert [rows.tolist() for rows in plan_microbatches(prompts, responses, 1)] == [[4], [1], [0], [2], [3]]


def test_the_longest_prompt_and_the_longest_response_may_be_of_different_rows():
    prompts, responses = torch.tensor([10, 1]), torch.tensor([1, 10])
    assert len(plan_microbatches(prompts, responses, 39)) == 2  # padded together 2 * 20
    assert len(plan_microbatches(prompts, responses, 40)) == 1


def test_no_group_is_needlessly_small():
    prompts, responses = torch.full((12,), 5), torch.full((12,), 5)
    assert [len(rows) for rows in plan_microbatches(prompts, responses, 50)] == [5, 5, 2]
    assert [len(rows) for rows in plan_microbatches(prompts, responses, 50, at_least=5)] == [3, 2, 3, 2, 2]


def test_a_plan_is_deterministic_and_refuses_more_groups_than_rows():
    prompts, responses = lengths(50)
    plans = [plan_microbatches(prompts, responses, 900, 9) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*plans, strict=True))
    for at_least in (0, 51):
        with pytest.raises(AssertionError):
            plan_microbatches(prompts, responses, 900, at_least)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_deal_is_fair(ranks):
    total = sum(lengths(48))
    hands = deal(total, ranks)
    assert sorted(torch.cat(hands).tolist()) == list(range(48))
    assert [len(hand) for hand in hands] == [48 // ranks] * ranks
    sums = [int(total[hand].sum()) for hand in hands]
    assert max(sums) - min(sums) <= int(total.max())  # as far apart as one row at most


def test_a_deal_worked_by_hand():
    assert [hand.tolist() for hand in deal(torch.tensor([1, 2, 3, 4, 5, 6]), 3)] == [[5, 0], [4, 1], [3, 2]]
    assert [hand.tolist() for hand in deal(torch.tensor([7, 7, 7, 7, 7, 7, 7, 7]), 2)] == [[0, 3, 4, 7], [1, 2, 5, 6]]  # ties keep their order
    assert deal(torch.full((400,), 7), 2)[0].tolist() == [i for i in range(400) if i % 4 in (0, 3)]
    with pytest.raises(AssertionError):
        deal(torch.tensor([1, 2, 3]), 2)
