"""Tests the win rate against the reference: by hand, over ranks, and over a resume.

The stand-in policy of test_evaluation.py answers prompt n with n letters, and the score is half the length.
"""

import json

import pytest
import torch

from ppo_ds.ppo.win_rate import FILE, ReferenceResponses, win_rate
from ppo_ds.types import Rollout
from tests.ppo.test_evaluation import batch, evaluator

SETTINGS = {"reference": "org/actor", "sampling": {"top_k": 1, "stop_token_ids": (2,)}}
WIN_RATE = "eval/win_rate_vs_ref"


def answers(prompts, lengths, letter=3):
    """Answers the prompts with the given numbers of letters."""
    lengths = torch.tensor(lengths)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.cat([prompts.ids, torch.full(mask.shape, letter)], 1)
    attention = torch.cat([prompts.mask, mask], 1)
    return Rollout(
        ids, attention, mask, lengths > 0, prompts.limits, torch.zeros(mask.shape), prompts.metadata
    )


def reference(world, folder, *, initial=True, generate=None, settings=SETTINGS, earlier=None):
    return ReferenceResponses(
        file=folder / FILE,
        earlier=earlier,
        settings=settings,
        world=world,
        is_initial_actor=initial,
        generate=generate,
    )


def later(found, lengths):
    """Makes the policy of an evaluator that of a later step, which answers with these lengths."""
    found.actor.steps = 3
    remaining = list(lengths)

    def generator(prompts, sampling):
        return answers(prompts, [remaining.pop(0) for _ in range(len(prompts))])

    found.generator = generator
    return found


def test_by_hand():
    rows = [
        {"response": "long", "score": 2.0},
        {"response": "short", "score": 1.0},
        {"response": "other", "score": 1.5},
        {"response": "same", "score": 1.0},
    ]
    others = [
        {"response": "a", "score": 1.0},  # a win
        {"response": "b", "score": 3.0},  # a loss
        {"response": "c", "score": 1.5},  # a tie by score
        {"response": "same", "score": 1.0 - 1e-7},  # a tie: the response is the same
    ]
    assert win_rate(rows, others) == (1 + 0 + 0.5 + 0.5) / 4


@pytest.fixture
def make(world, tokenizer, tmp_path):
    def make(**options):
        batches = [batch(1, 2, weights=[1, 1]), batch(5, 9, weights=[1, 0])]
        return evaluator(world, batches, tokenizer, reference=reference(world, tmp_path, **options))

    return make


def test_the_first_evaluation_of_the_initial_policy_is_the_references(make):
    found = make()
    first = found()
    assert first.metrics[WIN_RATE] == 0.5
    evaluation = later(found, [3, 1, 5, 9])()  # against 1, 2 and 5 letters: win, loss, tie
    assert evaluation.metrics[WIN_RATE] == 0.5
    assert [(row["ref_response"], row["ref_score"]) for row in evaluation.rows] == [
        ("a", 0.5),
        ("aa", 1.0),
        ("aaaaa", 2.5),
    ]
    assert later(found, [3, 3, 5, 9])().metrics[WIN_RATE] == pytest.approx(2.5 / 3)


def test_a_resumed_run_compares_with_the_same_responses(make, caplog):
    make()()
    resumed = later(make(), [3, 3, 5, 9])
    assert resumed().metrics[WIN_RATE] == pytest.approx(2.5 / 3)
    assert not caplog.records


def test_a_run_in_another_directory_takes_the_responses_of_the_earlier_run(make, tmp_path, world):
    make()()
    (tmp_path / "other").mkdir()
    found = reference(world, tmp_path / "other", earlier=tmp_path / FILE)
    rows = json.loads((tmp_path / FILE).read_text())["rows"]
    assert found.find([row["prompt"] for row in rows]) == rows
    (tmp_path / FILE).unlink()  # the next start in the directory does not need it
    found = reference(world, tmp_path / "other", earlier=tmp_path / FILE)
    assert found.find([row["prompt"] for row in rows]) == rows


@pytest.mark.parametrize("damage", ["settings", "prompts", "no file", "not json", "other json"])
def test_responses_to_something_else_are_not_compared(make, tmp_path, caplog, damage):
    make()()
    resumed, file = later(make(), [3, 3, 5, 9] * 2), tmp_path / FILE
    content = json.loads(file.read_text())
    if damage == "settings":
        content["settings"]["sampling"]["top_k"] = 0
    elif damage == "prompts":
        content["rows"][0]["prompt"] = "another"
    file.write_text({"not json": "{", "other json": "[1]"}.get(damage, json.dumps(content)))
    if damage == "no file":
        file.unlink()
    assert WIN_RATE not in resumed().metrics and WIN_RATE not in resumed().metrics
    (record,) = caplog.records  # once
    assert "eval/win_rate_vs_ref is not measured" in record.getMessage()


def test_a_reference_with_other_weights_responds_once(make):
    asked = []

    def generate(batches):
        asked.append([len(prompts) for prompts in batches])
        return [answers(batches[0], [4, 4], letter=4), answers(batches[1], [4, 4], letter=4)]

    found = make(initial=False, generate=generate)
    assert found().metrics[WIN_RATE] == pytest.approx(1 / 3)  # 1, 2 and 5 letters against 4
    assert later(found, [5, 5, 5, 9])().metrics[WIN_RATE] == 1.0
    resumed = later(make(initial=False, generate=generate), [4, 9, 3, 9])  # a tie by score, a win, a loss
    assert resumed().metrics[WIN_RATE] == 0.5
    assert asked == [[2, 2]]
    # with other settings the loaded reference responds again
    other = later(make(initial=True, generate=generate, settings={"reference": "other"}), [5, 5, 5, 9])
    assert other().metrics[WIN_RATE] == 1.0 and len(asked) == 2


def test_all_ranks_measure_the_same(on_ranks, tokenizer, tmp_path):
    shares = [[batch(1, 4, weights=[1, 1])], [batch(3, 3, weights=[1, 0])]]

    def run(world):
        found = evaluator(world, shares[world.rank], tokenizer, reference=reference(world, tmp_path))
        first = found().metrics[WIN_RATE]
        return first, later(found, [[2, 4], [2, 2]][world.rank])().metrics[WIN_RATE]

    assert on_ranks(2, run) == [(0.5, (1 + 0.5 + 0) / 3)] * 2
    assert [row["prompt"] for row in json.loads((tmp_path / FILE).read_text())["rows"]] == ["p1", "p4", "p3"]
