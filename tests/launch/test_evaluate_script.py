"""Tests the command line of launch/evaluate.py, and its results on one and two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from launch.evaluate import create_folder, main, parse
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from tests.config.commands import compose
from tests.support.ranks import RankServer

REWARD = ("reward=function", "reward.path=pkg.mod:score")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Creates two run directories with a model, and a file of prompts."""
    monkeypatch.chdir(tmp_path)
    for name in ("base", "tuned"):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text("{}")
    (tmp_path / "held.jsonl").write_text('{"prompt": "a"}\n')
    return ["base", "tuned"]


def errors(*arguments: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        parse(list(arguments))
    return caught.value.problems


def test_models_and_settings_in_any_order(models: list[str]) -> None:
    found = parse(["data.path=held.jsonl", "base", *REWARD, "tuned", "--samples", "4", "eval.max_prompts=3"])
    assert [model.name for model in found.models] == models
    assert (found.samples, found.config.eval.max_prompts, found.out) == (4, 3, Path("outputs/evaluation"))
    assert found.config.sampling.max_new_tokens == 512 and list(found.rewards) == ["reward"]
    found = parse(
        [*models, "data.eval_path=held.jsonl", *REWARD, "--out", "here", "sampling.max_new_tokens=9"]
    )
    assert (found.samples, found.config.sampling.max_new_tokens, found.out) == (None, 9, Path("here"))
    assert parse([*models, "data.path=held.jsonl", *REWARD, "eval.greedy=false"]).samples == 1


def test_an_experiment_chooses_data_and_limits_that_the_command_line_overrides(models: list[str]) -> None:
    found = parse([*models, "+experiment=rlhf", "data.path=held.jsonl", *REWARD])
    assert found.config.sampling.max_new_tokens == compose("+experiment=rlhf").sampling.max_new_tokens != 512
    assert (found.config.data.path, found.config.data.eval_path) == ("held.jsonl", None)


def test_several_rewards_or_only_a_judge(models: list[str]) -> None:
    more = ("+reward@eval.rewards.short=length", "eval.rewards.short.longest=3")
    found = parse([*models, "data.path=held.jsonl", *REWARD, *more])
    assert list(found.rewards) == ["reward", "short"] and found.rewards["short"]["longest"] == 3
    found = parse([*models, "data.path=held.jsonl", "--judge", "judge.py:prefer"])
    assert (found.rewards, found.judge) == ({}, "judge.py:prefer")


def test_mistakes_are_one_line_each(models: list[str], tmp_path: Path) -> None:
    data = "data.path=held.jsonl"
    assert errors(data, *REWARD)[0].startswith("MODEL is missing: give one or more models to compare")
    assert errors("./gone", data, *REWARD)[0].startswith("./gone: no such folder; give a run directory")
    assert errors(*models, *REWARD)[0].startswith("data.path is missing")
    assert errors(*models, data)[0].startswith("reward is missing")
    assert errors(*models, data, *REWARD, "--samples", "0") == ["--samples=0: must be at least 1"]
    assert errors(*models, data, *REWARD, "stage=sft")[0].startswith(
        "stage=sft: an evaluation needs stage=ppo"
    )
    assert errors(*models, *REWARD, "data=held.jsonl")[0].startswith("data=held.jsonl: must be")
    gone = "+reward@eval.rewards.short=length"
    assert errors(*models, *REWARD, gone, "data.path=/nowhere/x") == ["data.path=/nowhere/x: no such file"]
    assert errors(*models, *REWARD, "data.eval_path=/nowhere/x") == [
        "data.eval_path=/nowhere/x: no such file"
    ]
    assert errors(*models, data, *REWARD, "samplng.top_p=1")[0].startswith("samplng.top_p=1: ")
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    trusted = ["base", "lora", data, *REWARD, "actor.model.trust_remote_code=true"]
    [line] = errors(*trusted)
    assert line.startswith("actor.model.trust_remote_code=true: does not hold for the base model that")
    assert parse([*trusted, "actor.model.path=org/base"]).models[1].path == "org/base"
    assert errors(*models, data, *REWARD, "--names", "a,a") == [
        "--names=a,a: must be 2 different names, one per model"
    ]
    named = parse([*models, data, *REWARD, "--names", "a,b"]).models
    assert [model.name for model in named] == ["a", "b"]


def test_options_that_would_be_lost_are_refused(models: list[str], tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("")
    for out in ("judge.py", "judge.py/deeper", "/proc/here"):
        with pytest.raises(UserError, match=f"^--out={out}: cannot be written .*; give another folder"):
            create_folder(Path(out))
    [line] = errors("base", "data.path=held.jsonl", *REWARD, "--out", "judge.py")
    assert line == "--out=judge.py: is a file; give a folder for the results"
    [line] = errors("base", "data.path=held.jsonl", "--judge", "judge.py:f")
    assert line == "--judge=judge.py:f: compares two models; give another MODEL, or remove --judge"
    [line] = errors("base", "data.path=held.jsonl", *REWARD, "actor.model.path=tuned/model")
    assert line.startswith("actor.model.path=tuned/model: is not evaluated, since it only names the base")
    assert parse(["base", "data.path=held.jsonl", *REWARD, "actor.model.path=base/model"]).models
    assert parse(["base", "+experiment=quickstart", "data.path=held.jsonl", *REWARD]).models


def test_help_names_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"])
    assert not end.value.code
    text = capsys.readouterr().out
    assert all(option in text for option in ("--samples", "--judge", "--out", "--names", "MODEL"))


def start() -> int:
    """Runs the program in a rank of the server."""
    return main(sys.argv[1:])


@pytest.mark.slow
def test_the_results_do_not_depend_on_the_number_of_ranks(tmp_path: Path, rank_server: RankServer) -> None:
    """Compares sampled responses, scores, verdicts and the KL, and the exit code of a wrong judge."""
    tokenizer = tiny.character_tokenizer("abc")
    for seed, name in enumerate(("base", "tuned")):
        torch.manual_seed(seed)
        model = tiny.tiny_llama(tokenizer, hidden_size=16, layers=1, heads=2, max_tokens=32)
        tiny.save(model, tokenizer, tmp_path / name / "model")
    rows = [{"prompt": "abc"[: 1 + i % 3], "likes": "abc"[i % 3]} for i in range(21)]
    (tmp_path / "held.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "score.py").write_text(
        "def score(prompts, responses, rows):\n"
        "    return [float(row['likes'] in text) for text, row in zip(responses, rows)]\n\n"
        "def longer(prompts, responses_a, responses_b, rows):\n"
        "    return [float(len(a) > len(b)) for a, b in zip(responses_a, responses_b)]\n\n"
        "def wrong(prompts, responses_a, responses_b, rows):\n"
        "    return [7] * len(prompts)\n"
    )
    arguments = [
        *(str(tmp_path / name) for name in ("base", "tuned")), f"data.path={tmp_path}/held.jsonl",
        "reward=function", f"reward.path={tmp_path}/score.py:score", "--samples", "3", "run.threads=1",
        "sampling.max_new_tokens=4", "actor.model.dtype=fp32",
    ]  # fmt: skip
    target, judge = "tests.launch.test_evaluate_script:start", ["--judge", f"{tmp_path}/score.py:longer"]
    for ranks in (1, 2):
        rank_server.check(target, ranks, *arguments, *judge, "--out", str(tmp_path / f"out{ranks}"))
    one, two = (tmp_path / f"out{ranks}" for ranks in (1, 2))
    assert (one / "evaluation.jsonl").read_text() == (two / "evaluation.jsonl").read_text()
    results = [json.loads((folder / "evaluation.json").read_text()) for folder in (one, two)]
    speeds = [result.pop("tokens_per_second") for result in results]
    assert results[0] == results[1] and all(speed > 0 for found in speeds for speed in found.values())
    assert results[0]["prompts"] == 21 and results[0]["models"]["tuned"] == f"{tmp_path}/tuned/model"
    assert {"rewards", "pass_at_k", "judge", "kl", "responses"} <= results[0].keys()
    assert len((one / "evaluation.jsonl").read_text().splitlines()) == 63
    assert "evaluation.html" in {path.name for path in one.iterdir()}

    codes, output = rank_server.run(target, 1, *arguments, "--judge", f"{tmp_path}/score.py:wrong")
    assert codes == [2] and "Traceback" not in output
    assert output.splitlines()[-1].startswith(
        f"error: --judge={tmp_path}/score.py:wrong: returned 7.0 for the"
    )
