"""Tests micro-batches within a token budget, and the distribution of rows over ranks."""

import pytest
import torch

from ppo_ds.compute.batching import FORWARD, balance_ranks, padded_tokens, plan_forwards, plan_microbatches


def lengths(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 60, (n,), generator=generator), torch.randint(1, 200, (n,), generator=generator)


def cost(rows, prompts, responses):
    return len(rows) * int(prompts[rows].max() + responses[rows].max())


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


# -- forwards of whole rows ----------------------------------------------------------------------------------


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
