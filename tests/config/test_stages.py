"""Tests that a stage has the sections that its table entry names, and refuses keys of other sections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from ppo_ds.config.registry import STAGES, StageEntry
from ppo_ds.config.resume import check_resume
from ppo_ds.config.schema import CONFIGS, ORDER, Config, resolved
from ppo_ds.config.sections.models import ActorConfig
from ppo_ds.config.validation import CHECKS
from ppo_ds.errors import UserError
from tests.config.commands import MINIMAL, complaints, compose

FIT = ("stage=fit", "run.steps=3", "actor.model.path=org/actor")


class FitConfig(Config):
    """The settings of a stage that uses only the actor's section."""

    trained = averaged = ("actor",)
    stage: Literal["fit"] = "fit"
    actor: ActorConfig


del CONFIGS["fit"]  # defining the class has added it


@pytest.fixture(autouse=True)
def fit_stage() -> Iterator[None]:
    """Adds a stage that uses the actor's section only."""
    STAGES["fit"], CONFIGS["fit"] = StageEntry("pkg.mod.FitStage", "Fits a line."), FitConfig
    yield
    del STAGES["fit"], CONFIGS["fit"]


def test_every_stage_has_a_config_and_every_section_a_place() -> None:
    assert CONFIGS.keys() == STAGES.keys()
    assert {*ORDER} == {name for config in CONFIGS.values() for name in config.model_fields}


@pytest.mark.parametrize("stage", ["fit", "ppo"])
def test_equal_configs_of_a_stage_compare_equal(stage: str) -> None:
    arguments = FIT if stage == "fit" else MINIMAL
    assert compose(*arguments) == compose(*arguments) != compose(*arguments, "run.seed=1")


def test_the_config_has_the_sections_of_its_stage_only() -> None:
    settings = resolved(compose(*FIT, "actor.optim.lr=1e-3", "eval.every=2"))
    assert set(settings) == {*Config.model_fields, "actor"}
    assert settings["actor"]["optim"]["lr"] == 1e-3 and settings["run"]["dir"] == "outputs/fit"


@pytest.mark.parametrize(
    ("argument", "section"),
    [
        ("sampling.max_new_tokens=8", "sampling"),
        ("rollout.prompts_per_step=4", "rollout"),
        ("algo=grpo", "algo"),
        ("reward=length", "reward"),
        ("memory.train_tokens=9", "memory"),
        ("critic.init=actor", "critic"),
    ],
)
def test_sections_of_other_stages_are_refused(argument: str, section: str) -> None:
    (line,) = complaints(*FIT, argument)
    assert line.startswith(f"{section}: stage=fit does not use this section; remove its keys (it uses run, ")


def test_keys_of_its_sections_that_a_stage_does_not_use_are_refused() -> None:
    keys = ("actor.zero.offload_states=always", "health.max_kl=1", "actor.zero.generation_gather=auto")
    assert complaints(*FIT, *keys, "health.max_skips=5") == [
        "actor.zero.offload_states=always: stage=fit does not use this key; remove it",
        "health.max_kl=1.0: stage=fit does not use this key; remove it",
    ]


def test_groups_for_every_stage_set_the_keys_that_a_stage_uses() -> None:
    config = compose(*FIT, "zero=stage3", "debug=tiny", "run.steps=3")
    assert (config.actor.zero.stage, config.run.name, config.run.steps) == (3, "debug", 3)
    assert complaints(*FIT, "zero=stage3", "critic.zero.stage=2", "sampling.top_k=3", "debug=tiny") == [
        f"{section}: stage=fit does not use this section; remove its keys (it uses run, actor, checkpoint, "
        "health, tracker, eval, prepare)"
        for section in ("critic", "sampling")
    ]


def test_groups_set_no_key_that_a_stage_does_not_use(tmp_path: Path) -> None:
    (tmp_path / "debug").mkdir()
    (tmp_path / "debug" / "mine.yaml").write_text(
        "# @package _global_\nhealth: {max_skips: 3}\nsampling: {top_k: 3}\nactor: {optim: {lr: 0.5}}\n"
    )
    config = compose(*FIT, "--config-dir", str(tmp_path), "debug=mine")
    assert (config.health.max_skips, config.actor.optim.lr) == (3, 0.5)
    assert compose(*MINIMAL, "--config-dir", str(tmp_path), "debug=mine").sampling.top_k == 3


def test_the_run_is_named_after_its_stage_also_in_interpolations() -> None:
    assert compose(*FIT, "run.dir='/runs/${run.name}_1'").run.dir == "/runs/fit_1"
    assert compose(*FIT, "tracker.wandb.project='${run.dir}'").tracker.wandb.project == "outputs/fit"
    assert compose(*MINIMAL).run.dir == "outputs/ppo"


