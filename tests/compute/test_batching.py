"""Tests micro-batches within a token budget, and the distribution of rows over ranks."""

import pytest
import torch

from ppo_ds.compute.batching import FORWARD, balance_ranks, padded_tokens, plan_forwards, plan_microbatches


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
    assert torch.equal(totals, totals.sort(descending=True).values)  # the longest rows come first


def test_a_plan_worked_by_hand():
    prompts, responses = torch.tensor([1, 4, 2, 1, 9]), torch.tensor([3, 4, 2, 3, 20])
    # order by total length: row 4 (29), row 1 (8), then rows 0, 2 and 3 (4 each)
    plan = plan_microbatches(prompts, responses, 16)
    # rows 1 and 0 cost 2 * (4 + 4) = 16, which fits; with row 2 they would cost 24
    assert [rows.tolist() for rows in plan] == [[4], [1, 0], [2, 3]]
    plan = plan_microbatches(prompts, responses, 16, at_least=4)
    # the most expensive group of several rows, with cost 16, is split
    assert [rows.tolist() for rows in plan] == [[4], [1], [0], [2, 3]]
    assert [rows.tolist() for rows in plan_microbatches(prompts, responses, 1)] == [[4], [1], [0], [2], [3]]


def test_the_longest_prompt_and_the_longest_response_may_be_of_different_rows():
    prompts, responses = torch.tensor([10, 1]), torch.tensor([1, 10])
    assert len(plan_microbatches(prompts, responses, 39)) == 2  # both rows padded together cost 2 * 20
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


# -- forwards of whole rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("budget", [1, 200, 1000, 10**6])
@pytest.mark.parametrize("at_least", [1, 7, 23])
def test_forwards_cover_every_row_once_within_the_budget(packed, budget, at_least):
    total = sum(lengths(23))
    plan = plan_forwards(total, budget, at_least, packed)
    assert sorted(torch.cat(plan).tolist()) == list(range(23)) and len(plan) >= at_least
    assert all(len(rows) == 1 or padded_tokens(total[rows], packed) <= budget for rows in plan)
    in_order = total[torch.cat(plan)]
    assert torch.equal(in_order, in_order.sort(descending=True).values)  # the longest rows come first
    again = plan_forwards(total, budget, at_least, packed)
    assert all(torch.equal(a, b) for a, b in zip(plan, again, strict=True))


def test_forwards_worked_by_hand():
    total = torch.tensor([100, 300, 290, 90, 20])
    # padded: 300 and 290 together need 10 tokens of padding, and so do 100 and 90. A row of 20 alone costs a
    # forward, which is less than the 80 tokens of padding that it would need beside 100 and 90
    assert FORWARD == 64
    assert [rows.tolist() for rows in plan_forwards(total, 1000)] == [[1, 2], [0, 3], [4]]
    # a row of 40 needs 60 tokens of padding, which is less than the cost of a forward
    assert [rows.tolist() for rows in plan_forwards(torch.tensor([100, 300, 290, 90, 40]), 1000)] == [
        [1, 2],
        [0, 3, 4],
    ]
    # 2 * 300 exceeds 599
    assert [rows.tolist() for rows in plan_forwards(total, 599)] == [[1], [2], [0, 3], [4]]
    # the most expensive group is split in halves
    assert [rows.tolist() for rows in plan_forwards(total, 1000, at_least=4)] == [[1], [2], [0, 3], [4]]
    # packed: the budget counts real tokens only
    assert [rows.tolist() for rows in plan_forwards(total, 800, packed=True)] == [[1, 2, 0, 3, 4]]
    assert [rows.tolist() for rows in plan_forwards(total, 690, packed=True)] == [[1, 2, 0], [3, 4]]
    assert [rows.tolist() for rows in plan_forwards(total, 250, packed=True)] == [[1], [2], [0, 3, 4]]


@pytest.mark.parametrize("seed", range(4))
def test_no_other_way_of_padding_costs_less(seed):
    """Compares to all 2^8 ways to split 9 sorted rows into groups."""
    total = (sum(lengths(9, seed))).sort(descending=True).values
    budget = 700

    def cost(ends):
        groups = [total[start:end] for start, end in zip([0, *ends], [*ends, 9], strict=True)]
        spent = [len(group) * int(group[0]) for group in groups]
        return (
            sum(spent) + 64 * len(groups)
            if all(s <= budget or len(g) == 1 for s, g in zip(spent, groups, strict=True))
            else 10**9
        )

    least = min(cost([i for i in range(1, 9) if cuts >> (i - 1) & 1]) for cuts in range(256))
    plan = plan_forwards(total, budget)
    assert cost(torch.tensor([len(rows) for rows in plan]).cumsum(0)[:-1].tolist()) == least


def answers_that_vary(n, seed):
    """Draws prompts of 8 to 128 tokens, and responses of geometric length with mean 48, cut at 256."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(8, 129, (n,), generator=generator)
    return prompts, torch.empty(n).geometric_(1 / 48, generator=generator).long().clamp(max=256)


@pytest.mark.parametrize("rows", [32, 64, 128])
def test_varied_lengths_need_little_padding(rows):
    """Uses the default memory.train_tokens."""
    for seed in range(10):
        prompts, responses = answers_that_vary(rows, seed)
        total = prompts + responses
        plan = plan_forwards(total, 8192)
        spent = sum(len(group) * int(total[group].max()) for group in plan)
        assert spent < int(total.sum()) / 0.9  # less than a tenth of the tokens are padding
        assert len(plan) <= 16  # few forwards, because each has a fixed cost
        # for comparison: prompts and responses padded separately, each to the longest
        together = plan_microbatches(prompts, responses, 8192)
        assert 1 - int(total.sum()) / sum(cost(group, prompts, responses) for group in together) > 0.25


def test_padded_tokens_worked_by_hand():
    assert (
        padded_tokens(torch.tensor([6, 2, 4]), packed=False) == 18
        and padded_tokens(torch.tensor([6, 2, 4]), packed=True) == 12
    )


@pytest.mark.parametrize("packed", [False, True])
def test_forwards_are_no_more_than_rows(packed):
    with pytest.raises(AssertionError):
        plan_forwards(torch.tensor([3, 4]), 100, 3, packed)


# -- ranks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_balanced_ranks_have_similar_loads(ranks):
    total = sum(lengths(48))
    hands = balance_ranks(total, ranks)
    assert sorted(torch.cat(hands).tolist()) == list(range(48))
    assert [len(hand) for hand in hands] == [48 // ranks] * ranks
    sums = [int(total[hand].sum()) for hand in hands]
    assert max(sums) - min(sums) <= int(total.max())  # the loads differ by at most one row


def test_balanced_ranks_worked_by_hand():
    assert [hand.tolist() for hand in balance_ranks(torch.tensor([1, 2, 3, 4, 5, 6]), 3)] == [
        [5, 0],
        [4, 1],
        [3, 2],
    ]
    # rows of equal length keep their order
    assert [hand.tolist() for hand in balance_ranks(torch.tensor([7, 7, 7, 7, 7, 7, 7, 7]), 2)] == [
        [0, 3, 4, 7],
        [1, 2, 5, 6],
    ]
    assert balance_ranks(torch.full((400,), 7), 2)[0].tolist() == [i for i in range(400) if i % 4 in (0, 3)]
    with pytest.raises(AssertionError):
        balance_ranks(torch.tensor([1, 2, 3]), 2)
