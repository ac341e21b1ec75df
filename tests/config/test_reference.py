"""Tests the description of every key in --help and in docs/config.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.cli import load_config
from ppo_ds.config.reading import dotted_keys
from ppo_ds.config.reference import help_on, help_on_part, keys_of, page, sections_of, values
from ppo_ds.config.schema import Config
from ppo_ds.errors import UserError

DOCS = Path(__file__).resolve().parents[2] / "docs" / "config.md"
SECTIONS = {"": Config, **dict(sections_of(Config))}
KEYS = [key for name, section in SECTIONS.items() for key in keys_of(section, name)]


def test_every_key_is_described_in_a_sentence() -> None:
    assert {key.name for key in KEYS} | SECTIONS.keys() - {""} == set(dotted_keys(Config))
    for key in KEYS:
        assert key.description.endswith(".") and "\n" not in key.description and key.type and key.default, key
    assert all(section.__doc__ and section.__doc__.strip().endswith(".") for section in SECTIONS.values())


def test_the_page_is_current() -> None:
    assert DOCS.read_text(encoding="utf-8") == page(), "python -m ppo_ds.config.reference > docs/config.md"


def test_a_section_lists_its_keys_with_type_default_and_meaning() -> None:
    text = help_on("algo.kl")
    assert all(f"  algo.kl.{name}\n" in text for name in ("place", "estimator", "coef", "max_coef"))
    assert "Type: number at least 0. Default: 0.05." in text
    assert "Type: number above 0 or null. Default: null." in text
    assert "Type: reward, loss, none. Default: reward." in text
    assert "Sections in algo (--help describes each): algo.kl, algo.gae" in help_on("algo")


def test_a_key_with_a_table_lists_its_entries() -> None:
    for key, table in values().items():
        assert all(name in help_on(key) and text in help_on(key) for name, text in table.items())
    assert "sapo" in values()["algo.policy.loss"]


def test_a_key_of_a_variant_names_its_variants() -> None:
    assert "description" not in help_on("algo.policy.tau_pos")
    assert "positive advantages. Only with loss sapo." in help_on("algo.policy.tau_pos")
    assert "Only with" not in help_on("algo.policy.top_entropy")


def test_an_unknown_topic_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"^--help algo.kll: no such section or key; did you mean algo.kl\?$"):
        help_on("algo.kll")


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["--help", "+experiment=rlhf"], ["+experiment=x", "--help"]]
)
def test_help_alone_names_groups_and_sections(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(arguments, world_size=1)
    shown = capsys.readouterr().out
    assert end.value.code == 0 and "+experiment=NAME" in shown and "--help SECTION" in shown
    assert all(f"\n  {name} " in shown for name in SECTIONS if name and "." not in name)


def test_help_on_a_section_comes_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help", "algo.kl"], world_size=1)
    assert capsys.readouterr().out == help_on("algo.kl")


def test_help_on_the_reward_lists_the_arguments_of_the_chosen_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help", "reward", "reward._target_=tests.config.test_targets.Machine"], world_size=1)
    shown = capsys.readouterr().out
    assert shown == help_on_part("reward", "tests.config.test_targets.Machine")
    assert "  reward.path\n    Type: text. Default: required.\n" in shown
    assert "  reward.batch\n    Type: integer at least 1. Default: 8.\n" in shown
    assert "tokenizer" not in shown


def test_help_on_a_reward_describes_the_arguments_as_its_docstring_does() -> None:
    shown = help_on_part("reward", "ppo_ds.rewards.function.FunctionReward")
    assert (
        "  reward.workers\n    Simultaneous calls on each rank; None: 4. Only with a pool.\n    Type: "
        in shown
    )
    assert "threads, in worker processes, or not at all (none). The calls of an async function in" in shown
    assert "The actor's tokenizer" not in shown


def test_help_on_the_reward_alone_says_how_to_list_its_arguments() -> None:
    assert "python launch/train.py --help reward reward=numeric\n" in help_on_part("reward", None)
    with pytest.raises(UserError, match=r"^reward\._target_=no\.such\.reward: cannot be imported"):
        help_on_part("reward", "no.such.reward")


def test_a_misspelled_topic_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(UserError, match=r"; did you mean algo\.policy\.loss\?$"):
        help_on("algo.polcy.loss")


def test_an_unknown_topic_without_a_similar_name_names_the_sections() -> None:
    with pytest.raises(
        UserError, match=r"^--help zzz: no such section or key; the sections are run, actor, "
    ):
        help_on("zzz")
