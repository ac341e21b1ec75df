"""Tests docs/coming_from.md against the table behind the hints on unknown keys."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.docs.pages import ROOT, prose
from tests.test_requirements import KEYS

SYSTEMS = tomllib.loads((ROOT / "ppo_ds" / "config" / "other_systems.toml").read_text(encoding="utf-8"))
KEY = re.compile(r"\b(?:[a-z_]+\.)+[a-z_]+\b")
OPEN = (
    "reward.model.path",
    "reward.path",
    "reward.url",
)  # arguments of rewards, which are no keys of the config


def rows() -> list[tuple[str, str, str]]:
    """Returns (keys of ppo_ds, system, setting) for each setting in a column of a system."""
    found, names = [], list[str]()
    for line in prose(ROOT / "docs" / "coming_from.md"):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            names = []
        elif not names:
            names = cells
        elif set(SYSTEMS) <= set(names):
            settings = [
                (name, re.findall(r"`([^`]+)`", cell)) for name, cell in zip(names, cells, strict=True)
            ]
            found += [(cells[0], name, one) for name, ones in settings[1:] for one in ones]
    return found


def known(system: str, setting: str) -> list[str]:
    """Returns what the table says on a setting, which a page may shorten to its last parts."""
    name = setting.removeprefix("--")
    return [keys for full, keys in SYSTEMS[system].items() if full == name or full.endswith(f".{name}")]


@pytest.mark.parametrize(("keys", "system", "setting"), rows())
def test_the_hints_know_each_setting_of_the_page_and_agree_with_it(
    keys: str, system: str, setting: str
) -> None:
    if setting in ("reward", "loss", "k1"):  # what the system does, not a setting of it
        return
    lines = known(system, setting)
    assert lines, "other_systems.toml does not have it"
    shown = keys.replace("zero=stage0", "actor.zero.stage critic.zero.stage actor.zero.offload_optimizer")
    factor = setting == "rollout.n"  # of the minibatch
    assert factor or any(key in shown for line in lines for key in KEY.findall(line))


def test_each_key_of_the_hints_exists() -> None:
    named = {key for settings in SYSTEMS.values() for line in settings.values() for key in KEY.findall(line)}
    assert named - KEYS - set(OPEN) == set()
    assert all(KEY.match(line) for settings in SYSTEMS.values() for line in settings.values())
    assert len(rows()) > 100 and "memory.train_tokens" in named
