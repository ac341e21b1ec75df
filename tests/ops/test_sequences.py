"""Tests masks and positions: goldens, multiple stop tokens, pad == eos, empty rows."""

import pytest
import torch

from ppo_ds.ops.sequences import (
    last_token_index,
    next_token_mask,
    position_ids_from_mask,
    response_mask,
    response_slice,
)
from tests.ops.golden import assert_no_stale_entries, check, outputs

EOS, PAD, P, T = 2, 0, 5, 10


def actions(case, include_eos=True, ids="responses"):
    return response_mask(getattr(case, ids), [EOS], include_eos=include_eos)[0]


def truncated(case):
    return case.raw_responses.where(actions(case, ids="raw_responses"), PAD)


def attention(case):
    prompts = torch.arange(P) >= P - torch.tensor(case.prompt_lens)[:, None]
    return torch.cat([prompts, actions(case)], dim=1)


def end_scores(case):
    return case.token_values.gather(1, last_token_index(attention(case))[:, None])[:, 0]


def attended_positions(case):
    """Returns positions; unattended ones are unused, so TRL's are taken there, which count on."""
    return position_ids_from_mask(attention(case)).where(attention(case), case.outputs["trl.position_ids"])


TARGETS = {
    "trl.truncate_response": truncated,
    "torchtune.truncated": truncated,
    "trl.sequence_lengths": lambda c: last_token_index(actions(c, ids="raw_responses")),
    "trl.padding_mask": lambda c: ~actions(c),
    "torchtune.padding_mask": lambda c: ~actions(c),
    "trl.padding_mask_p1": lambda c: ~next_token_mask(actions(c)),
    "verl.get_response_mask": actions,
    "dschat.attention_mask.pad_not_eos": attention,
    "dschat.action_mask.pad_not_eos": lambda c: attention(c)[:, 1:],
    "seed_a.action_mask.*": lambda c: actions(c, include_eos=False),
    "seed_c.final_mask.pad_not_eos": lambda c: torch.nn.functional.pad(actions(c), (P - 1, 0)),
    "openrlhf.position_ids": lambda c: position_ids_from_mask(attention(c)),
    "trl.position_ids": attended_positions,
    "*.end_scores.pad_not_eos": end_scores,
    "openrlhf.end_scores": end_scores,
    "*.end_index.pad_not_eos": lambda c: last_token_index(attention(c)),
}
LOSES_EOS = "ids are compared with pad == eos: the EOS is lost, with every EOS inside a chat prompt"
NOT_TARGETS = {
    "dschat.*_mask.pad_is_eos": LOSES_EOS,
    "seed_c.final_mask.pad_is_eos": LOSES_EOS,
    "*.end_scores.pad_is_eos": LOSES_EOS,
    "*.end_index.pad_is_eos": LOSES_EOS,
}


@pytest.mark.parametrize(("case", "key"), outputs("masks.json", NOT_TARGETS))
def test_golden(case, key):
    check(case, key, TARGETS)


def test_every_table_entry_is_used():
    assert_no_stale_entries("masks.json", TARGETS, NOT_TARGETS)


def test_masks_do_not_depend_on_the_pad_token():
    ids = torch.tensor([[7, 8, 2, 2, 2], [2, 2, 2, 2, 2], [7, 8, 9, 7, 2], [7, 8, 9, 7, 8]])  # pad == eos
    mask, lengths, finished = response_mask(ids, [2])
    assert lengths.tolist() == [3, 1, 5, 5]
    assert mask.sum(1).tolist() == [3, 1, 5, 5]
    assert finished.tolist() == [True, True, True, False]


def test_several_stop_tokens_and_none():
    ids = torch.tensor([[5, 9, 2, 5], [5, 5, 5, 9], [5, 5, 5, 5]])
    assert response_mask(ids, [2, 9])[1].tolist() == [2, 4, 4]
    mask, lengths, finished = response_mask(ids, [])
    assert mask.all() and lengths.tolist() == [4, 4, 4] and not finished.any()


def test_known_lengths_mask_later_tokens():
    ids = torch.tensor([[5, 5, 2, 2], [5, 2, 0, 0], [2, 0, 0, 0], [5, 5, 5, 5]])
    mask, lengths, finished = response_mask(ids, [2], lengths=torch.tensor([2, 4, 0, 4]))
    assert lengths.tolist() == [2, 2, 0, 4]  # the stop tokens of row 0 are padding; row 2 is empty
    assert finished.tolist() == [False, True, False, False]
    assert mask.tolist() == [[True, True, False, False], [True, True, False, False], [False] * 4, [True] * 4]


def test_without_eos_the_stop_token_is_no_action_but_still_counts_in_the_length():
    ids = torch.tensor([[5, 2, 0], [2, 0, 0], [5, 5, 5], [5, 5, 2]])
    mask, lengths, finished = response_mask(ids, [2], include_eos=False)
    assert mask.sum(1).tolist() == [1, 0, 3, 2]
    assert lengths.tolist() == [2, 1, 3, 3]
    assert finished.tolist() == [True, True, False, True]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_last_and_next_position(dtype):
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 1, 0]]).to(dtype)
    assert last_token_index(mask).tolist() == [1, 3, -1, 2]
    assert next_token_mask(mask).dtype == dtype
    assert next_token_mask(mask).long().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [1, 0, 1, 1]]


def test_response_slice_takes_the_states_before_the_response_tokens():
    x = torch.arange(7.0).expand(2, 7)  # P = 3, T = 4
    assert response_slice(x, 3, 4).tolist() == [[2.0, 3.0, 4.0, 5.0]] * 2
    logits = torch.randn(2, 7, 5)
    assert torch.equal(response_slice(logits, 3, 4), logits[:, 2:6])
    # a view: [B,T,V] must not be copied
    assert response_slice(logits, 3, 4).data_ptr() == logits[:, 2:].data_ptr()
