"""Tests the comparison of models: responses, scores, and the same result on any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ppo_ds.config.schema import Config
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.models.policy import load_policy
from ppo_ds.tools.evaluate import Comparison, evaluate
from ppo_ds.tools.model_argument import NamedModel
from tests.config.commands import compose

PROMPTS = ["a", "bca", "ab", "cc", "ba"]
LIMIT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates prompts and two models whose greedy responses differ."""
    folder = tmp_path_factory.mktemp("evaluate")
    tokenizer = tiny.character_tokenizer("abc")
    for seed, name in enumerate(("base", "tuned")):
        torch.manual_seed(seed)
        model = tiny.tiny_llama(tokenizer, hidden_size=16, layers=1, heads=2, max_tokens=32)
        with torch.no_grad():
            model.lm_head.weight.mul_(30.0)  # far from ties
        tiny.save(model, tokenizer, folder / name)
    rows = [{"prompt": prompt, "likes": "abc"[i % 3]} for i, prompt in enumerate(PROMPTS)]
    (folder / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "score.py").write_text(
        "def score(prompts, responses, rows):\n"
        "    return [float(response.count(row['likes'])) for response, row in zip(responses, rows)]\n"
    )
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    return compose(
        f"actor.model.path={folder}/tuned", "actor.model.dtype=fp32", f"data.path={folder}/held.jsonl",
        f"data.eval_path={folder}/held.jsonl", "reward=function", f"reward.path={folder}/score.py:score",
        "rollout.prompts_per_step=2", f"sampling.max_new_tokens={LIMIT}", "run.steps=1",
        "sampling.temperature=3",
        *overrides,
    )  # fmt: skip


def compared(folder: Path, config: Config, world, **options: Any) -> Comparison:
    rewards = {
        "reward": config.reward,
        "judge": {"_target_": "ppo_ds.rewards.rules.LengthReward", "longest": 2},
    }
    models = [named(name, folder / name, str(config.actor.model.path)) for name in ("base", "tuned")]
    return evaluate(config, world, models, rewards, **options)


def named(name: str, path: Path, tokenizer: str) -> NamedModel:
    return NamedModel(name, str(path), f"evaluation.models.{name}", tokenizer)


def by_hand(path: Path, prompt: str) -> tuple[str, int]:
    """Returns the greedy response as text, and its number of tokens, with one plain forward per token."""
    tokenizer = tiny.character_tokenizer("abc")
    model = AutoModelForCausalLM.from_pretrained(path)
    ids = tokenizer.encode_many([prompt], special_tokens=True)[0]
    made: list[int] = []
    while len(made) < LIMIT and (not made or made[-1] != tokenizer.stop_ids[0]):
        with torch.no_grad():
            made.append(int(model(torch.tensor([ids + made])).logits[0, -1].argmax()))
    return tokenizer.decode(made), len(made)


def test_responses_and_scores_are_those_computed_by_hand(folder: Path, world) -> None:
    found = compared(folder, config_of(folder), world)
    assert [row["prompt"] for row in found.rows] == PROMPTS
    different = 0
    for i, row in enumerate(found.rows):
        for name in ("base", "tuned"):
            text, tokens = by_hand(folder / name, PROMPTS[i])
            response = row["responses"][name]
            assert (response["response"], response["tokens"]) == (text, tokens)
            assert response["scores"]["reward"] == text.count("abc"[i % 3])
        different += row["responses"]["base"]["response"] != row["responses"]["tuned"]["response"]
    assert different >= 3
    scores = [row["responses"]["tuned"]["scores"]["reward"] for row in found.rows]
    mean = found.summary["rewards"]["reward"]["score"]["tuned"]["mean"]
    assert mean == pytest.approx(sum(scores) / len(PROMPTS)) and found.summary["prompts"] == len(PROMPTS)
    assert set(found.summary["rewards"]["judge"]["win_rate"]) == {"tuned"}


def test_the_number_of_ranks_and_the_backend_do_not_change_the_result(
    folder: Path, world, on_ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The ranks are threads. transformers replaces PreTrainedModel.tie_weights while it loads a model; two
    # threads that load at once could leave it without effect in all later tests of the process.
    lock = Lock()

    def load_alone(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return load_policy(*args, **kwargs)

    monkeypatch.setattr("ppo_ds.tools.responses.load_policy", load_alone)
    config = config_of(folder)  # not in a thread, since Hydra has one process-wide state
    alone = compared(folder, config, world)
    for found in on_ranks(2, lambda rank: compared(folder, config, rank)):
        assert (found.summary, found.rows) == (alone.summary, alone.rows)
    assert compared(folder, config_of(folder, "rollout.backend=hf"), world).rows == alone.rows
    assert compared(folder, config_of(folder, "eval.max_prompts=3"), world).rows == alone.rows[:3]


def test_a_model_with_another_vocabulary_is_refused(folder: Path, world, tmp_path: Path) -> None:
    tokenizer = tiny.character_tokenizer("a")
    tiny.save(
        tiny.tiny_llama(tokenizer, hidden_size=8, layers=1, heads=2, max_tokens=32), tokenizer, tmp_path / "x"
    )
    config = config_of(folder)
    with pytest.raises(UserError, match="^evaluation.models.other=.*the actor's tokenizer has ids up to 5"):
        evaluate(
            config, world, [named("other", tmp_path / "x", str(folder / "tuned"))], {"reward": config.reward}
        )
