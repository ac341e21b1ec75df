"""Maps renamed keys to their current names. Using an old name is an error; its message gives the new name.

Settings stored in checkpoints and run directories before a renaming are read under the new names, so that old
runs can be resumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# Old key -> new key. The keys below a renamed section move with it. More specific names come first.
RENAMED = {
    "algo.reward.place": "algo.reward_shaping.score_position",
    "algo.reward": "algo.reward_shaping",
    "algo.correction": "algo.rollout_is",
    "algo.level": "algo.action_level",
    "algo.policy.kind": "algo.policy.loss",
    "algo.mask.include_eos": "algo.train_on_eos",
    "run.may_change": "run.resume_allow_changes",
    "health.on_kl": "health.kl_action",
    "data.text_as_chat": "data.apply_chat_template",
    "actor.zero.generate": "actor.zero.generation_gather",
}


def current_name(key: str) -> str | None:
    """Returns the current name of a renamed key, or None for a key that was not renamed."""
    for old, new in RENAMED.items():
        if key == old or key.startswith(f"{old}."):
            return new + key.removeprefix(old)
    return None


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Copies a nested dict of stored settings with every renamed key under its current name."""
    current: dict[str, Any] = {}
    for path, value in leaves(settings):
        new = current_name(".".join(path))
        *sections, name = new.split(".") if new else path
        section = current
        for inner in sections:
            if not isinstance(section.setdefault(inner, {}), dict):  # a damaged file has both a.b and a.b.c
                section[inner] = {}
            section = section[inner]
        section[name] = value
    return current


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path and the value of every key at or below ``path``; an empty mapping is a value."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    else:
        yield path, value
