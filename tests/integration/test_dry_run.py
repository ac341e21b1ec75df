"""Tests run.dry_run: a complete run on two ranks with a small config and tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    DebertaV2Config,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    LlamaForSequenceClassification,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
)

from launch.cli import load_config
from ppo_ds.assemble.dry_run import dry_run_config, dry_run_dir, prepare, start_dry_run
from ppo_ds.config.registry import STAGES, import_target
from ppo_ds.config.schema import Config, rollout_size
from ppo_ds.config.types import replace
from ppo_ds.config.validation import problems
from ppo_ds.errors import UserError
from ppo_ds.models import tiny
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.storage.run_directory import DRY_RUN_MARKER
from tests.integration.launching import ROOT, launch

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48,
    "original_max_position_embeddings": 4096
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


GROUPED = LlamaConfig(num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=16)
LONG = Phi3Config(rope_parameters=LONGROPE, max_position_embeddings=131072, pad_token_id=0)
RELATIVE = DebertaV2Config(relative_attention=True, num_labels=1, pooler_hidden_size=1024)


@pytest.mark.parametrize(
    ("name", "config", "heads", "kinds"),
    [
        ("LlamaForCausalLM", GROUPED, (4, 1), 1),
        ("LlamaForCausalLM", LlamaConfig(num_attention_heads=32, num_hidden_layers=1), (4, 4), 1),
        ("Qwen2ForCausalLM", Qwen2Config(num_attention_heads=14, num_key_value_heads=2), (7, 1), 1),
        ("Gemma2ForCausalLM", Gemma2Config(num_attention_heads=8, num_key_value_heads=4), (2, 1), 2),
        ("Qwen3MoeForCausalLM", Qwen3MoeConfig(num_attention_heads=32, num_key_value_heads=4), (8, 1), 1),
        ("Phi3ForCausalLM", LONG, (4, 4), 1),
        ("GPT2LMHeadModel", GPT2Config(), (4, None), 1),
        ("DebertaV2ForSequenceClassification", RELATIVE, (4, None), 1),
    ],
)
def test_a_small_model_of_any_family_runs(
    name: str, config: PreTrainedConfig, heads: tuple[int, int | None], kinds: int
) -> None:
    before = config.to_dict()
    config.vocab_size = 500  # the test has its own vocabulary
    small: Any = tiny.shrunk(config)
    for key, value in SPECIAL.items():
        setattr(small, key, value)
    model = getattr(transformers, name)(small)
    out = model(input_ids=torch.arange(2, 26).view(2, 12)).logits
    assert out.isfinite().all() and sum(p.numel() for p in model.parameters()) < 300_000
    assert (small.num_attention_heads, getattr(small, "num_key_value_heads", None)) == heads
    assert small.num_hidden_layers == min(2, before.get("num_hidden_layers", before.get("n_layer")))
    assert small.vocab_size == 500
    assert len(set(getattr(small, "layer_types", None) or ["one"])) == kinds
    # the given config is unchanged
    assert config.hidden_size == before.get("hidden_size", before.get("n_embd"))


GIVEN = (
    "actor.model.path=org/actor",
    "reward=function",
    "reward.path=pkg.mod:score",
    "data.path=org/prompts",
    "run.steps=500",
)


def composed(*arguments: str, ranks: int = 1, given: Sequence[str] = GIVEN) -> Config:
    return load_config(
        [*given, "rollout.prompts_per_step=240", "sampling.max_new_tokens=256", *arguments], world_size=ranks
    )


@pytest.mark.parametrize("algo", sorted(file.stem for file in (ROOT / "conf" / "algo").glob("*.yaml")))
def test_a_sound_config_is_sound_when_it_is_small(algo: str) -> None:
    ranks = 3
    part = "reward.parts.{}.reward._target_=ppo_ds.rewards.rules.FormatReward"
    two_parts = ["reward=weighted", part.format("one"), part.format("two")]  # gdpo needs two
    given = [*GIVEN[:1], *two_parts, *GIVEN[3:]] if algo == "gdpo" else GIVEN
    config = composed(
        f"algo={algo}",
        "rollout.samples_per_prompt=8",
        "algo.minibatch_size=480",
        "run.max_minutes=9",
        ranks=ranks,
        given=given,
    )
    small = dry_run_config(config, ranks)
    assert list(problems(small, ranks)) == []
    assert rollout_size(small) == 2 * (small.algo.minibatch_size or 0) == 6 * 4
    assert (small.run.steps, small.run.max_minutes, small.sampling.max_new_tokens) == (2, None, 16)
    assert small.actor.model.dtype == small.critic.model.dtype == small.reference.model.dtype == "fp32"


@pytest.mark.parametrize("stage", ["sft", "reward_model"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_the_other_stages_are_sound_when_they_are_small(stage: str, ranks: int) -> None:
    role = {"sft": "actor", "reward_model": "scorer"}[stage]
    given = (f"{role}.model.path=org/base", "data.path=org/rows", "data.eval_path=org/more", "eval.every=50")
    config = load_config([f"stage={stage}", *given, "run.epochs=2", f"{role}.lora.rank=8"], world_size=ranks)
    shrink = import_target(STAGES[stage].dry_run or "")
    small = shrink(config, ranks)
    assert list(problems(small, ranks)) == []
    model = getattr(small, role).model
    assert (model.path, model.dtype) == (f"outputs/{stage}_dry/models/0", "fp32")
    assert getattr(small, stage).batch_size == {1: 4, 3: 6}[ranks]
    assert getattr(small, stage).max_tokens == 1024  # a lower limit would drop rows
    assert (small.run.steps, small.run.epochs, small.eval.every, small.data.max_samples) == (2, None, 1, 1000)
    assert [model["key"] for model in small.prepare["models"]] == [f"{role}.model.path"]


def test_what_a_run_makes_in_its_folder_is_made_in_another() -> None:
    small = dry_run_config(load_config(["+experiment=quickstart", "run.dir=here/it/is"]), 1)
    assert small.run.dir == "here/it/is_dry" and small.data.path == "here/it/is_dry/start/train.jsonl"
    assert small.prepare is not None and small.prepare["first"]["dir"] == "here/it/is_dry/start"
    assert [model["path"] for model in small.prepare["models"]] == ["here/it/is_dry/start/model"]
    assert small.actor.model.path == small.reference.model.path == "here/it/is_dry/models/0"
    assert small.tracker.wandb.mode == "disabled"


def test_a_dry_run_does_not_divide_rows_since_its_models_may_have_one_key_value_head() -> None:
    small = dry_run_config(load_config(["+experiment=quickstart", "memory.sequence_parallel=2"], 2), 2)
    assert small.memory.sequence_parallel == 1


@pytest.mark.parametrize(("more", "expected"), [([], 128), (["+experiment=calculator"], 1024)])
def test_prompts_keep_their_limit_with_an_environment_whose_tools_are_part_of_them(
    more: list[str], expected: int
) -> None:
    given = [*(more or ["+experiment=quickstart"]), "data.max_prompt_tokens=1024"]
    assert dry_run_config(load_config(given), 1).data.max_prompt_tokens == expected


def test_what_no_dry_run_has_made_is_not_touched(tmp_path: Path) -> None:
    config = composed(f"run.dir={tmp_path}/run")
    folder = dry_run_dir(config)
    folder.mkdir()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(
        UserError, match="that folder exists and no dry run created it; choose another run.name"
    ):
        start_dry_run(config, 1, is_main=True)
    assert (folder / "thesis.tex").exists()
    (folder / DRY_RUN_MARKER).touch()
    start_dry_run(config, 1, is_main=True)
    assert [file.name for file in folder.iterdir()] == [DRY_RUN_MARKER]


def test_a_model_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    wanted = dry_run_config(
        replace(composed(), run=replace(composed().run, dir=str(tmp_path / "run"))), 1
    ).prepare
    assert wanted is not None
    (tmp_path / "empty").mkdir()
    model = wanted["models"][0] | {"path": str(tmp_path / "empty")}
    with pytest.raises(UserError, match="^actor.model.path=.*empty: "):
        prepare([model], None)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes models as config files only: a dry run reads no weights."""
    folder = tmp_path_factory.mktemp("dry")
    tokenizer = tiny.character_tokenizer("abcdefgh ")
    common: dict[str, Any] = dict(
        num_hidden_layers=12,
        num_attention_heads=14,
        num_key_value_heads=2,
        hidden_size=896,
        intermediate_size=4864,
    )
    common |= dict(vocab_size=tokenizer.vocab_size, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    for name, config, kind in (
        ("model", Qwen2Config(**common, tie_word_embeddings=True), Qwen2ForCausalLM),
        ("reward", LlamaConfig(**common, num_labels=1), LlamaForSequenceClassification),
    ):
        config.architectures = [kind.__name__]
        config.save_pretrained(folder / name)
        tokenizer.save(folder / name)
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "abc" * n}) + "\n" for n in range(1, 33))
    )
    return folder


