"""Tests rows that tasks of reasoning-gym make: their contents, reproducibility and errors."""

from __future__ import annotations

import re
import subprocess

import pytest

from ppo_ds.config.sections.data import PPODataConfig
from ppo_ds.data import reasoning_gym
from ppo_ds.data.prompts import PromptSource
from ppo_ds.data.reasoning_gym import make_rows, rows_or_error, task_rows
from ppo_ds.errors import UserError
from tests.config.commands import MINIMAL, complaints, compose
from tests.data.conftest import make_tokenizer
from tests.ppo.conftest import run_ranks

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
SUMS, DIGITS = "reasoning_gym:chain_sum", {"min_terms": 2, "max_terms": 2, "max_digits": 1, "size": 60}


def made(key="data.path", **data):
    return task_rows(PPODataConfig(**data))[key].make()


def questions(rows):
    return [row["prompt"] for row in rows]


def test_rows_have_the_question_the_answer_and_what_the_verifier_needs():
    rows = made(path=SUMS, task=DIGITS | {"seed": 3})
    assert len(rows) == 60
    for i, row in enumerate(rows):
        a, sign, b = re.search(r"(\d) ([+-]) (\d) =$", row["prompt"]).groups()
        assert int(row["answer"]) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert row["task"] == "chain_sum" and row["reasoning_gym"]["settings"] == DIGITS | {"seed": 3}
        assert row["reasoning_gym"]["entry"]["metadata"]["source_index"] == i
    # row i has the seed of the task plus i
    assert questions(made(path=SUMS, task=DIGITS | {"seed": 10}))[:53] == questions(rows)[7:]
    assert (
        questions(made(path=SUMS, task=DIGITS, max_samples=5)) == questions(made(path=SUMS, task=DIGITS))[:5]
    )


def test_held_out_rows_are_other_rows_of_the_same_task_and_no_training_questions():
    data = {"path": SUMS, "eval_path": SUMS, "task": DIGITS}
    train, held_out = made(**data), made("data.eval_path", **data)
    of_their_seed = made(path=SUMS, task=DIGITS | {"seed": 1_000_003})
    assert [row for row in of_their_seed if row["prompt"] not in questions(train)] == [
        row | {"reasoning_gym": of_their_seed[0]["reasoning_gym"] | {"entry": row["reasoning_gym"]["entry"]}}
        for row in held_out
    ]
    assert 0 < len(held_out) < 60  # there are 200 questions, and 60 of them are likely to repeat some
    longer = made("data.eval_path", **data, eval_task={"min_terms": 4, "max_terms": 4, "size": 7})
    assert len(longer) == 7 and all(len(re.findall("[+-]", text)) == 3 for text in questions(longer))
    parts = [{"path": SUMS, "task": DIGITS}, {"path": "reasoning_gym:gcd"}]
    mixed = PPODataConfig(mix=parts, eval_path=SUMS)
    assert task_rows(mixed)["data.eval_path"].make() == held_out


def test_no_held_out_rows_are_an_error():
    with pytest.raises(UserError, match=r"^data\.eval_path=.*: all questions are training questions too; "):
        made("data.eval_path", path=SUMS, eval_path=SUMS, task=DIGITS, eval_task={"seed": 0})


def test_rows_do_not_depend_on_the_hash_seed_and_prints_do_no_harm(monkeypatch, capfd):
    found = []
    for seed in ("1", "2"):  # the letters of this task come from a set
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        rows_or_error.cache_clear()
        found.append(made(path="reasoning_gym:isomorphic_strings", task={"size": 8}))
    assert found[0] == found[1]
    assert len(made(path="reasoning_gym:bf", task={"size": 2})) == 2  # prints dots
    assert capfd.readouterr().out == ""


def test_ranks_share_the_rows_that_the_first_one_makes(monkeypatch):
    rows_or_error.cache_clear()
    started, run = [], subprocess.run
    monkeypatch.setattr(reasoning_gym.subprocess, "run", lambda *a, **k: started.append(a) or run(*a, **k))

    def load(world):
        data = PPODataConfig(path=SUMS, task=DIGITS)
        source = PromptSource(SUMS, data=data, tokenizer=make_tokenizer(), max_new_tokens=9, world=world)
        return source.fingerprints, [source.row(i)[2] for i in range(len(source))]

    (prints, rows), other = run_ranks(2, load)
    assert other == (prints, rows) and len(rows) == 60 and len(started) == 1
    assert rows[0]["messages"] == [{"role": "user", "content": made(path=SUMS, task=DIGITS)[0]["prompt"]}]


