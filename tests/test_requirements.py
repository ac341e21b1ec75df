"""Tests that what docs/dev/requirements.md names exists: keys, files, functions, metrics."""

from __future__ import annotations

import itertools
import re
from functools import cache
from pathlib import Path

import pytest

from ppo_ds.config.reading import dotted_keys
from ppo_ds.config.schema import Config
from ppo_ds.tracking.catalogue import SECTIONS, find

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "dev" / "requirements.md").read_text(encoding="utf-8")
KEYS = set(dotted_keys(Config))
GROUPS = {"algo", "reward", "zero", "tracker", "debug", "+experiment", "+pipeline"}
OPTIONS = {path.stem for path in (ROOT / "conf").glob("*/*.yaml")}
PREFIXES = tuple(f"{section.prefix}/" for section in SECTIONS if section.prefix)
OUTPUTS = tuple("metrics.jsonl events.jsonl report.html curves.png samples/ model critic/ adapter/".split())
# words of Python, torch and transformers
OTHERS = {"no_grad", "empty_cache", "save_pretrained", "from_pretrained"}
# the numbers of requirements; D1 to D6 share their rows with requirements of E
COUNTS = {"A": 52, "B": 20, "C": 37, "D": 6, "E": 12}


def rows() -> dict[str, str]:
    """Returns the last column of each row of the tables, by the row's first column."""
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in PAGE.splitlines() if line.startswith("| ")]
    return {row[0]: row[-1] for row in cells if row[0] not in ("#", "DeepSpeed-Chat")}


def expanded(pattern: str) -> list[str]:
    """Expands each {a,b} like a shell."""
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(choice) for choice in itertools.product(*parts)]


@cache
def sources(folder: str = "") -> str:
    return "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "ppo_ds" / folder).rglob("*.py"))


def is_defined(name: str, source: str) -> bool:
    """Returns whether a source defines a function, a class, a parameter or field, or has it as a text."""
    pattern = rf"(def|class) {name}\b|\b{name}: |\b{name}=|[\"']{name}[\"']|\b{name}[,)]"
    return re.search(pattern, source) is not None


def is_key(name: str) -> bool:
    name = name.removesuffix(".*")
    if name.startswith("reward.") and is_defined(name.rpartition(".")[2], sources("rewards")):
        return True
    last = name.removeprefix("reward.")  # its sections model and zero are those of the actor
    return name in KEYS or any(key.endswith(f".{last}") for key in KEYS)


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
    return all(is_defined(name, file.read_text()) for name in symbol.partition("(")[0].split("."))


def exists(span: str) -> bool:
    """Returns whether the thing exists that a span of code in the page names."""
    if span in OTHERS or span in OPTIONS or span.startswith(OUTPUTS):
        return True
    if "=" in span.split("(")[0]:
        return all(is_setting(word) for word in span.split())
    if span.startswith(PREFIXES) and ".py" not in span:
        return all(name.endswith("/*") or find(name) is not None for name in expanded(span))
    if "/" in span or ".py" in span:
        return is_place(span)
    return all(is_key(name) for name in expanded(span)) or is_defined(re.escape(span), sources())


def test_the_page_has_all_requirements() -> None:
    keys = [key for key in rows() if re.match(r"[A-E]\d", key)]
    numbers = [number for key in keys for number in key.split("/")]
    wanted = [f"{letter}{i + 1}" for letter, count in COUNTS.items() for i in range(count)]
    assert sorted(numbers) == sorted(wanted) and len(keys) == 122


@pytest.mark.parametrize("key", rows())
def test_each_row_names_things_that_exist(key: str) -> None:
    answer = rows()[key]
    missing = [span for span in re.findall(r"`([^`]+)`", answer) if not exists(span)]
    assert answer.strip() and not missing, f"{key}: {missing}"


@pytest.mark.parametrize(
    "wrong", ["algo.kl.coeff", "algo=nope", "ppo/nowhere.py", "ops/masked.py: nothing", "kl/nothing_mean"]
)
def test_things_that_do_not_exist_are_found(wrong: str) -> None:
    assert not exists(wrong)
