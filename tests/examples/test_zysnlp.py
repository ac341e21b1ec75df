"""Tests the data of the zysNLP tutorial that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import setuptools  # noqa: F401, provides distutils

from distutils.core import run_setup  # isort: skip

import ppo_ds
from ppo_ds.config.sections.data import DataConfig
from ppo_ds.data.preferences import PreferenceSource
from ppo_ds.models.tokenizer import load_tokenizer
from tests.config.commands import compose
from tests.rewards.reward_cases import save_tokenizer

ROOT = Path(__file__).parents[2]
EXAMPLES = Path(ppo_ds.__file__).parent / "examples"


def rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (EXAMPLES / name).read_text(encoding="utf-8").splitlines()]


def test_the_experiment_finds_its_prompts_from_any_directory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose("+experiment=zysnlp")
    assert config.data.path == str(EXAMPLES / "zysnlp_prompts.jsonl") and Path(config.data.path).is_file()
    prompts = [row["prompt"] for row in rows("zysnlp_prompts.jsonl")]
    assert len(prompts) == config.rollout.prompts_per_step == 8 and len(set(prompts)) == 6


def test_the_banner_says_that_the_tutorials_log_is_shorter() -> None:
    note = compose("+experiment=zysnlp").run.note
    assert note == (
        "the tutorial's formula gives 120 optimizer steps, 3 x 5 x 16 / 2, as here; its printed log has 60"
    )


def test_preferences_have_the_shape_of_the_tutorials_record() -> None:
    for row in rows("zysnlp_preferences.jsonl"):
        assert set(row) == {"prompt", "response_A", "response_B", "preference", "score_A", "score_B"}
        other = {"A": "B", "B": "A"}[row["preference"]]
        assert row[f"score_{row['preference']}"] > row[f"score_{other}"]
        assert row["response_A"] != row["response_B"]


def test_a_reward_model_can_train_on_the_preferences(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "tokenizer"))
    source = PreferenceSource(
        str(EXAMPLES / "zysnlp_preferences.jsonl"), data=DataConfig(), tokenizer=tokenizer
    )
    assert len(source) == 7
    chosen, rejected = source.texts(1)
    # The tokenizer begins each text with <bos>.
    assert chosen == "<bos>请问1+1等于多少？ 1+1等于2" and rejected == "<bos>请问1+1等于多少？ 1+1等于3"


def test_an_installed_package_has_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    distribution = run_setup("setup.py", stop_after="config")
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    files = {package: set(names) for package, _, _, names in build.data_files}
    assert {"zysnlp_prompts.jsonl", "zysnlp_preferences.jsonl"} <= files["ppo_ds.examples"]
