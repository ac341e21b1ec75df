"""Tests the types that flow through a step: shapes are checked, rows are selected and padded.

Values in the padding never reach positions under the masks.
"""

from dataclasses import replace

import pytest
import torch

from ppo_ds.types import Experience, Prompts, Rollout, Scores, Sequences

P, R = 4, 3
# ids from 90 on are arbitrary values in the padding
IDS = [[91, 92, 11, 12, 21, 22, 93], [31, 32, 33, 34, 41, 94, 95], [96, 97, 98, 51, 61, 62, 63]]
PROMPTS, ANSWERS = [2, 4, 1], [2, 1, 3]  # lengths


def masks():
    prompt = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]).bool()
    answer = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    return torch.cat([prompt, answer], dim=1), answer


def rollout(**changes):
    attention, response = masks()
    columns = dict(
        ids=torch.tensor(IDS),
        attention_mask=attention,
        response_mask=response,
        finished=torch.tensor([True, False, True]),
        limits=torch.tensor([5, 1, 3]),
        logprobs=torch.tensor([[-1.0, -2.0, 77.0], [-3.0, 77.0, 77.0], [-4.0, -5.0, -6.0]]),
        metadata=({"n": 0}, {"n": 1}, {"n": 2}),
    )
    return Rollout(**columns | changes)


def experience():
    attention, response = masks()
    column, states = torch.arange(9.0).view(3, 3), torch.arange(12.0).view(3, 4)
    return Experience(
        ids=torch.tensor(IDS),
        attention_mask=attention,
        response_mask=response,
        finished=torch.tensor([True, False, True]),
        decode_logprobs=column + 80,
        logprobs=column,
        old_logprobs=column + 70,
        ref_logprobs=column + 10,
        rewards=states + 30,
        advantages=column + 40,
        weights=column + 60,
        scores=torch.tensor([7.0, 8.0, 9.0]),
        values=states + 20,
        returns=states + 50,
        value_mask=torch.cat([response, torch.zeros(3, 1, dtype=torch.bool)], 1),
    )


def test_widths_and_lengths():
    rows = rollout()
    assert (len(rows), rows.prompt_width, rows.response_width) == (3, P, R)
    assert rows.prompt_lengths.tolist() == PROMPTS and rows.response_lengths.tolist() == ANSWERS


@pytest.mark.parametrize(
    "changes",
    [
        dict(attention_mask=torch.ones(3, 6, dtype=torch.bool)),  # narrower than the ids
        dict(logprobs=torch.zeros(3, 4)),  # wider than the responses
        dict(logprobs=torch.zeros(3, 7)),  # as wide as the sequences
        dict(finished=torch.ones(2, dtype=torch.bool)),
        dict(metadata=({}, {})),
        dict(response_mask=torch.ones(2, 3, dtype=torch.bool)),
    ],
)
def test_a_column_of_another_shape_is_refused(changes):
    with pytest.raises(AssertionError, match=rf"Rollout\.\w*{next(iter(changes))[:4]}|Rollout\.logprobs"):
        rollout(**changes)


def test_other_types_refuse_other_row_counts():
    with pytest.raises(AssertionError, match="Prompts.mask has 1 rows, not 2"):
        Prompts(torch.zeros(2, 1), torch.zeros(1, 1), torch.zeros(2), ({}, {}))
    with pytest.raises(AssertionError, match="Scores.per_token"):
        Scores(torch.zeros(2), torch.zeros(3, 1), {})
    with pytest.raises(AssertionError, match="Scores.style"):
        Scores(torch.zeros(2), torch.zeros(2, 1), {"style": torch.zeros(1)})


def test_select_keeps_every_column_in_the_requested_order():
    picked = rollout().select(torch.tensor([2, 0, 2]))
    assert picked.ids.tolist() == [IDS[2], IDS[0], IDS[2]]
    assert picked.prompt_lengths.tolist() == [1, 2, 1] and picked.response_lengths.tolist() == [3, 2, 3]
    assert picked.finished.tolist() == [True, True, True] and picked.limits.tolist() == [3, 5, 3]
    assert picked.logprobs[:, 0].tolist() == [-4.0, -1.0, -4.0]
    assert picked.metadata == ({"n": 2}, {"n": 0}, {"n": 2})
    assert (picked.prompt_width, picked.response_width) == (P, R)  # selecting rows keeps the widths


