"""Tests sample rows: texts, numbers of responses, columns of tokens, and components on several ranks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ppo_ds.data.prompts import prompt_id
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ppo.sample_rows import prompt_notes, sample_rows, token_columns, token_texts
from ppo_ds.types import Rollout
from tests.ppo.algo_cases import maker, two_groups, without_critic
from tests.ppo.test_experience import scored_rollout


@pytest.fixture
def experience():
    return two_groups()


def test_rows_as_text(experience, tokenizer):
    rows = sample_rows(experience, tokenizer, range(4))
    assert [row["prompt"] for row in rows] == ["c", "c", "de", "de"]
    assert [row["response"] for row in rows] == ["ab", "", "abc", "ab"]  # the end token has no text
    assert [row["score"] for row in rows] == [1.0, 1.0, 0.0, 4.0]
    assert [row["kl"] for row in rows] == pytest.approx([0.3, 0.5, 0.0, 0.9], abs=1e-6)
    assert [row["length"] for row in rows] == [3, 1, 3, 3]
    assert [row["finish"] for row in rows] == ["stop", "stop", "length", "stop"]
    assert [row["ended_by"] for row in rows] == ["<eos>", "<eos>", None, "<eos>"]


def test_columns_of_tokens_by_hand(experience, tokenizer):
    """The second state of row 0 has a reward too, and row 2 the reward of the state after its last token."""
    rewards = experience.rewards.clone()
    rewards[0, 1], rewards[2, 2], rewards[2, 3] = 0.123456, 0.5, 0.25
    advantages = torch.tensor([[0.5, -1.0, 2.0], [0, 0, 0], [1, 2, 3], [0, 0, 0.0]])
    rows = sample_rows(replace(experience, rewards=rewards, advantages=advantages), tokenizer, range(4), 99)
    assert rows[0]["tokens"] == {
        "text": ["a", "b", "<eos>"],
        "ids": [3, 4, 1],
        "logprobs": [-1.0, -1.0, -1.0],
        "ref_logprobs": [-1.5, -0.8, -1.0],
        "values": [1.0, 2.0, 3.0],
        "advantages": [0.5, -1.0, 2.0],
        "rewards": [1.0, 0.1235, 1.0],
    }
    assert rows[1]["tokens"]["text"] == ["<eos>"] and rows[2]["tokens"]["rewards"] == [0.0, 0.0, 0.75]


def test_columns_end_at_the_limit(experience, tokenizer):
    rewards = experience.rewards.clone()
    rewards[2, 3] = 0.25  # of the state after the last token, which is beyond the limit
    rows = sample_rows(replace(experience, rewards=rewards), tokenizer, range(4), 2)
    assert [{len(column) for column in row["tokens"].values()} for row in rows] == [{2}, {1}, {2}, {2}]
    assert rows[2]["tokens"]["rewards"] == [0.0, 0.0] and [row["length"] for row in rows] == [3, 1, 3, 3]
    assert "tokens" not in sample_rows(experience, tokenizer, [0], 0)[0]


def test_columns_that_a_run_does_not_compute_are_missing(experience, tokenizer):
    plain = replace(without_critic(experience), logprobs=None, ref_logprobs=None)
    assert list(token_columns(plain, tokenizer, 0, 9)) == ["text", "ids", "advantages", "rewards"]


def byte_level():
    """Makes a tokenizer of one token per byte."""
    vocab = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"), ())


def words():
    """Makes a tokenizer whose tokens begin with a mark for a space, which is dropped at the start."""
    vocab = {token: i for i, token in enumerate(["▁so", "▁what", "ever", "▁", "!"])}
    backend = Backend(models.WordLevel(vocab, unk_token="!"))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>"), ())


def test_pieces_of_bytes_are_whole_characters():
    tokenizer = byte_level()
    text = "é 答案🙂!"
    ids = tokenizer.hf(text)["input_ids"]
    pieces = token_texts(ids, tokenizer)
    assert len(ids) == 14 and "".join(pieces) == text
    assert [piece for piece in pieces if piece] == list(text)
    cut = token_texts(ids[:-2], tokenizer)  # within the last but one character
    assert "".join(cut) == tokenizer.decode(ids[:-2]) and cut[:-1] == pieces[: len(cut) - 1]


def test_pieces_keep_the_spaces_of_words():
    pieces = token_texts([0, 1, 2, 4, 0], words())
    assert pieces == ["so", " what", "ever", "!", " so"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_of_all_ranks_have_their_own_components_and_prompts(on_ranks, tokenizer, ranks):
    def work(world):
        mine = torch.arange(4).chunk(ranks)[world.rank].tolist()
        ids = torch.tensor([[8, 3 + i, 1] for i in mine])
        mask = torch.ones(len(mine), 3, dtype=torch.bool)
        about = tuple(
            {"prompt_text": f"p{i}", "messages": [{"content": f"q{i}"}], "answer": i, "long": "x" * 201}
            for i in mine
        )
        yes, limits = torch.ones(len(mine), dtype=torch.bool), torch.full((len(mine),), 2)
        rollout = Rollout(ids, mask, mask[:, 1:], yes, limits, -torch.rand(len(mine), 2), about)
        rollout = replace(
            scored_rollout(rollout, [float(i) for i in mine]),
            components=tuple({"a": i + 0.5, "b/c": -1.0} for i in mine),
        )
        experience, _ = maker(world)(rollout, 0.1)
        noted = [prompt_notes(rollout, limit, 2, world) for limit in (-1, 3, 2, 0)]
        return [(sample_rows(experience, tokenizer, [*notes]), notes) for notes in noted]

    results = on_ranks(ranks, work)
    for found in results:
        rows, notes = found[0]
        assert [row["components"] for row in rows] == [{"a": i + 0.5, "b/c": -1.0} for i in range(4)]
        assert [row["score"] for row in rows] == [0.0, 1.0, 2.0, 3.0]
        assert notes == {
            i: {"asked": f"q{i}", "prompt_id": prompt_id(f"p{i}"), "columns": {"answer": i}} for i in range(4)
        }
        for (rows, notes), chosen in zip(found[1:], ([0, 1, 2], [0, 2], []), strict=True):
            assert [row["response"] for row in rows] == ["abcd"[i] for i in chosen]
            assert {i: note["asked"] for i, note in notes.items()} == {i: f"q{i}" for i in chosen}


def test_a_score_of_one_part_has_no_components(world, experience, tokenizer):
    assert "components" not in sample_rows(experience, tokenizer, [0])[0]
    assert prompt_notes(SimpleNamespace(metadata=({"prompt_text": "p"},)), 1, 1, world)[0]["asked"] == "p"
