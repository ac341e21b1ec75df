"""Tests that trusting the code of one model does not extend to code of another repository."""

from __future__ import annotations

import json
import shutil
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
    """Writes a model folder with its own code, which loads only if trusted."""
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
    """Returns the list of repositories from which transformers requests code."""
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


def test_a_trusted_folder_cannot_run_code_of_another_folder(folder, tmp_path):
    """transformers joins the name of the module to the folder, so an absolute path would replace it."""
    (tmp_path / "elsewhere.py").write_text(f"open({str(tmp_path / 'witness')!r}, 'w').close()\n{CODE}")
    change(folder / "config.json", auto_map={"AutoConfig": f"{tmp_path}/elsewhere.Config"}, model_type="mine")
    with pytest.raises(
        UserError, match=r"its config.json runs code of another repository \(/.*/elsewhere.Config\)"
    ):
        load_config(str(folder), trust_remote_code=True)
    assert not (tmp_path / "witness").exists()


def test_a_config_for_a_version_of_transformers_cannot_run_code_of_another_repository(folder, asked):
    """transformers reads config.4.0.0.json here instead of config.json."""
    settings = json.loads((folder / "config.json").read_text())
    other = settings | {"auto_map": references("other/repo--")}
    (folder / "config.4.0.0.json").write_text(json.dumps(other))
    change(folder / "config.json", configuration_files=["config.4.0.0.json"])
    with pytest.raises(UserError, match=r"its config.4.0.0.json runs code of another repository"):
        load_config(str(folder), trust_remote_code=True)
    assert asked == []


@pytest.mark.parametrize("base", ["other/repo", "folder of this machine"])
@pytest.mark.parametrize("trusted", [False, True])
def test_a_hub_model_cannot_replace_its_weights_by_those_of_a_base_model(
    folder, tmp_path, monkeypatch, base, trusted
):
    """transformers loads the base model of an adapter from wherever its adapter_config.json says."""
    private = tmp_path / "private"
    change(folder / "config.json", auto_map={})
    shutil.copytree(folder, private)
    snapshot = tmp_path / "hub" / "models--stranger--m" / "snapshots" / ("a" * 40)
    shutil.copytree(folder, snapshot)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("a" * 40)
    about = {"base_model_name_or_path": base if "/" in base else str(private), "peft_type": "LORA"}
    (snapshot / "adapter_config.json").write_text(json.dumps(about))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = ModelConfig(path="stranger/m", dtype="fp32", trust_remote_code=trusted)
    with pytest.raises(UserError, match="actor.model.path=stranger/m: contains an adapter"):
        load_policy(model, temperature=1.0, key="actor.model.path")


@pytest.mark.parametrize(
    "entry", ["other/repo--mine.Tok", ["other/repo--mine.Tok", None], ["other/repo--mine.Tok", "mine.Fast"]]
)
@pytest.mark.parametrize("more", [{}, {"configuration_files": None}, {"configuration_files": [5]}])
def test_a_trusted_tokenizer_cannot_run_code_of_another_repository(folder, asked, entry, more):
    file = folder / "tokenizer_config.json"
    change(file, tokenizer_class="Mine", auto_map={"AutoTokenizer": entry}, **more)
    with pytest.raises(UserError, match="its tokenizer_config.json runs code of another repository"):
        load_tokenizer(str(folder), trust_remote_code=True)
    assert asked == []


def test_code_of_the_folder_itself_loads(folder):
    assert load_config(str(folder), trust_remote_code=True).model_type == "llama"
