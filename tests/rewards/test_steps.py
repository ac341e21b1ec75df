"""Tests step rewards: how a response is cut into steps, and which tokens their rewards go to."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

from ppo_ds.config.targets import bind
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import RewardError, token_ends
from ppo_ds.rewards.function import FunctionReward
from ppo_ds.rewards.steps import split_steps, step_ends
from ppo_ds.types import Rollout
from tests.rewards.reward_cases import make_rollout

PIECES = ["<pad>", "<eos>", "a", ".\n", "\nb", "c", ".\n\n", "d", "\n\n\n\ne\n\n", "f"]
PIECES += ["<answer>", "</answer>"]
PAD, EOS, A, DOT, B, C, END, D, E, F, OPEN, CLOSE = range(len(PIECES))


@pytest.fixture(scope="module")
def pieces():
    """A tokenizer whose tokens are PIECES, several of which contain parts of separators."""
    backend = Backend(models.WordLevel(dict(zip(PIECES, range(len(PIECES)), strict=True)), unk_token="<pad>"))
    backend.decoder = decoders.Fuse()
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    return Tokenizer(hf)


def rollout_of(*responses):
    """Makes a rollout of responses to the prompt "a"; all that end with EOS are finished."""
    width = max(map(len, responses))
    ids = torch.tensor([[A, *ids, *[PAD] * (width - len(ids))] for ids in responses])
    mask = torch.arange(width) < torch.tensor([len(ids) for ids in responses])[:, None]
    attention = torch.cat([torch.ones(len(ids), 1, dtype=torch.bool), mask], 1)
    finished = torch.tensor([ids[-1] == EOS for ids in responses])
    rows = tuple({"prompt_text": "a", "n": n} for n in range(len(responses)))
    limits = torch.full((len(ids),), width)
    return Rollout(ids, attention, mask, finished, limits, torch.zeros(mask.shape), rows)


def by_length(folder, **keys):
    """Makes a reward with one reward for each step: 1 for the first, 2 for the second, and so on."""
    (folder / "steps.py").write_text(
        "from ppo_ds.rewards.steps import split_steps\n"
        "def score(prompts, responses, rows):\n"
        "    return [[1.0 + i for i, _ in enumerate(split_steps(text))] for text in responses]\n"
    )
    return {"_target_": "ppo_ds.rewards.function.FunctionReward", "path": f"{folder}/steps.py:score", **keys}


@pytest.mark.parametrize(
    ("text", "separator", "steps", "ends"),
    [
        ("one\n\ntwo", "\n\n", ["one", "two"], [5, 8]),
        ("one\n\ntwo\n\n", "\n\n", ["one", "two"], [5, 10]),  # the last step ends where the text ends
        ("\n\none\n\n \n\ntwo\n", "\n\n", ["one", "two\n"], [7, 14]),  # blank pieces are not steps
        ("one\n\n\ntwo", "\n\n", ["one", "\ntwo"], [5, 9]),
        ("one", "\n\n", ["one"], [3]),
        ("", "\n\n", [], []),
        (" \n\n", "\n\n", [], []),
        ("a\nb\n\nc", "\n", ["a", "b", "c"], [2, 4, 6]),
        ("x ки y ки", " ки", ["x", " y"], [4, 9]),
    ],
)
def test_steps_of_a_text(text, separator, steps, ends):
    assert split_steps(text, separator) == steps and step_ends(text, separator) == ends
    cut = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert "".join(cut) == (text if steps else "")


def test_rewards_go_to_the_tokens_that_complete_the_steps(pieces, tmp_path):
    """Worked by hand: the text of the first response is "a.", "bc." and "d" with blank lines between them.

    The first blank line ends inside the token "\\nb", the second ends with the token ".\\n\\n". The last step
    ends with the response, so its reward goes to the end token. The second response was cut at the limit. The
    third has two steps that end in one token, and no end token of its own.
    """
    rollout = rollout_of([A, DOT, B, C, END, D, EOS], [A, DOT, B, C], [A, E, F, F], [EOS])
    scores = bind(by_length(tmp_path), "reward")(tokenizer=pieces)(rollout)
    assert scores.per_token.tolist() == [
        [0, 0, 1, 0, 2, 0, 3],
        [0, 0, 1, 2, 0, 0, 0],
        [0, 1 + 2, 0, 3, 0, 0, 0],
        [0] * 7,  # a response without text has no step
    ]
    assert scores.total.tolist() == [0, 0, 0, 0] and scores.sums.tolist() == [6, 3, 6, 0]


def test_a_character_of_several_tokens_may_precede_the_end(tokenizer, tmp_path):
    """With one token per byte, "是。" has 6 tokens and the blank line 2."""
    scores = bind(by_length(tmp_path), "reward")(tokenizer=tokenizer)(
        make_rollout(tokenizer, [("p", "是。\n\n否")])
    )
    assert scores.per_token.tolist() == [[0] * 7 + [1] + [0] * 3 + [2]]
    ids = tokenizer.encode_many(["是。\n\n否"], special_tokens=False)[0]
    assert token_ends([1, 2, 3, 4, 5], ids, tokenizer) == [2, 5, 6, 7, 10]


class Bytes:
    """Tokens are parts of UTF-8 text, which may split a character, as in byte-level BPE."""

    def decode(self, ids):
        return b"".join(ids).decode("utf-8", "replace")


class Pieces:
    """Tokens are pieces of text; the space before the first word is not decoded, as in SentencePiece."""

    def decode(self, ids):
        return "".join(ids).removeprefix(" ")


def test_random_tokens_against_a_search_from_the_start():
    """The first prefix of the tokens whose text contains a step completely ends with the step's token."""
    draw = random.Random(0)
    for trial in range(3000):
        text = "".join(draw.choices(["a", "b", "\n", "\n\n", "是", " ", "é", "😀"], k=draw.randint(1, 40)))
        tokenizer, whole = (Bytes(), text.encode()) if trial % 2 else (Pieces(), f" {text}")
        cuts = sorted(draw.sample(range(1, len(whole)), draw.randint(0, len(whole) - 1)))
        ids = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        decoded = tokenizer.decode(ids)
        ends = step_ends(decoded) if trial % 3 else list(range(1, len(decoded) + 1))
        prefixes = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
        expected = [
            next(n for n, prefix in enumerate(prefixes) if prefix.startswith(decoded[:end])) for end in ends
        ]
        if ends and ends[-1] == len(decoded):
            expected[-1] = len(ids) - 1
        assert token_ends(ends, ids, tokenizer) == expected, (ids, ends)