def test_select_of_prompts_and_of_experience():
    prompts = Prompts(
        torch.tensor([[0, 5], [6, 7]]),
        torch.tensor([[False, True], [True, True]]),
        torch.tensor([3, 4]),
        ({"a": 1}, {"a": 2}),
    )
    other = prompts.select(torch.tensor([1]))
    assert (other.ids.tolist(), other.mask.tolist(), other.limits.tolist(), other.metadata) == (
        [[6, 7]],
        [[True, True]],
        [4],
        ({"a": 2},),
    )
    picked = experience().select(torch.tensor([1]))
    columns = ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
    assert [int(getattr(picked, name)[0, 0]) for name in columns] == [3, 13, 24, 34, 43, 54]
    assert picked.scores.tolist() == [8.0]


def test_trimmed_cuts_prompts_on_the_left_and_responses_on_the_right():
    cut = rollout().select(torch.tensor([0, 1])).trimmed()
    assert (cut.prompt_width, cut.response_width) == (4, 2)
    assert cut.ids.tolist() == [[91, 92, 11, 12, 21, 22], [31, 32, 33, 34, 41, 94]]
    alone = rollout().select(torch.tensor([0])).trimmed()
    assert alone.ids.tolist() == [[11, 12, 21, 22]] and alone.logprobs.tolist() == [[-1.0, -2.0]]
    assert alone.attention_mask.all() and alone.response_mask.all()


def test_a_column_of_states_is_one_position_wider_than_the_responses():
    cut = experience().select(torch.tensor([0, 1])).trimmed()  # answers of 2 and 1 tokens
    assert cut.values.tolist() == [[20.0, 21.0, 22.0], [24.0, 25.0, 26.0]] and cut.value_mask.tolist() == [
        [True, True, False],
        [True, False, False],
    ]
    assert cut.resized(4, 3).returns.tolist() == [[50.0, 51.0, 52.0, 0.0], [54.0, 55.0, 56.0, 0.0]]
    with pytest.raises(AssertionError, match=r"Experience.values is \(2, 2\), not \(2, 3\)"):
        replace(cut, values=cut.advantages)


def test_rows_without_a_response_keep_one_position():
    mask = torch.tensor([[0, 1, 0, 0]]).bool()
    cut = Sequences(torch.tensor([[8, 9, 8, 8]]), mask, mask[:, 2:]).trimmed()
    assert (cut.prompt_width, cut.response_width) == (1, 1)
    assert (
        cut.ids.tolist() == [[9, 8]]
        and cut.attention_mask.tolist() == [[True, False]]
        and not cut.response_mask.any()
    )


def test_attended_but_not_an_action():
    """A stop token that is not an action is still attended to, so trimming must not remove it."""
    attention, action = torch.ones(1, 4, dtype=torch.bool), torch.tensor([[True, False]])
    assert Sequences(torch.tensor([[1, 2, 3, 4]]), attention, action).trimmed().ids.tolist() == [[1, 2, 3, 4]]


def test_resized_pads_with_positions_outside_the_masks():
    wide = rollout().resized(6, 5)
    assert (wide.prompt_width, wide.response_width) == (6, 5)
    assert wide.ids[0].tolist() == [0, 0, *IDS[0], 0, 0]
    assert wide.attention_mask[1].tolist() == [False] * 2 + [True] * 5 + [False] * 4
    assert wide.response_mask[2].tolist() == [True] * 3 + [False] * 2
    assert wide.prompt_lengths.tolist() == PROMPTS and wide.response_lengths.tolist() == ANSWERS
    assert wide.logprobs[0].tolist() == [-1.0, -2.0, 77.0, 0.0, 0.0]
    assert wide.finished.tolist() == [True, False, True]


def test_to_moves_tensors_and_keeps_the_rest():
    moved = rollout().to(torch.device("meta"))
    assert {
        getattr(moved, name).device.type
        for name in ("ids", "attention_mask", "response_mask", "finished", "logprobs")
    } == {"meta"}
    assert moved.metadata == rollout().metadata
