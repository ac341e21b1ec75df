"""Tests the exchange of rows: ranks gather all rows, and minibatches cover each row exactly once."""

import pytest
import torch

from ppo_ds.ppo.minibatches import all_gather_rows, minibatches, scatter_states, scatter_tokens
from ppo_ds.run.microbatches import forward_rows, scoring_plan
from ppo_ds.types import Sequences
from tests.ppo.algo_cases import answers, real
from tests.ppo.learner_cases import shuffled

PROMPTS, ANSWERS = [3, 7, 1, 5, 2, 2, 9, 4], [6, 1, 2, 8, 3, 3, 1, 5]


def test_all_gather_rows_keeps_the_order_of_the_ranks(on_ranks, experience):
    shares = [experience([2, 4], [3, 1], seed=1, finished=[True, False]), experience([1, 1], [5, 2], seed=2)]
    assert (shares[0].prompt_width, shares[0].response_width) == (4, 3) and (
        shares[1].prompt_width,
        shares[1].response_width,
    ) == (1, 5)
    everyone = on_ranks(2, lambda world: all_gather_rows(shares[world.rank], world))
    for rows in everyone:
        assert (len(rows), rows.prompt_width, rows.response_width) == (4, 4, 5)
        assert real(rows) == real(shares[0]) + real(shares[1])
        assert rows.prompt_lengths.tolist() == [2, 4, 1, 1] and rows.response_lengths.tolist() == [3, 1, 5, 2]


def test_minibatches_cover_all_rows_once_an_epoch():
    parts = shuffled(12, 3, 4, seed=0)
    assert len(parts) == 9 and {len(part) for part in parts} == {4}
    epochs = [torch.cat(parts[i : i + 3]).tolist() for i in (0, 3, 6)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    # rows are reshuffled for each epoch
    assert len({tuple(epoch) for epoch in epochs}) == 3 and list(range(12)) not in epochs
    again = shuffled(12, 3, 4, seed=0)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    other = shuffled(12, 3, 4, seed=1)
    assert not all(torch.equal(a, b) for a, b in zip(parts, other, strict=True))


def test_minibatches_must_fit():
    with pytest.raises(AssertionError, match="12 rows do not make minibatches of 5"):
        minibatches(12, 5, torch.Generator())


def on_rows(forward):
    """Makes a model that calls ``forward`` on the rows that it receives."""
    return lambda ids, mask, response_width: forward(Sequences(ids, mask, mask[:, -response_width:]))


@pytest.mark.parametrize("budget", [1, 16, 25, 10_000])
def test_scores_stay_with_their_rows_and_positions(world, experience, budget):
    """At row i and position t, the model returns 100 * (first prompt token) + (t-th response token).

    Values outside the mask are 0.
    """
    rows = experience(PROMPTS, ANSWERS, vocabulary=90)
    sizes = []

    def forward(micro):
        sizes.append(len(micro) * int(micro.attention_mask.sum(1).max()))
        first = torch.stack([ids[mask][0] for ids, mask in zip(micro.ids, micro.attention_mask, strict=True)])
        answers = micro.ids[:, micro.prompt_width :]
        return (100 * first[:, None] + answers).double().masked_fill(~micro.response_mask, float("nan"))

    plan = scoring_plan(rows, budget, world)
    out = scatter_tokens(forward_rows(on_rows(forward), rows, plan), rows, plan)
    assert out.shape == rows.response_mask.shape and out.dtype == torch.float32
    assert all(size <= budget for size in sizes) or budget == 1
    for i, (p, r) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        first, answer = rows.ids[i, 9 - p], rows.ids[i, 9 : 9 + r]
        assert out[i].tolist() == [float(100 * first + token) for token in answer] + [0.0] * (8 - r)


@pytest.mark.parametrize("budget", [1, 25, 10_000])
def test_states_of_a_row_are_one_more_than_its_tokens(world, experience, budget):
    """For state t of row i, the model returns 100 * (prompt length) + t.

    Values beyond the state after the last token are 0.
    """
    rows = experience(PROMPTS, ANSWERS)

    def forward(micro):
        places = torch.arange(micro.response_width + 1.0)
        return 100 * micro.prompt_lengths[:, None] + places

    plan = scoring_plan(rows, budget, world)
    out = scatter_states(forward_rows(on_rows(forward), rows, plan), rows, plan)
    assert out.shape == (8, 9)
    for i, (p, r) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        assert out[i].tolist() == [100.0 * p + t for t in range(r + 1)] + [0.0] * (8 - r)


def test_a_masked_token_has_a_log_prob_too(world):
    """An end token that is excluded from the mask is still attended to, and its output is kept."""
    rows = answers([3, 1])
    mask = rows.response_mask.clone()
    mask[0, 2] = False
    kept = type(rows)(**{**vars(rows), "response_mask": mask})
    plan = scoring_plan(kept, 100, world)
    ones = forward_rows(on_rows(lambda micro: torch.ones(micro.response_mask.shape)), kept, plan)
    out = scatter_tokens(ones, kept, plan)
    assert out.tolist() == [[1, 1, 1], [1, 0, 0]]
