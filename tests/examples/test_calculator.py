"""Tests the calculator: its answers, the demonstrations and the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_ds.errors import UserError
from ppo_ds.examples import calculator
from ppo_ds.examples.calculator import Calculator
from ppo_ds.examples.sums import IGNORED
from ppo_ds.models import tiny


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        ("?12+34", (">46=", -0.25, False)),
        ("46", ("", 1.0, True)),
        ("47", ("", 0.0, True)),
        ("?12+", ("", 0.0, True)),
        ("?12+34?", ("", 0.0, True)),
        ("?1234567890+1", ("", 0.0, True)),
        ("", ("", 0.0, True)),
    ],
)
def test_turns(answer: str, result: tuple[str, float, bool]) -> None:
    environment = Calculator(call_cost=0.25)
    environment.reset({"prompt": "12+34=", "answer": "46"})
    assert environment.step(answer) == result


def test_demonstrations_by_hand() -> None:
    """The vocabulary is <pad> <eos> <unk>, the digits from 3 on, then + 13, = 14, ? 15 and > 16."""
    tokenizer = tiny.character_tokenizer(calculator.CHARACTERS)
    ids, labels = calculator.encode([{"prompt": "1+2=", "answer": "3"}] * 2, tokenizer, [True, False])
    no = IGNORED
    assert ids.tolist() == [[4, 13, 5, 14, 15, 4, 13, 5, 1, 16, 6, 14, 6, 1], [4, 13, 5, 14, 6, 1, *[0] * 8]]
    assert labels.tolist() == [
        [no, no, no, no, 15, 4, 13, 5, 1, no, no, no, 6, 1],
        [no, no, no, no, 6, 1, *[no] * 8],
    ]
    _, rest = calculator.without_choice((ids, labels))
    assert rest[:, 4].tolist() == [no, no] and rest[:, 5].tolist() == [4, 1]


def test_the_files(tmp_path: Path) -> None:
    sizes = {"digits": 1, "problems": 81, "heldout": 10, "validation": 20, "batch_size": 51}
    model = {"hidden_size": 32, "heads": 2, "layers": 1, "target_accuracy": 0.0}
    calculator.prepare(str(tmp_path), 3, **sizes, **model)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "heldout")
    }
    assert (len(rows["train"]), len(rows["heldout"])) == (71, 10)
    everything = rows["train"] + rows["heldout"]
    assert {row["prompt"] for row in everything} == {f"{a}+{b}=" for a in range(1, 10) for b in range(1, 10)}
    assert all(eval(row["prompt"].rstrip("=")) == int(row["answer"]) for row in everything)
    assert (tmp_path / "model" / "config.json").exists()
    before = (tmp_path / "prepared.json").stat().st_mtime_ns
    calculator.prepare(str(tmp_path), 3, **sizes, **model)
    assert (tmp_path / "prepared.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("wrong", [{"problems": 800}, {"digits": 1, "problems": 82}, {"calls": 0.0}])
def test_impossible_tasks_are_refused(tmp_path: Path, wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match="^prepare: problems="):
        calculator.prepare(str(tmp_path), 3, **wrong)
