"""Runs launch/train.py as one rank, with a loop of sleeps and collectives in place of the trainer.

Every step reaches the places ``generate``, ``reward`` and ``update`` of PPO_DS_FAULT. Each rank writes to a
file in FOLDER when it last reached one of them.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from launch import train
from ppo_ds.distributed.faults import fault
from ppo_ds.errors import UserError

STEPS = 3
PHASES = ("generate", "reward", "update")


class Config:
    """Config of a stage without generation."""

    model_fields: ClassVar[dict[str, Any]] = {}

    def __init__(self, run: SimpleNamespace):
        self.run = run


class Loop:
    def __init__(self, world: Any, folder: Path, case: str):
        from ppo_ds.run.timing import PhaseTimer, compare_times

        self.compare_times = compare_times
        self.world, self.folder, self.case = world, folder, case
        self.timer = PhaseTimer(world.device)

    def fit(self) -> str:
        for step in range(STEPS):
            for phase in PHASES:
                with self.timer(phase):
                    self._work(phase)
                self.world.max_int(step)
            with (self.folder / f"spread{self.world.rank}").open("a") as file:
                metrics, _ = self.compare_times(self.world, self.timer.take()["time/step"])
                file.write(f"{metrics['health/rank_time_spread_s']}\n")
        return "done"

    def _work(self, phase: str) -> None:
        (self.folder / f"sign{self.world.rank}").write_text(str(time.time()))
        fault(phase)
        if self.case == "greedy" and self.world.rank == 1:
            ctypes.PyDLL(None).sleep(1000)  # PyDLL holds the GIL during the call
        time.sleep(0.02)

    def fail(self, error: BaseException) -> None:
        (self.folder / f"record{self.world.rank}").write_text(str(error))


def build(folder: Path, case: str, minutes: float, watch: Any) -> Loop:
    from ppo_ds.distributed.store import RankStore
    from ppo_ds.distributed.world import connect

    world = connect(minutes)
    (folder / f"pid{world.rank}").write_text(str(os.getpid()))
    watch.start(world, RankStore())
    if case == "late" and world.rank == 1:
        time.sleep(2)
    if case == "mistake on all" or (case == "mistake on one" and world.rank == 1):
        raise UserError("data.path=x.jsonl:7: no prompt", "reward.path=y: no such file")
    world.barrier()
    return Loop(world, folder, case)


def of_this_test() -> None:
    """Runs launch/train.py as one of two ranks, with stand-ins for loading and training."""
    folder, case = Path(sys.argv[1]), sys.argv[2]
    minutes = float(os.environ.get("TIMEOUT_MINUTES", "5"))
    sys.modules["ppo_ds.assemble.run"] = SimpleNamespace(
        build_run=lambda config, watch, **others: build(folder, case, minutes, watch)
    )
    settings = SimpleNamespace(dir=str(folder), verbose=False, dry_run=False, timeout_minutes=minutes)
    train.load_config = lambda argv: Config(settings)
    train.hub_names = lambda config: []
    train.open_screen = lambda: None
    train.main([])
