"""Tests that renamed keys are refused on the command line and translated in stored settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_ds.config.reading import dotted_keys
from ppo_ds.config.renamed import RENAMED, current_name, with_current_names
from ppo_ds.config.resume import check_resume
from ppo_ds.config.schema import Config, resolved
from tests.config.commands import MINIMAL, complaints, compose


def test_the_table_maps_old_keys_to_keys_of_the_config() -> None:
    known = dotted_keys(Config)
    assert not [old for old in RENAMED if old in known]
    assert [new for new in RENAMED.values() if new not in known] == []


def test_the_most_specific_name_wins() -> None:
    assert current_name("algo.reward.place") == "algo.reward_shaping.score_position"
    assert current_name("algo.reward.clip") == "algo.reward_shaping.clip"
    assert current_name("algo.rewards") is None


@pytest.mark.parametrize(
    ("argument", "new"),
    [
        ("algo.reward.place=next_token", "algo.reward_shaping.score_position"),
        ("algo.reward.clip=3", "algo.reward_shaping.clip"),
        ("algo.correction.kind=tis", "algo.rollout_is.kind"),
        ("algo.level=sequence", "algo.action_level"),
        ("algo.policy.kind=gspo", "algo.policy.loss"),
        ("algo.mask.include_eos=false", "algo.train_on_eos"),
        ("run.may_change=[data]", "run.resume_allow_changes"),
        ("health.on_kl=stop", "health.kl_action"),
        ("data.text_as_chat=true", "data.apply_chat_template"),
        ("actor.zero.generate=layers", "actor.zero.generation_gather"),
    ],
)
def test_an_old_key_is_an_error_that_names_the_new_one(argument: str, new: str) -> None:
    (line,) = complaints(*MINIMAL, argument)
    assert line == f"{argument}: is called {new} now"


def test_old_keys_are_reported_together_with_other_problems() -> None:
    lines = complaints(*MINIMAL, "algo.reward={clip:3,place:next_token}", "algo.epoch=3")
    assert lines == [
        "algo.reward.clip=3: is called algo.reward_shaping.clip now",
        "algo.reward.place=next_token: is called algo.reward_shaping.score_position now",
        "algo.epoch=3: no such key; did you mean algo.epochs?",
    ]


def under_old_names() -> dict:
    """Returns the settings of a checkpoint that was written before the keys were renamed."""
    tree = json.loads(json.dumps(resolved(compose(*MINIMAL))))
    algo = tree["algo"]
    algo["reward"] = algo.pop("reward_shaping")
    algo["reward"]["place"] = algo["reward"].pop("score_position")
    algo["correction"] = algo.pop("rollout_is")
    algo["level"] = algo.pop("action_level")
    algo["policy"]["kind"] = algo["policy"].pop("loss")
    algo["mask"] = {"include_eos": algo.pop("train_on_eos")}
    tree["run"]["may_change"] = tree["run"].pop("resume_allow_changes")
    tree["health"]["on_kl"] = tree["health"].pop("kl_action")
    tree["data"]["text_as_chat"] = tree["data"].pop("apply_chat_template")
    zero = tree["actor"]["zero"]
    zero["generate"] = zero.pop("generation_gather")
    return tree


def test_stored_settings_are_read_under_the_current_names() -> None:
    assert with_current_names(under_old_names()) == json.loads(json.dumps(resolved(compose(*MINIMAL))))


def test_a_checkpoint_from_before_the_renaming_can_be_resumed() -> None:
    checkpoint = Path("outputs/ppo/checkpoints/step_000010")
    assert check_resume(under_old_names(), resolved(compose(*MINIMAL)), checkpoint) == []
    (line,) = check_resume(
        under_old_names(), resolved(compose(*MINIMAL, "algo.rollout_is.high=3")), checkpoint
    )
    assert line == "changed    since the checkpoint: algo.rollout_is.high 2.0 -> 3.0"