def test_the_checks_of_its_own_sections_apply() -> None:
    lines = complaints(*FIT, "actor.zero.offload_params=true", "run.dry_run=true", "actor.optm.lr=1")
    assert [line.split(":")[0] for line in lines] == [
        "actor.optm.lr=1",
        "run.dry_run=true",
        "actor.zero.offload_params=true",
    ]
    assert complaints("stage=fit")[0].startswith("actor.model.path is missing")


def test_every_check_applies_to_a_stage() -> None:
    for check, kind in CHECKS.items():
        assert any(issubclass(config, kind) for config in CONFIGS.values()), check


def test_its_settings_are_compared_on_resume() -> None:
    before = json.loads(json.dumps(resolved(compose(*FIT))))
    checkpoint = Path("outputs/ppo/checkpoints/step_000002")
    assert check_resume(before, resolved(compose(*FIT)), checkpoint) == []
    (line,) = check_resume(before, resolved(compose(*FIT, "actor.optim.lr=1e-3")), checkpoint)
    assert line == "changed    since the checkpoint: actor.optim.lr 1e-06 -> 0.001"


SFT = ("stage=sft", "run.steps=3", "actor.model.path=org/actor", "data.path=org/chats")
REWARD_MODEL = ("stage=reward_model", "run.steps=3", "scorer.model.path=org/base", "data.path=org/pairs")


@pytest.mark.parametrize("option", ["zero=stage0", "zero=stage3_offload", "debug=tiny"])
def test_groups_set_the_models_and_batches_of_every_stage(option: str) -> None:
    sft, scorer = compose(*SFT, option, "run.steps=3"), compose(*REWARD_MODEL, option, "run.steps=3")
    stage, rows = {"zero=stage0": (0, 64), "zero=stage3_offload": (3, 64), "debug=tiny": (2, 8)}[option]
    assert (sft.actor.zero.stage, sft.sft.batch_size) == (stage, rows)
    assert (scorer.scorer.zero.stage, scorer.reward_model.batch_size) == (stage, rows)


@pytest.mark.parametrize("stage", [SFT, REWARD_MODEL])
def test_keys_that_only_ppo_uses_are_refused(stage: tuple[str, ...]) -> None:
    name = stage[0].partition("=")[2]
    keys = ("data.max_prompt_tokens=9", "data.ptx_path=org/texts", "health.max_kl=1.0", "eval.greedy=false")
    assert complaints(*stage, *keys) == [
        f"{key}: stage={name} does not use this key; remove it" for key in keys
    ]


def test_what_a_stage_lacks_is_asked_for_in_its_own_words() -> None:
    kinds = "a Hub data set or a JSONL, JSON, Parquet or CSV file of"
    assert complaints(*SFT[:3], "eval.every=5") == [
        f"data.path is missing: {kinds} demonstrations",
        "eval.every=5: needs data.eval_path (it is null); otherwise set eval.every=null",
    ]
    assert complaints(REWARD_MODEL[0], "run.steps=3") == [
        "scorer.model.path is missing: a Hub id or a model folder",
        f"data.path is missing: {kinds} pairs of answers",
    ]


@pytest.mark.parametrize(
    ("stage", "argument"),
    [
        (SFT, "sft.batch_size=8"),
        (SFT, "sft.max_tokens=9"),
        (SFT, "sft.learn=all"),
        (REWARD_MODEL, "reward_model.batch_size=8"),
        (REWARD_MODEL, "reward_model.head_init=zero"),
        (REWARD_MODEL, "scorer.zero.stage=3"),
        (REWARD_MODEL, "scorer.lora.rank=4"),
        (REWARD_MODEL, "scorer.ema.decay=0.5"),
    ],
)
def test_what_decides_the_rows_or_the_weights_stays_on_resume(stage: tuple[str, ...], argument: str) -> None:
    before = json.loads(json.dumps(resolved(compose(*stage))))
    with pytest.raises(UserError) as refused:
        check_resume(before, resolved(compose(*stage, argument)), Path("run/checkpoints/step_000002"))
    (line,) = refused.value.problems
    assert line.startswith(f"{argument}: run/checkpoints/step_000002 was made with ")


def test_settings_of_samples_change_silently_and_coefficients_are_listed() -> None:
    before, folder = json.loads(json.dumps(resolved(compose(*SFT)))), Path("step_000002")
    assert check_resume(before, resolved(compose(*SFT, "sft.samples=0", "sft.sample_tokens=9")), folder) == []
    (line,) = check_resume(before, resolved(compose(*SFT, "sft.label_smoothing=0.1")), folder)
    assert line == "changed    since the checkpoint: sft.label_smoothing 0.0 -> 0.1"


def test_a_checkpoint_of_another_stage_is_refused_in_one_line() -> None:
    before = json.loads(json.dumps(resolved(compose(*SFT))))
    with pytest.raises(UserError) as refused:
        check_resume(before, resolved(compose(*REWARD_MODEL)), Path("run/checkpoints/step_000002"))
    assert refused.value.problems == [
        "stage=reward_model: run/checkpoints/step_000002 was made with sft; choose another run.dir or "
        "run.name, or begin anew with run.resume=restart"
    ]
