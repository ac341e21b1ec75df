"""Tests the call of reward functions with trial responses before models are loaded."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from ppo_ds.assemble.data import Inputs, read_inputs
from ppo_ds.assemble.preflight import try_functions
from ppo_ds.config.schema import Config, all_rewards
from ppo_ds.errors import UserError
from ppo_ds.models.tiny import character_tokenizer
from tests.config.commands import compose
from tests.support.environment import ROOT, environment

ROWS = [{"prompt": "ab", "likes": "x"}, {"prompt": "cd", "likes": "y"}]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRIAL = "in a call before the start with the trial responses 'This is a trial response.' and ''"


class Trial:
    """A run with a tiny tokenizer, no weights and the reward function in mine.py."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / "mine.py"
        self.template: str | None = None
        LlamaConfig(vocab_size=40).save_pretrained(folder / "actor")

    def prepare(self, body: str, *arguments: str, rows: list[dict[str, Any]] = ROWS) -> tuple[Config, Inputs]:
        tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz<>")
        tokenizer.hf.chat_template = self.template
        tokenizer.save(self.folder / "actor")
        self.file.write_text(body)
        (self.folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        chosen = [] if any(one.startswith("reward=") for one in arguments) else ["reward=function"]
        config = compose(
            f"actor.model.path={self.folder}/actor",
            f"data.path={self.folder}/x.jsonl",
            *[*chosen, f"reward.path={self.file}:score"][: 2 * len(chosen)],
            "rollout.prompts_per_step=2",
            "sampling.max_new_tokens=4",
            "run.steps=1",
            *arguments,
        )
        return config, read_inputs(config, SimpleNamespace(rank=0, size=1))

    def run(self, body: str, *arguments: str, rows: list[dict[str, Any]] = ROWS) -> str | None:
        """Returns the error line, with paths relative to the folder, or None."""
        config, inputs = self.prepare(body, *arguments, rows=rows)
        try:
            try_functions(all_rewards(config), inputs)
        except UserError as error:
            assert len(error.problems) == 1 and "\n" not in error.problems[0]
            return error.problems[0].replace(f"{self.folder}/", "")
        return None

    def seen(self) -> list[Any]:
        """Returns what the function has written to seen.jsonl."""
        file = self.folder / "seen.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    return Trial(tmp_path)


WRITES = """
import json
from pathlib import Path

def score(prompts, responses, rows):
    with Path(__file__).with_name("seen.jsonl").open("a") as file:
        file.write(json.dumps([prompts, responses, rows]) + "\\n")
    return [0.5] * len(prompts)
"""


def test_the_function_gets_a_real_prompt_and_trial_responses(trial: Trial) -> None:
    assert trial.run(WRITES) is None
    row = {"prompt": "ab", "likes": "x", "prompt_text": "ab", "data_source": f"{trial.folder}/x.jsonl"}
    assert trial.seen() == [[["ab", "ab"], ["This is a trial response.", ""], [row, row]]]


def test_a_chat_reaches_the_function_as_the_rendered_text_and_as_messages(trial: Trial) -> None:
    """docs/rewards.md describes this."""
    trial.template = TEMPLATE
    messages = [{"role": "user", "content": "a"}]
    rows: list[dict[str, Any]] = [{"messages": messages, "n": 1}, {"messages": messages, "n": 2}]
    assert trial.run(WRITES, "data.system=b", rows=rows) is None
    ((prompts, _, (row, _)),) = trial.seen()
    assert prompts == ["<system>b<user>a<assistant>"] * 2
    assert row == {
        "n": 1,
        "data_source": f"{trial.folder}/x.jsonl",
        "prompt_text": "<system>b<user>a<assistant>",
        "messages": [{"role": "system", "content": "b"}, *messages],
    }


def test_a_text_prompt_of_a_chat_model_is_a_users_message(trial: Trial) -> None:
    trial.template = TEMPLATE
    assert trial.run(WRITES) is None
    ((prompts, _, (row, _)),) = trial.seen()
    assert prompts[0] == row["prompt_text"] == "<user>ab<assistant>" and row["prompt"] == "ab"
    assert row["messages"] == [{"role": "user", "content": "ab"}]


def test_each_data_set_of_a_run_has_a_row_in_the_call(trial: Trial) -> None:
    (trial.folder / "held.jsonl").write_text('{"prompt": "zz"}\n')
    line = trial.run(
        "def score(p, r, rows):\n    return [len(row['likes']) for row in rows]",
        f"data.eval_path={trial.folder}/held.jsonl",
    )
    assert line is not None and "KeyError: 'likes' at mine.py:2" in line


@pytest.mark.parametrize("pool", ["none", "thread", "process"])
@pytest.mark.parametrize("kind", ["def", "async def"])
def test_an_exception_is_one_line_with_its_place(pool: str, kind: str, trial: Trial) -> None:
    body = f"""
import re

{kind} score(prompts, responses, rows):
    return [pick(row) for row in rows]

def pick(row):
    return float(row["like"] in row["prompt"])
"""
    line = trial.run(body, *([] if pool == "none" else [f"reward.pool={pool}"]))
    assert line == (
        f"reward.path=mine.py:score raised KeyError: 'like' at mine.py:8, {TRIAL} (keys of a row: "
        "data_source, prompt, likes, prompt_text); correct the function, or skip this call with "
        "reward.trial=false"
    )


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return [1.0]", "returned 1 scores for 2 responses"),
        ("return 1.0", "returned '1.0' (float); it must return a list of 2 floats"),
        ("pass", "returned 'None' (NoneType); it must return a list of 2 floats"),
        ("return [float(r == 'x') or None for r in responses]", "returned 'None' (NoneType) for row 0"),
        ("return [[0.0], 1.0]", "returned '1.0' (float) for row 1, prompt 'ab', but a list for row 0"),
        ("return [r.split()[0] == 'x' for r in responses]", "raised IndexError: list index out of range at"),
        ("return re.match('y', responses[0]).group()", "raised AttributeError: 'NoneType' object has no"),
        ("raise SystemExit(3)", "raised SystemExit: 3 at mine.py:4"),
        ("raise ValueError('two\\nlines')", "raised ValueError: two lines at mine.py:4"),
    ],
)
def test_whatever_would_end_a_run_later_is_an_error(body: str, problem: str, trial: Trial) -> None:
    line = trial.run(f"import re\n\ndef score(prompts, responses, rows):\n    {body}\n")
    assert line is not None and line.startswith(f"reward.path=mine.py:score {problem}")
    assert "mine.py:3" in line or "mine.py:4" in line
    assert line.endswith("correct the function, or skip this call with reward.trial=false")


