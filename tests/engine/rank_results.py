"""Shared frame of the workers of this folder: runs their cases on all ranks and writes the results."""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppo_ds.distributed.world import World, connect

Case = dict[str, Any]
HANG = 800  # seconds after which a hanging process prints its stacks and exits


def run_cases(cases: Callable[[World, Path, str], Iterable[Case]]) -> None:
    """Runs the cases of a worker, whose arguments are a folder and a mode; writes MODE-RANKS.json there."""
    root, mode = Path(sys.argv[1]), sys.argv[2]
    faulthandler.dump_traceback_later(HANG, exit=True)
    world = connect(5)
    found = [on_all_ranks(world, case) for case in cases(world, root, mode)]
    if world.is_main:
        (root / f"{mode}-{world.size}.json").write_text(json.dumps(found))
    world.close()


def on_all_ranks(world: World, case: Case) -> Case:
    """Returns the case with each bool replaced by whether it is true on every rank that has it."""
    others = world.gather_objects(case)
    return case | {
        key: all(other[key] for other in others if key in other)
        for key, value in case.items()
        if isinstance(value, bool)
    }


def same(a: dict[str, Tensor] | None, b: dict[str, Tensor] | None) -> bool:
    """Returns whether two states are bit-identical, and True on ranks without states."""
    return (
        a is None or b is None or (a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a))
    )