def test_a_part_of_a_mixture_may_give_step_rewards(pieces, tmp_path):
    """One part scores the steps of the whole response, one the steps inside the tag, one the length."""
    steps, whole = by_length(tmp_path), {"_target_": "ppo_ds.rewards.rules.RegexReward", "pattern": "d"}
    parts = {
        "steps": {"reward": steps, "weight": 0.5, "clip": 0.25},
        "inner": {"reward": steps, "weight": 10.0, "inside": "answer"},
        "whole": {"reward": whole, "weight": 2.0},
    }
    spec = {"_target_": "ppo_ds.rewards.weighted.WeightedReward", "parts": parts}
    reward = bind(spec, "reward")(tokenizer=pieces, reduce=lambda x: x)
    scores = reward(rollout_of([A, END, OPEN, B, END, D, CLOSE, EOS], [A, END, C, EOS]))
    # of the whole text: "a.", "<answer>\nb." and "d</answer>"; inside the tag: "b." and "d"
    assert scores.per_token.tolist() == [[0, 0.5, 0, 0, 10 + 1, 20, 0, 1.5], [0, 0.5, 0, 1, 0, 0, 0, 0]]
    assert scores.total.tolist() == [2.0, 0.0]
    assert {name: column.tolist() for name, column in scores.components.items()} == {
        "steps": [6, 3],
        "inner": [3, 0],
        "whole": [1, 0],
    }
    weighted = sum(parts[name]["weight"] * column for name, column in scores.components.items())
    assert torch.equal(weighted, scores.sums)


def test_a_wrong_number_of_steps_names_the_row(pieces, tmp_path):
    (tmp_path / "wrong.py").write_text("def score(prompts, responses, rows): return [[1.0]] * len(rows)")
    reward = FunctionReward(f"{tmp_path}/wrong.py:score", step_separator=r"\n", tokenizer=pieces)
    with pytest.raises(RewardError) as caught:
        reward(rollout_of([A], [A, DOT, B]))
    assert str(caught.value) == (
        f"reward.path={tmp_path}/wrong.py:score returned 1 step rewards for a response of 2 steps (row 1, "
        "prompt 'a'); the steps are the non-blank pieces between reward.step_separator='\\n'"
    )


def test_step_rewards_cannot_be_mixed_with_those_of_the_answer(pieces, tmp_path):
    spec = {"_target_": "ppo_ds.rewards.weighted.AnswerMix", "reward": by_length(tmp_path)}
    with pytest.raises(
        RewardError, match=r"^reward\.reward returned step rewards, which an AnswerMix cannot mix"
    ):
        bind(spec, "reward")(tokenizer=pieces)(rollout_of([A, END, C]))


def test_the_separator_must_not_be_empty(pieces, tmp_path):
    spec = by_length(Path(tmp_path), step_separator="")
    with pytest.raises(ValueError, match=r"^reward\.step_separator is empty"):
        bind(spec, "reward")(tokenizer=pieces)
