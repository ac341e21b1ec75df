"""Collects the results of the workers of this folder over all ranks."""

from __future__ import annotations

from typing import Any

from ppo_ds.distributed.world import World


def on_all_ranks(world: World, case: dict[str, Any]) -> dict[str, Any]:
    """Returns the case with each bool replaced by whether it is true on every rank."""
    others = world.gather_objects(case)
    agreed = {key: all(o[key] for o in others) for key, value in case.items() if isinstance(value, bool)}
    return case | agreed
