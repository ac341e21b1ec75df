"""Tests that random config trees and command lines give a Config or error lines that name the cause."""

from __future__ import annotations

import copy
import re
from typing import Any

import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from launch.cli import load_config, to_yaml
from ppo_ds.config.reading import dotted_keys
from ppo_ds.config.schema import Config, resolved
from ppo_ds.config.targets import bind
from ppo_ds.config.validation import validated
from ppo_ds.errors import UserError
from tests.config.commands import MINIMAL

KEYS = dotted_keys(Config)
NAMED = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, KEYS))})(?!\w)")
TREE = {
    "run": {"steps": 2},
    "actor": {"model": {"path": "org/actor"}},
    "rollout": {"prompts_per_step": 16},
    "sampling": {"max_new_tokens": 8},
    "data": {"path": "org/prompts"},
    "reward": {"_target_": "ppo_ds.rewards.function.FunctionReward", "path": "pkg.mod:score"},
}
TARGETS = [
    "ppo_ds.rewards.function.FunctionReward", "ppo_ds.rewards.model.model_reward",
    "ppo_ds.rewards.weighted.WeightedReward",
    "ppo_ds.rewards.rules.NumericReward", "ppo_ds.rewards.rules.FormatReward",
    "ppo_ds.rewards.remote.RemoteReward", "no.such.thing", "",
    ".", None, 5,
]  # fmt: skip

texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["auto", "1e-6", "null", "nan", "~nobody/x", "${run.name}", "${", "a\nb: c", "/", ".", "", "x" * 300]
    ),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 40), st.floats(), st.floats(0, 2), texts
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=4,
)
keys = st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS).map(lambda key: f"{key}.x"), texts)
rewards = st.dictionaries(
    st.sampled_from(["_target_", "path", "model", "parts", "column", "patterns", "url", "options"]),
    values,
    max_size=4,
).flatmap(lambda section: st.sampled_from(TARGETS).map(lambda target: {**section, "_target_": target}))


def put(tree: dict[Any, Any], key: str, value: Any) -> None:
    """Sets a dotted key. If the tree has a value where the key needs a section, replaces it by a section."""
    *sections, last = key.split(".")
    for name in sections:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    tree[last] = value


def expect_lines(error: UserError, *given: str) -> None:
    """Checks that each error is one printable line about a key, a flag or one of the given arguments."""
    assert error.problems
    for line in error.problems:
        assert line.isprintable() and line.strip(), line
        # UserError escapes unprintable characters
        heads = [UserError(argument.lstrip("+~").partition("=")[0][:40]).problems[0] for argument in given]
        assert NAMED.search(line) or "--" in line or any(head in line for head in heads), line


def expect_the_same_again(config: Config, ranks: int) -> None:
    """Checks that reading the written config.yaml again gives the same config."""
    again = validated(yaml.safe_load(to_yaml(resolved(config))), ranks)
    assert resolved(again) == resolved(config)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.lists(st.tuples(keys, values), min_size=1, max_size=3),
    rewards | st.just(TREE["reward"]),
    st.integers(1, 9),
)
def test_any_tree(changes: list[tuple[str, Any]], reward: dict[str, Any], ranks: int) -> None:
    tree = copy.deepcopy(TREE) | {"reward": reward}
    for key, value in changes:
        put(tree, key, value)
    try:
        config = validated(tree, ranks)
        bind(config.reward, "reward")
    except UserError as error:
        expect_lines(error, *(key for key, _ in changes), "reward")
    else:
        expect_the_same_again(config, ranks)


arguments = st.one_of(
    st.tuples(
        st.sampled_from(["", "+", "++", "~", "--", "-"]),
        keys,
        st.sampled_from(["=", "", "==", "= ", ":"]),
        values.map(str),
    ).map("".join),
    st.tuples(
        st.sampled_from(["algo", "reward", "tracker", "zero", "+experiment", "model@actor.model", "x@y"]),
        texts,
    ).map("=".join),
    st.sampled_from(MINIMAL).flatmap(
        lambda good: st.integers(0, len(good)).flatmap(
            lambda i: texts.map(lambda t: good[:i] + t + good[i + 1 :])
        )
    ),
    texts,
)


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(arguments, min_size=1, max_size=3))
@example(["run.dir=~nobody/x"])
@example(["actor.optim.betas.x=1"])
@example(["x" * 300 + "=1"])
@example(["run.name=\\${x}"])
def test_any_command_line(given: list[str]) -> None:
    try:
        config = load_config([*MINIMAL, *given], world_size=1)
    except UserError as error:
        expect_lines(error, *given)
    except SystemExit as end:  # --help and --cfg
        assert end.code == 0
    else:
        expect_the_same_again(config, 1)
