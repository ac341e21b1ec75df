"""Tests that the arguments of ppo_ds's own rewards are checked against their source, without an import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.cli import CONF
from ppo_ds.config.registry import import_target
from ppo_ds.config.signatures import declared_arguments, misused_targets
from ppo_ds.config.targets import arguments_of
from tests.config.commands import MINIMAL, complaints


def targets(tree: Any) -> set[str]:
    """Returns every `_target_` in a nested dict."""
    if not isinstance(tree, dict):
        return set()
    found = {name for value in tree.values() for name in targets(value)}
    return found | {tree["_target_"]} if "_target_" in tree else found


FILES = [*(CONF / "reward").glob("*.yaml"), CONF / "experiment" / "quickstart.yaml"]
TARGETS = sorted({name for file in FILES for name in targets(yaml.safe_load(file.read_text()))})


def test_every_reward_of_the_groups_is_found() -> None:
    assert len(TARGETS) > 10 and "ppo_ds.examples.sums.prepare" in TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_the_source_declares_the_arguments_that_the_imported_target_takes(target: str) -> None:
    declared, real = declared_arguments(target).model_fields, arguments_of(import_target(target)).model_fields
    assert list(declared) == list(real)
    for name, field in real.items():
        assert declared[name].is_required() == field.is_required(), name
        accepts_anything = "typing.Any" in str(declared[name].annotation) and not declared[name].metadata
        same = (declared[name].annotation, str(declared[name].metadata)) == (
            field.annotation,
            str(field.metadata),
        )
        assert accepts_anything or same, name


@pytest.mark.parametrize(
    ("section", "lines"),
    [
        (
            {"_target_": "ppo_ds.rewards.function.FunctionReward", "pth": "x"},
            ["reward.pth=x: no such key; did you mean reward.path?", "reward.path is missing"],
        ),
        (
            {"_target_": "ppo_ds.rewards.rules.RegexReward", "pattern": "x", "full": "maybe", "score": "x"},
            ["reward.full=maybe: must be true or false", "reward.score=x: must be a number"],
        ),
        (
            {"_target_": "ppo_ds.rewards.remote.RemoteReward", "url": "http://x", "protocol": "xml"},
            ["reward.protocol=xml: must be one of json, openai"],
        ),
        (
            {"_target_": "ppo_ds.rewards.model.model_reward", "model": {"path": "x", "dtyp": "bf16"}},
            ["reward.model.dtyp=bf16: no such key; did you mean reward.model.dtype?"],
        ),
        (
            {
                "_target_": "ppo_ds.rewards.weighted.WeightedReward",
                "parts": {"a": {"reward": {"_target_": "ppo_ds.rewards.rules.LengthReward", "limt": 3}}},
            },
            ["reward.parts.a.reward.limt=3: no such key; the keys of reward.parts.a.reward are "],
        ),
        (
            {"_target_": "ppo_ds.rewards.rulez"},
            ["reward._target_=ppo_ds.rewards.rulez: cannot be imported (module 'ppo_ds.rewards' has no"],
        ),
        (
            {"_target_": "ppo_ds.rewardz.rules.RegexReward"},
            ["reward._target_=ppo_ds.rewardz.rules.RegexReward: cannot be imported (No module named"],
        ),
        ({"_target_": "my.own.reward", "anything": 1}, []),  # not from ppo_ds: checked when it is imported
    ],
)
def test_wrong_arguments_are_found_without_an_import(section: dict[str, Any], lines: list[str]) -> None:
    found = list(misused_targets(section, "reward"))
    assert len(found) == len(lines), found
    assert all(line.startswith(expected) for line, expected in zip(found, lines, strict=True)), found


def test_they_are_reported_with_all_other_problems() -> None:
    lines = complaints(*MINIMAL[3:], "reward=function", "reward.pth=x", "algo.epoch=1", "run.steps=0")
    assert [line.split(":")[0] for line in lines] == [
        "run.steps=0",
        "actor.model.path is missing",
        "algo.epoch=1",
        "reward.pth=x",
        "reward.path is missing",
    ]


def test_torch_is_not_imported_for_them() -> None:
    code = (
        "import sys, launch.train\n"
        "code = launch.train.main(['+experiment=rlhf', 'reward=function', 'reward.pth=x'])\n"
        "sys.exit(10 * code + ('torch' in sys.modules))"
    )
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert run.returncode == 20 and "reward.pth=x: no such key" in run.stderr, run.stderr
