"""Tests the upload of exported models to the Hub, which a local server replaces, and model cards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from safetensors.torch import load

from launch import export
from ppo_ds.config.reading import read
from ppo_ds.config.schema import Config, inherit
from ppo_ds.tools.model_card import remove_local_base, write_card
from tests.support.hub_server import HubServer
from tests.tools.test_export import STEP, trained, write_run

SECRET = "hf_" + "x" * 34


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Serves as the Hub of this process, with a token in its environment."""
    with HubServer({}) as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", SECRET)
        yield server


def test_the_uploaded_files_are_the_exported_ones(
    tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path / "run")
    assert export.main([str(run_dir), "--push", "me/answers"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1] == f"uploaded: {hub.url}/me/answers"
    out = run_dir / "exports" / "step_000002" / "model"
    exported = {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert hub.uploaded["me/answers"] == exported
    expected = trained(run_dir / "start")
    for name, weight in load(hub.uploaded["me/answers"]["model.safetensors"]).items():
        assert weight.equal(expected[f"lm.{name}"].bfloat16()), name
    assert hub.created["me/answers"]["visibility"] == "private"
    assert SECRET in hub.requests and SECRET not in shown.out + shown.err


def test_no_uploaded_file_names_a_folder_of_this_machine(tmp_path: Path, hub: HubServer) -> None:
    """The files of the base model may hold its path, and its folder files that are not part of a model."""
    run_dir = write_run(tmp_path / "run")
    written = {"config.json": ["_name_or_path"]}  # by transformers, in folders that older versions have saved
    written["tokenizer_config.json"] = ["name_or_path", "tokenizer_file", "vocab_file"]
    for name, keys in written.items():
        file = run_dir / "start" / name
        about = json.loads(file.read_text()) | dict.fromkeys(keys, str(tmp_path))
        file.write_text(json.dumps(about))
    (run_dir / "start" / ".env").write_text("TOKEN=x")
    assert export.main([str(run_dir), "--push", "me/answers"]) == 0
    files = hub.uploaded["me/answers"]
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    assert "config.json" in files and ".env" not in files


def test_a_repository_is_public_only_on_request(tmp_path: Path, hub: HubServer) -> None:
    assert export.main([str(write_run(tmp_path / "run")), "--push", "me/answers", "--public"]) == 0
    assert hub.created["me/answers"]["visibility"] == "public"


def test_a_refused_upload_keeps_the_export(
    tmp_path: Path, hub: HubServer, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, hub.fails = write_run(tmp_path / "run"), 403
    assert export.main([str(run_dir), "--push", "me/answers"]) == 2
    out = run_dir / "exports" / "step_000002" / "model"
    assert (out / "model.safetensors").exists()
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: --push=me/answers: ") and "403" in line and str(out) in line


@pytest.mark.parametrize(
    "arguments, token, message",
    [
        (["--push", "answers"], SECRET, "error: --push=answers: must be ORG/NAME"),
        (["--push", "me/answers"], "", "error: --push=me/answers: HF_TOKEN is not set; create a token"),
        (["--public"], SECRET, "error: --public: needs --push ORG/NAME"),
        (["--adapter"], SECRET, "error: --adapter: needs --push ORG/NAME"),
        (["--push", "me/answers", "--adapter"], SECRET, "error: --adapter: the actor of"),
    ],
)
def test_mistakes_are_found_before_the_export(
    arguments: list[str],
    token: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    run_dir = write_run(tmp_path / "run")
    capsys.readouterr()  # progress bars
    assert export.main([str(run_dir), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(run_dir.glob("exports/*/*"))


def card_of(folder: Path, role: str = "actor", name: str = "me/answers", **tree: Any) -> ModelCard:
    """Writes the card of a checkpoint of step 2, whose run has four steps."""
    run_dir = folder / "run"
    (run_dir / STEP).mkdir(parents=True)
    progress = {"first_eval": {"eval/score_mean": 0.25}}
    state = {"format": 1, "step": 2, "models": ["actor"], "shadows": [], "state": {"progress": progress}}
    (run_dir / STEP / "state.json").write_text(json.dumps(state))
    lines = [{"step": step, "reward/score_mean": step / 10, "kl/ref_seq_mean": None} for step in range(1, 5)]
    lines[0]["eval/score_mean"], lines[3]["eval/score_mean"] = 0.5, 0.9
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "actor": {"model": {"path": "org/base"}},
        "data": {"path": "/home/me/secret-project/prompts.jsonl"},
        "reward": {"_target_": "f", "path": "/home/me/secret-project/mine.py:score"},
        "run": {"steps": 4},
        "rollout": {"prompts_per_step": 4},
        "sampling": {"max_new_tokens": 7},
    } | tree
    config, problems = read(Config, settings)
    assert not problems
    out = folder / "out"
    out.mkdir()
    write_card(out, run_dir / STEP, inherit(config), role, name)
    return ModelCard.load(out / "README.md")


def test_the_card_shows_results_and_settings_of_the_exported_step(tmp_path: Path) -> None:
    card = card_of(tmp_path)
    assert card.data.base_model == "org/base" and card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation" and card.data.datasets is None
    assert "[org/base](https://huggingface.co/org/base) after 2 steps of PPO on `prompts.jsonl`" in card.text
    assert "| held-out data | before | after step 1 |" in card.text  # step 2 was not evaluated
    assert "| score_mean | 0.25 | 0.5 |" in card.text
    assert "| mean score of the sampled responses | 0.2 |" in card.text  # of step 2, not of step 4
    assert "KL to the reference" not in card.text  # it was not finite
    assert "| `sampling.max_new_tokens` | 7 |" in card.text
    assert "secret-project" not in card.text
    assert 'AutoModelForCausalLM.from_pretrained("me/answers")' in card.text
    assert (tmp_path / "out" / "curves.png").stat().st_size > 1000


def test_the_card_shows_no_folder_of_a_relative_path(tmp_path: Path) -> None:
    reward = {"_target_": "f", "path": "secret-project/mine.py:score"}
    text = card_of(tmp_path, data={"path": "secret-project/mine.jsonl"}, reward=reward).text
    assert "on `mine.jsonl`, with the reward `mine.py:score`" in text and "secret-project" not in text


BREAKS = "`\n# H\n---\n|"


@pytest.mark.parametrize(
    "text", ["a](http://x) <b>" + BREAKS, "a/b" + BREAKS, "\x1b[2J" + BREAKS, "a/[b](c)"]
)
@pytest.mark.parametrize("key", ["data", "reward", "target", "model"])
def test_settings_of_someone_else_cannot_write_markdown(tmp_path: Path, text: str, key: str) -> None:
    """The card of a checkpoint of someone else quotes its settings; each stays one piece of code."""
    trees: dict[str, Any] = {
        "data": {"data": {"path": text}},
        "reward": {"reward": {"_target_": "f", "path": text}},
        "target": {"reward": {"_target_": text}},
        "model": {"actor": {"model": {"path": text}}},
    }
    shown = card_of(tmp_path, **trees[key]).text
    (line,) = [line for line in shown.splitlines() if " steps of PPO on " in line]
    assert line.isprintable() and line.count("`") % 2 == 0 and "# H" not in shown.splitlines()
    outside = "".join(line.split("`")[::2])  # what is no code
    assert "<b>" not in outside and outside.count("](") == outside.count("](https://huggingface.co/org/base)")


def test_the_card_of_an_adapter(tmp_path: Path) -> None:
    card = card_of(tmp_path, role="adapter")
    assert card.data.library_name == "peft" and "lora" in card.data.tags
    assert 'AutoPeftModelForCausalLM.from_pretrained("me/answers")' in card.text


def test_the_card_of_a_critic_has_neither_code_nor_results(tmp_path: Path) -> None:
    card = card_of(tmp_path, role="critic")
    assert "The critic (value model) of" in card.text and card.data.pipeline_tag is None
    assert "```" not in card.text and "Results" not in card.text


def test_links_to_data_sets_and_the_rate_of_adapters(tmp_path: Path) -> None:
    actor = {"model": {"path": "org/base"}, "optim": {"lr": 2e-6}, "lora": {"rank": 4}}
    card = card_of(tmp_path, data={"path": "org/prompts"}, actor=actor)
    assert "[org/prompts](https://huggingface.co/datasets/org/prompts)" in card.text
    assert card.data.datasets == "org/prompts"
    assert "| `actor.lora.lr` | 2e-05 |" in card.text and "actor.optim.lr" not in card.text


def test_an_adapter_does_not_publish_the_path_of_its_base(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    for base, expected in (("/home/me/base", "base"), ("org/base", "org/base")):
        file.write_text(json.dumps({"base_model_name_or_path": base, "r": 4}))
        remove_local_base(tmp_path)
        assert json.loads(file.read_text()) == {"base_model_name_or_path": expected, "r": 4}


def test_the_code_of_a_card_loads_the_model(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run")
    assert export.main([str(run_dir), str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "README.md").read_text()
    code = text.partition("```python\n")[2].partition("```")[0]
    assert '"."' in code
    names: dict[str, Any] = {}
    exec(code.replace('"."', repr(str(tmp_path / "out"))), names)
    assert names["model"].config.model_type == "llama" and names["tokenizer"]("ab").input_ids