def test_the_task_composite_gives_the_parts_of_each_row():
    parts = [{"name": "gcd", "weight": 3, "config": {"max_numbers": 2}}, {"name": "lcm"}]
    rows = make_rows("composite", {"datasets": parts, "size": 80, "seed": 0})
    settings = {(row["task"], str(row["reasoning_gym"]["settings"])) for row in rows}
    assert settings == {("gcd", "{'max_numbers': 2}"), ("lcm", "{}")}
    assert 45 < sum(row["task"] == "gcd" for row in rows) < 75  # 60 on average


def test_mistakes_in_a_task_are_one_line():
    with pytest.raises(UserError) as error:
        made(path="reasoning_gym:chan_sum")
    assert error.value.problems == [
        "data.path=reasoning_gym:chan_sum: reasoning-gym has no such task; did you mean chain_sum?"
    ]
    with pytest.raises(UserError) as error:
        made("data.mix[1].path", mix=[{"path": "a.jsonl"}, {"path": SUMS, "task": {"size": 0}}])
    assert error.value.problems == [
        "data.mix[1].task={seed:0,size:0}: the task chain_sum cannot make its rows: AssertionError: size "
        "must be positive"
    ]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"min_term": 2},
            ".min_term=2: the keys of chain_sum are min_terms, max_terms, min_digits, max_digits, "
            "allow_negation, seed, size; did you mean min_terms?",
        ),
        (
            {"min_digits": 3, "max_digits": 1},
            "={min_digits:3,max_digits:1}: the task chain_sum cannot make its rows: AssertionError: "
            "max_digits must be >= min_digits",
        ),
        (
            {"max_terms": 2.5},
            "={max_terms:2.5}: the task chain_sum cannot make its rows: ValueError: non-integer stop for "
            "randrange()",
        ),
    ],
)
def test_settings_that_a_task_refuses(settings, line):
    with pytest.raises(UserError) as error:
        make_rows("chain_sum", settings)
    assert error.value.problems == [f"$KEY{line}"]


OF_SUMS = f"data.path={SUMS}"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["data.task.size=5"],
            "data.task={size:5}: needs data.path=reasoning_gym:TASK (it is org/prompts); remove it",
        ),
        (
            [OF_SUMS, "data.eval_task.size=5"],
            "data.eval_task={size:5}: needs data.eval_path=reasoning_gym:TASK (it is null); remove it",
        ),
        (
            ["data.path=null", "data.mix=[{path:org/a,task:{size:5}}]"],
            "data.mix[0].task={size:5}: needs data.mix[0].path=reasoning_gym:TASK (it is org/a); remove it",
        ),
        (
            [OF_SUMS, "data.task.seed=null"],
            "data.task.seed=null: must be a whole number, so that rows can be made again",
        ),
        (
            [f"data.ptx_path={SUMS}", "algo.ptx.coef=1"],
            f"data.ptx_path={SUMS}: makes prompts, which only stage=ppo uses, in data.path or data.mix",
        ),
    ],
)
def test_settings_that_do_not_fit_the_data_are_refused(arguments, line):
    assert complaints(*MINIMAL, *arguments) == [line]


def test_other_stages_have_no_tasks():
    sft = ["+experiment=sft", "actor.model.path=org/actor", OF_SUMS, "data.eval_path=null"]
    lines = complaints(*sft)
    assert lines == [f"{OF_SUMS}: makes prompts, which only stage=ppo uses, in data.path or data.mix"]


def test_a_command_without_the_extra_names_it(monkeypatch):
    assert compose(*MINIMAL, OF_SUMS, "data.task.size=5").data.task == {"size": 5}
    monkeypatch.setitem(reasoning_gym.sys.modules, "reasoning_gym", None)
    assert complaints(*MINIMAL, OF_SUMS) == [
        f"{OF_SUMS}: the package reasoning-gym is not installed; run: pip install -c constraints.txt -e "
        "'.[reasoning-gym]'"
    ]
