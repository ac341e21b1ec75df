"""Tests that trust in the code of one model is not trust in the code of another repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.utils import cached_file

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.models.chat_scorer import load_chat_scorer
from ppo_ds.models.loading import load_config
from ppo_ds.models.policy import load_policy
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.models.value import load_critic, load_reward_model

CODE = """\
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    pass

class Model(LlamaForCausalLM):
    pass
"""
MAPPED = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")


@pytest.fixture
def folder(tmp_path):
    """Writes a model with its own code, which loads if it is trusted."""
    folder = tmp_path / "model"
    tokenizer = tiny.character_tokenizer("ab")
    tiny.save(tiny.tiny_llama(tokenizer, hidden_size=8, layers=1, heads=2, max_tokens=8), tokenizer, folder)
    (folder / "mine.py").write_text(CODE)
    change(folder / "config.json", auto_map=references(""))
    return folder


def references(repository: str) -> dict[str, str]:
    return {name: repository + ("mine.Config" if name == "AutoConfig" else "mine.Model") for name in MAPPED}


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture(autouse=True)
def asked(monkeypatch):
    """Returns the repositories from which transformers has asked for code."""
    asked = []

    def record(repository, *arguments, **options):
        if not Path(repository).is_dir():
            asked.append(str(repository))
            raise OSError("no network")
        return cached_file(repository, *arguments, **options)

    monkeypatch.setattr("transformers.dynamic_module_utils.cached_file", record)
    return asked


def section(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="fp32", trust_remote_code=True)


LOADERS = {
    "config": lambda folder: load_config(str(folder), trust_remote_code=True),
    "actor": lambda folder: load_policy(section(folder), temperature=1.0, key="actor.model.path"),
    "critic": lambda folder: load_critic(section(folder), zero_head=True, key="critic.model.path"),
    "reward": lambda folder: load_reward_model(section(folder), key="reward.model.path"),
    "scorer": lambda folder: load_chat_scorer(section(folder), key="reward.model"),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("nested", [False, True])
def test_a_trusted_folder_cannot_run_code_of_another_repository(folder, asked, loader, nested):
    there = {"auto_map": references("other/repo--")}
    change(folder / "config.json", **({"text_config": there} if nested else there))
    with pytest.raises(UserError, match=r"its config.json runs code of another repository \(other/repo\)"):
        LOADERS[loader](folder)
    assert asked == []


@pytest.mark.parametrize("entry", ["other/repo--mine.Tok", ["other/repo--mine.Tok", None]])
def test_a_trusted_tokenizer_cannot_run_code_of_another_repository(folder, asked, entry):
    change(folder / "tokenizer_config.json", tokenizer_class="Mine", auto_map={"AutoTokenizer": entry})
    with pytest.raises(UserError, match="its tokenizer_config.json runs code of another repository"):
        load_tokenizer(str(folder), trust_remote_code=True)
    assert asked == []


def test_code_of_the_folder_itself_loads(folder):
    assert load_config(str(folder), trust_remote_code=True).model_type == "llama"
