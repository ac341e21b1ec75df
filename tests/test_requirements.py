"""Tests that what the requirements in docs/requirements.md name exists: keys, files, functions, metrics."""

from __future__ import annotations

import ast
import itertools
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from ppo_ds.config.reading import dotted_keys
from ppo_ds.config.schema import Config

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "requirements.md").read_text(encoding="utf-8")
SOURCES = "\n".join(
    file.read_text(encoding="utf-8")
    for pattern in ("ppo_ds/**/*.py", "conf/**/*.yaml")
    for file in ROOT.glob(pattern)
)
KEYS = set(dotted_keys(Config))
GROUPS = {"algo", "reward", "zero", "tracker", "debug", "+experiment", "+pipeline"}
METRICS = tuple(
    f"{prefix}/"
    for prefix in "adv eval health kl mem parity perf policy reward rm rollout sft time value".split()
)
# words of Python, torch and transformers
OTHERS = {"no_grad", "empty_cache", "save_pretrained", "from_pretrained"}
# the numbers of requirements; D1 to D6 share their rows with requirements of E
COUNTS = {"A": 52, "B": 20, "C": 37, "D": 6, "E": 12}


@cache
def rows() -> dict[str, str]:
    """Returns the last column of each row of the tables, by the row's first column."""
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in PAGE.splitlines() if line.startswith("| ")]
    return {row[0]: row[-1] for row in cells if row[0] not in ("#", "DeepSpeed-Chat")}


def expanded(pattern: str) -> list[str]:
    """Expands each {a,b} like a shell."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


def names(source: str) -> set[str]:
    """Returns the names of the functions, classes, methods and fields that a Python file defines."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@cache
def defined() -> set[str]:
    """Returns the names that the package defines, with those of parameters, and its string constants."""
    found = set()
    for file in ROOT.glob("ppo_ds/**/*.py"):
        source = file.read_text(encoding="utf-8")
        found |= names(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


@cache
def reward_keys() -> set[str]:
    """Returns the keys of all rewards in conf/reward, with those of the sections that they take."""
    found = set()
    for file in (ROOT / "conf" / "reward").glob("*.yaml"):
        module, _, name = yaml.safe_load(file.read_text())["_target_"].rpartition(".")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
        definition = next(node for node in tree.body if getattr(node, "name", None) == name)
        for node in ast.walk(definition):
            if isinstance(node, ast.FunctionDef) and node.name in (name, "__init__"):
                found |= {f"reward.{argument.arg}" for argument in (*node.args.args, *node.args.kwonlyargs)}
    sections = {"model": "actor.model.", "zero": "actor.zero."}
    return found | {
        f"reward.{name}.{key.removeprefix(prefix)}"
        for name, prefix in sections.items()
        for key in KEYS
        if key.startswith(prefix)
    }


def is_key(name: str) -> bool:
    if name.endswith(".*"):
        return name[:-2] in KEYS
    return name in KEYS or name in reward_keys() or any(key.endswith(f".{name}") for key in KEYS)


def is_setting(word: str) -> bool:
    """Returns whether ``word`` is KEY=VALUE, or the option of a config group such as algo=grpo."""
    key, _, value = word.partition("=")
    if key in GROUPS:
        return (ROOT / "conf" / key.removeprefix("+") / f"{value}.yaml").exists()
    return is_key(key)


def is_place(text: str) -> bool:
    """Returns whether ``text`` is a file or folder of the repository, or FILE: NAME with a name in it."""
    path, _, symbol = text.partition(": ")
    file = ROOT / path if path.startswith(("tests/", "conf/", "launch/", "docs/")) else ROOT / "ppo_ds" / path
    if not symbol:
        return file.exists()
    defined = names(file.read_text(encoding="utf-8"))
    return all(name in defined for name in symbol.partition("(")[0].split("."))


def is_metric(name: str) -> bool:
    """Returns whether the code logs a metric; its prefix and its last part may be written separately."""
    prefix, _, last = name.partition("/")
    if last == "*":
        return f'"{prefix}/' in SOURCES
    stems = (f'"{name}"', f'/{last}"', f'"{last}"', f'"{prefix}/{last.partition("_")[0]}_{{')
    return any(stem in SOURCES for stem in stems)


def is_output(name: str) -> bool:
    """Returns whether ``name`` is a file or folder that a run writes."""
    known = "metrics.jsonl events.jsonl report.html curves.png samples/ model/ model_ema/ critic/ adapter/"
    first = name.partition("/")[0] if "/" in name else name
    return name.startswith(tuple(known.split())) and f'"{first}"' in SOURCES


@cache
def exists(span: str) -> bool:
    """Returns whether the thing exists that a span of code in the page names."""
    if span in OTHERS or is_output(span):
        return True
    if "=" in span.split("(")[0]:
        return all(is_setting(word) for word in span.split())
    if span.startswith(METRICS) and not span.endswith(".py") and ".py:" not in span:
        return all(is_metric(name) for name in expanded(span))
    if "/" in span or ".py" in span:
        return is_place(span)
    options = [path.stem for path in (ROOT / "conf").glob("*/*.yaml")]
    return all(is_key(name) for name in expanded(span)) or span in options or span in defined()


def test_the_page_has_all_requirements() -> None:
    keys = [key for key in rows() if re.match(r"[A-E]\d", key)]
    numbers = [number for key in keys for number in key.split("/")]
    wanted = [f"{letter}{i + 1}" for letter, count in COUNTS.items() for i in range(count)]
    assert sorted(numbers) == sorted(wanted) and len(keys) == 122


@pytest.mark.parametrize("key", rows())
def test_each_row_names_things_that_exist(key: str) -> None:
    answer = rows()[key]
    assert answer.strip()
    missing = [span for span in re.findall(r"`([^`]+)`", answer) if not exists(span)]
    assert not missing, f"{key}: {missing}"


@pytest.mark.parametrize("wrong", ["algo.kl.coeff", "algo=nope", "ppo/nowhere.py", "kl/nothing_mean"])
def test_things_that_do_not_exist_are_found(wrong: str) -> None:
    assert not exists(wrong)