@pytest.mark.parametrize(
    ("steps", "problem"),
    [("[0.5] if text else []", None), ("[0.5]", "returned 1 step rewards for a response of 0 steps (row 1,")],
)
def test_step_rewards_are_tried_too(steps: str, problem: str | None, trial: Trial) -> None:
    line = trial.run(f"def score(p, r, rows):\n    return [{steps} for text in r]")
    assert (line is None) is (problem is None)
    assert problem is None or problem in str(line)


def test_the_functions_of_a_mixture_and_of_evaluations(trial: Trial) -> None:
    (trial.folder / "other.py").write_text("def fine(p, r, rows): return [1.0] * len(p)\n")
    part = "reward.parts.{}.reward"
    mixture = ["reward=weighted"]
    for name, function in (("a", f"{trial.folder}/other.py:fine"), ("b", f"{trial.file}:score")):
        key = part.format(name)
        mixture += [f"reward@{key}=function", f"{key}.path={function}"]
    bad = "def score(p, r, rows): return [len(row['nothing']) for row in rows]"
    line = trial.run(bad, *mixture)
    assert line is not None
    assert line.startswith("reward.parts.b.reward.path=mine.py:score raised KeyError: 'nothing' at mine.py:1")
    assert line.endswith("reward.parts.b.reward.trial=false")
    assert trial.run(bad, *mixture, "reward.parts.b.reward.trial=false") is None


def test_the_call_can_be_switched_off(trial: Trial) -> None:
    assert trial.run(WRITES, "reward.trial=false") is None and trial.seen() == []


def test_services_are_not_called(trial: Trial) -> None:
    """No server listens at this address."""
    assert trial.run("", "reward=remote", "reward.url=http://127.0.0.1:9/score") is None


def test_the_random_states_do_not_change(trial: Trial) -> None:
    config, inputs = trial.prepare(
        "import random, numpy, torch\n"
        "def score(p, r, rows):\n"
        "    random.random(), numpy.random.rand(), torch.rand(1)\n"
        "    return [1.0] * len(p)\n"
    )

    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(1))

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    try_functions(all_rewards(config), inputs)
    assert draw() == expected


def test_the_processes_of_a_pool_are_ended(trial: Trial) -> None:
    body = WRITES.replace("[prompts, responses, rows]", "__import__('os').getpid()")
    assert trial.run(body, "reward.pool=process", "reward.workers=1") is None
    pids = set(trial.seen())
    assert len(pids) == 1 and pids != {os.getpid()}
    with pytest.raises(ProcessLookupError):
        os.kill(pids.pop(), 0)


def test_a_run_ends_before_it_loads_a_model(trial: Trial) -> None:
    """The actor's folder has no weights, which only loading it would report."""
    config, _ = trial.prepare("def score(p, r, rows): return [row['nothing'] for row in rows]")
    arguments = [
        f"actor.model.path={config.actor.model.path}",
        f"data.path={config.data.path}",
        "reward=function",
        f"reward.path={config.reward['path']}",
        "rollout.prompts_per_step=2",
        "sampling.max_new_tokens=4",
        "run.steps=1",
        "actor.model.dtype=fp32",
        f"run.dir={trial.folder}/run",
    ]
    done = subprocess.run(
        [sys.executable, ROOT / "launch/train.py", *arguments],
        cwd=trial.folder,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    place = f"at {trial.file}:1, {TRIAL}"
    assert line.startswith(f"error: reward.path={trial.file}:score raised KeyError: 'nothing' {place}")
