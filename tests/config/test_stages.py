"""Tests that a stage has the sections that its table entry names, and refuses keys of other sections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from ppo_ds.config.registry import STAGES, StageEntry
from ppo_ds.config.resume import check_resume
from ppo_ds.config.schema import SHARED, Config, config_class, resolved
from ppo_ds.config.validation import CHECKS
from tests.config.commands import MINIMAL, complaints, compose

FIT = ("stage=fit", "run.steps=3", "actor.model.path=org/actor")


@pytest.fixture(autouse=True)
def fit_stage() -> Iterator[None]:
    """Adds a stage that uses the actor's section only."""
    STAGES["fit"] = StageEntry("pkg.mod.FitStage", "Fits a line.", sections=("actor",))
    yield
    del STAGES["fit"]


def test_config_has_the_sections_of_all_stages() -> None:
    used = {name for entry in STAGES.values() for name in entry.sections}
    assert {*SHARED, *used} == set(Config.model_fields)
    assert set(config_class("ppo").model_fields) == {*SHARED, *STAGES["ppo"].sections}


@pytest.mark.parametrize("stage", ["fit", "ppo"])
def test_equal_configs_of_a_stage_compare_equal(stage: str) -> None:
    arguments = FIT if stage == "fit" else MINIMAL
    assert compose(*arguments) == compose(*arguments) != compose(*arguments, "run.seed=1")


def test_the_config_has_the_sections_of_its_stage_only() -> None:
    settings = resolved(compose(*FIT, "actor.optim.lr=1e-3", "eval.every=2"))
    assert set(settings) == {*SHARED, "actor"}
    assert settings["actor"]["optim"]["lr"] == 1e-3 and settings["run"]["dir"] == "outputs/ppo"


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


def test_the_checks_of_its_own_sections_apply() -> None:
    lines = complaints(*FIT, "actor.zero.offload_params=true", "run.dry_run=true", "actor.optm.lr=1")
    assert [line.split(":")[0] for line in lines] == [
        "actor.optm.lr=1",
        "actor.zero.offload_params=true",
        "run.dry_run=true",
    ]
    assert complaints("stage=fit")[0].startswith("actor.model.path is missing")


def test_every_check_applies_to_a_stage() -> None:
    for check, sections in CHECKS.items():
        assert any(set(sections) <= set(entry.sections) for entry in STAGES.values()), check


def test_its_settings_are_compared_on_resume() -> None:
    before = json.loads(json.dumps(resolved(compose(*FIT))))
    checkpoint = Path("outputs/ppo/checkpoints/step_000002")
    assert check_resume(before, resolved(compose(*FIT)), checkpoint) == []
    (line,) = check_resume(before, resolved(compose(*FIT, "actor.optim.lr=1e-3")), checkpoint)
    assert line == "changed    since the checkpoint: actor.optim.lr 1e-06 -> 0.001"
