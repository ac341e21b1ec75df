"""Tests the quickstart's task with smaller models and targets: data, tokenizer, warm start and reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ppo_ds.errors import UserError
from ppo_ds.examples import sums
from ppo_ds.models import tiny
from ppo_ds.models.tokenizer import load_tokenizer

SIZES = {"max_operand": 9, "heldout": 20, "validation": 20, "hidden_size": 32, "heads": 2}
SMALL = SIZES | {"target_accuracy": 0.2, "learning_rate": 1e-2, "batch_size": 60}


def _rows(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sums")
    sums.prepare(str(folder), 3, **SMALL)
    return folder


def test_every_sum_is_in_exactly_one_file_and_correct(folder: Path) -> None:
    train, heldout = _rows(folder / "train.jsonl"), _rows(folder / "heldout.jsonl")
    assert (len(train), len(heldout)) == (80, 20)
    assert {row["prompt"] for row in train + heldout} == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    assert all(eval(row["prompt"].rstrip("=")) == int(row["answer"]) for row in train + heldout)


def test_the_warm_start_trains_on_neither_heldout_nor_validation_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[str]] = {}
    tokenizer = tiny.character_tokenizer(sums.CHARACTERS)

    def spy(
        model: torch.nn.Module, demonstrations: tuple, validation: tuple, **settings: float
    ) -> tuple[int, float]:
        seen["demonstrations"] = [tokenizer.decode(ids) for ids in demonstrations[0].tolist()]
        seen["validation"] = [tokenizer.decode(ids) for ids in validation[0].tolist()]
        return 1, 0.5

    monkeypatch.setattr(sums, "warm_start", spy)
    sums.prepare(str(tmp_path), 3, **SMALL)
    heldout = {row["prompt"] + row["answer"] for row in _rows(tmp_path / "heldout.jsonl")}
    train = {row["prompt"] + row["answer"] for row in _rows(tmp_path / "train.jsonl")}
    demonstrations, validation = set(seen["demonstrations"]), set(seen["validation"])
    assert (len(demonstrations), len(validation), len(heldout)) == (60, 20, 20)
    assert (
        demonstrations | validation == train and not (demonstrations & validation) and not (train & heldout)
    )


def test_the_seed_decides_the_split() -> None:
    first, again, other = sums.problems(9, seed=0), sums.problems(9, seed=0), sums.problems(9, seed=1)
    assert first == again
    assert first != other and sorted(map(str, first)) == sorted(map(str, other))


def test_transformers_loads_the_folder(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    ids = tokenizer("12+34=")["input_ids"]
    assert len(ids) == 6 and tokenizer.decode(ids) == "12+34="
    assert len(tokenizer) == model.config.vocab_size == 15
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer("x\n")["input_ids"] == [tokenizer.unk_token_id] * 2


def test_the_saved_model_has_the_reported_accuracy(folder: Path) -> None:
    """The test decodes to measure, unlike the warm start; train.jsonl begins with the validation rows."""
    tokenizer = load_tokenizer(str(folder / "model"))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    prepared = json.loads((folder / "prepared.json").read_text())
    scores = []
    for row in _rows(folder / "train.jsonl")[:20]:
        ids = torch.tensor([tokenizer.encode_many([row["prompt"]], special_tokens=True)[0]])
        response = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=4
        )[0, ids.shape[1] :]
        scores += sums.reward([row["prompt"]], [tokenizer.decode(response.tolist())], [row])
    assert sum(scores) / 20 == pytest.approx(prepared["validation_accuracy"])
    assert prepared["validation_accuracy"] >= SMALL["target_accuracy"]


def test_the_same_arguments_give_the_same_model_and_leave_the_random_state(
    folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    sums.prepare(str(tmp_path), 3, **SMALL)
    assert torch.equal(torch.rand(1), expected)
    weights = "model/model.safetensors"
    assert (tmp_path / weights).read_bytes() == (folder / weights).read_bytes()


def test_a_complete_folder_is_kept_and_any_other_is_replaced(tmp_path: Path) -> None:
    sums.prepare(str(tmp_path), 3, **SMALL)
    train = tmp_path / "train.jsonl"
    train.write_text("kept\n")
    sums.prepare(str(tmp_path), 3, **SMALL)
    assert train.read_text() == "kept\n"
    sums.prepare(str(tmp_path), 4, **SMALL)
    assert len(_rows(train)) == 80
    train.write_text("stopped half-way\n")
    (tmp_path / "prepared.json").unlink()
    sums.prepare(str(tmp_path), 4, **SMALL)
    assert len(_rows(train)) == 80


def test_a_failed_attempt_leaves_no_folder_that_looks_complete(tmp_path: Path) -> None:
    sums.prepare(str(tmp_path), 3, **SMALL)
    with pytest.raises(UserError):
        sums.prepare(str(tmp_path), 4, **(SMALL | {"target_accuracy": 1.0, "max_steps": 5}))
    sums.prepare(str(tmp_path), 3, **SMALL)
    assert [row["prompt"] for row in _rows(tmp_path / "heldout.jsonl")] == [
        row["prompt"] for row in sums.problems(9, seed=3)[:20]
    ]


def test_encode_puts_the_loss_on_the_answer_and_its_end_only() -> None:
    tokenizer = tiny.character_tokenizer(sums.CHARACTERS)
    ids, labels = sums.encode(
        [{"prompt": "1+2=", "answer": "3"}, {"prompt": "10+2=", "answer": "12"}], tokenizer
    )
    # ids: pad 0, end 1, unknown 2, digit d 3 + d, "+" 13, "=" 14
    assert ids.tolist() == [[4, 13, 5, 14, 6, 1, 0, 0], [4, 3, 13, 5, 14, 4, 5, 1]]
    assert labels.tolist() == [
        [-100, -100, -100, -100, 6, 1, -100, -100],
        [-100, -100, -100, -100, -100, 4, 5, 1],
    ]


def test_reward_is_one_for_the_correct_text_only() -> None:
    responses = ["46", " 46 ", "46+", "4", "", "046"]
    assert sums.reward(["12+34="] * 6, responses, [{"prompt": "12+34=", "answer": "46"}] * 6) == [
        1.0,
        1.0,
        0.0,
        0.0,
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_operand": 5}, "prepare.max_operand=5: all 36 sums are held out; raise it"),
        ({"hidden_size": 30, "heads": 4}, "prepare.hidden_size=30: must be a multiple of 8"),
        (
            {"validation": 0, "layers": -1},
            "prepare.validation=0: must be above 0\nprepare.layers=-1: must be above 0",
        ),
        ({"target_accuracy": 1.0, "max_steps": 5}, "prepare.target_accuracy=1.0: not reached in 5"),
    ],
)
def test_invalid_arguments_are_user_errors(tmp_path: Path, changed: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        sums.prepare(str(tmp_path), 0, **(SMALL | changed))
    assert not (tmp_path / "prepared.json").exists()


STAGES = {"min_operand": 0, "max_operand": 9, "heldout": 20, "hidden_size": 32, "heads": 2}
PAIRS = STAGES | {"pairs": 95, "heldout_pairs": 30, "wrong_labels": 0.1}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    sums.prepare_stages(str(folder), 3, **PAIRS)
    return folder


def test_stages_share_no_problem_with_the_held_out_ones(stages: Path) -> None:
    train, heldout = ({row["prompt"] for row in _rows(stages / f"{n}.jsonl")} for n in ("train", "heldout"))
    assert (len(train), len(heldout)) == (80, 20) and not train & heldout
    for name, problems in (("pairs", train), ("heldout_pairs", heldout)):
        assert {pair["prompt"] for pair in _rows(stages / f"{name}.jsonl")} == problems


def test_the_given_share_of_pairs_has_the_wrong_label(stages: Path) -> None:
    for name, wrong in (("pairs", 10), ("heldout_pairs", 3)):  # round(9.5) is 10
        pairs = _rows(stages / f"{name}.jsonl")
        for pair in pairs:
            right = {side: _is_right(pair["prompt"] + pair[side]) for side in ("chosen", "rejected")}
            expected = pair["subset"] == "right_label"
            assert right == {"chosen": expected, "rejected": not expected}
        assert sum(pair["subset"] == "wrong_label" for pair in pairs) == wrong


def _is_right(text: str) -> bool:
    problem, _, answer = text.partition("=")
    return str(sum(map(int, problem.split("+")))) == answer


def test_two_digit_sums_have_two_digit_operands(tmp_path: Path) -> None:
    sums.prepare_stages(str(tmp_path), 0, **(PAIRS | {"min_operand": 10, "max_operand": 19}))
    rows = _rows(tmp_path / "train.jsonl") + _rows(tmp_path / "heldout.jsonl")
    assert {row["prompt"] for row in rows} == {f"{a}+{b}=" for a in range(10, 20) for b in range(10, 20)}


def test_stages_start_from_the_same_untrained_model_again(stages: Path, tmp_path: Path) -> None:
    sums.prepare_stages(str(tmp_path), 3, **PAIRS)
    files = ("model/model.safetensors", "pairs.jsonl", "train.jsonl")
    assert all((tmp_path / file).read_bytes() == (stages / file).read_bytes() for file in files)
    (tmp_path / "pairs.jsonl").write_text("kept\n")
    sums.prepare_stages(str(tmp_path), 3, **PAIRS)
    assert (tmp_path / "pairs.jsonl").read_text() == "kept\n"
    sums.prepare_stages(str(tmp_path), 4, **PAIRS)
    assert len(_rows(tmp_path / "pairs.jsonl")) == 95


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"wrong_labels": 0.5}, "prepare.wrong_labels=0.5: must be at least 0 and below 0.5"),
        ({"min_operand": 10}, "prepare.min_operand=10: must be from 0 to max_operand=9"),
        ({"heldout": 100}, "prepare.max_operand=9: all 100 sums are held out; raise it"),
        ({"pairs": 0}, "prepare.pairs=0: must be above 0"),
        ({"min_operand": -1}, "prepare.min_operand=-1: must be from 0 to max_operand=9"),
    ],
)
def test_invalid_arguments_of_stages_are_user_errors(
    tmp_path: Path, changed: dict[str, float], said: str
) -> None:
    with pytest.raises(UserError, match=said):
        sums.prepare_stages(str(tmp_path), 0, **(PAIRS | changed))
    assert not (tmp_path / "prepared.json").exists()