@pytest.mark.slow
def test_a_dry_run_on_two_ranks(start: Path) -> None:
    places = (
        f"actor.model.path={start}/model",
        f"data.path={start}/prompts.jsonl",
        f"reward.model.path={start}/reward",
    )
    stages = ("actor.zero.stage=3", "critic.zero.stage=2", "actor.lora.rank=4", "actor.model.dtype=fp16")
    size = (
        "rollout.prompts_per_step=32",
        "sampling.max_new_tokens=200",
        "run.steps=900",
        "run.resume=never",
        "run.name=mine",
        "tracker=wandb",
    )
    done = launch("deepspeed", "run.dry_run=true", "reward=model", *places, *stages, *size, cwd=start)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("dry run: ")]
    assert "2 steps on 2 rank(s), one checkpoint written and read again" in said
    assert "not tested: memory" in said
    assert "vLLM (rollout.backend=vllm is replaced by auto)" in said
    assert "reward.model.path" not in done.stderr and "step 2/2" in done.stdout
    assert "metrics.jsonl" not in done.stdout and "curves.png" not in done.stdout  # they are removed
    assert not (start / "outputs" / "mine").exists() and not list((start / "outputs").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "stage", "model"), [("deepspeed", "sft", "model"), ("python", "reward_model", "bert")]
)
def test_a_dry_run_of_the_other_stages(start: Path, launcher: str, stage: str, model: str) -> None:
    role = {"sft": "actor", "reward_model": "scorer"}[stage]
    rows = [{"prompt": "ab" * n, "chosen": "cd", "rejected": "e" * n} for n in range(1, 33)]
    (start / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (start / "bert").mkdir(exist_ok=True)
    tokenizer = load_tokenizer(str(start / "model"))
    bert = BertConfig(vocab_size=tokenizer.vocab_size, architectures=["BertForMaskedLM"])
    bert.save_pretrained(start / "bert")
    tokenizer.save(start / "bert")
    given = (
        f"stage={stage}",
        f"{role}.model.path={start}/{model}",
        f"{role}.model.dtype=bf16",
        f"data.path={start}/rows.jsonl",
        f"data.eval_path={start}/rows.jsonl",
        "eval.every=10",
        "run.epochs=3",
        "zero=stage3",
    )
    done = launch(launcher, "run.dry_run=true", *given, cwd=start)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("dry run: ")]
    ranks = {"deepspeed": 2, "python": 1}[launcher]
    assert f"config, data, architectures and loop work: 2 steps on {ranks} rank(s), one checkpoint" in said
    assert not list((start / "outputs").iterdir())
