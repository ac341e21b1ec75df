"""Kills runs of two ranks at random moments: they end bit-identical to undisturbed runs.

About 60 % of the kills come at random times from the start of the process on. The others come at the fault
points of distributed/faults.py, most of which are inside a save. The signals are SIGKILL and SIGTERM, to one
rank or to all ranks. After each kill the same command starts again. A run that reaches its end is compared,
and the next run begins.

    PPO_DS_KILLS=100            kills in total, half of them on ZeRO-2 and half on ZeRO-3
    PPO_DS_KILL_SEED=N          the seed of the random choices; by default different each time
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppo_ds.engine.checkpoint.checkpoints import damage_of
from tests.faults.test_fault_checkpoints import SHARDED, Lab, assert_equal_ends, metrics, steps, whole
from tests.support.forked import Ranks
from tests.support.ranks import RankServer

pytestmark = pytest.mark.nightly

KILLS = int(os.environ.get("PPO_DS_KILLS", "100"))
SEED = int(os.environ.get("PPO_DS_KILL_SEED", random.SystemRandom().randrange(10**6)))
STEPS = 40
MINUTES = 0.05
COUNTED = ("kills", "runs compared", "steps of each run", "repeated steps")  # for the summary
WORKER = "tests.faults.random_kills_worker:train"
FAULTS = {  # fault point -> highest number of the visit in a process at which a fault is injected
    "checkpoint.before": 2,
    "checkpoint.after_actor": 2,
    "checkpoint.after_critic": 2,
    "checkpoint.write": 12,
    "checkpoint.before_rename": 2,
    "checkpoint.after_rename": 2,
    "checkpoint.before_prune": 2,
    "generate.step": 60,
    "reward": 12,
    "update": 20,
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, rank_server: RankServer) -> Lab:
    return Lab(tmp_path_factory.mktemp("kills"), Ranks(rank_server))


def command(lab: Lab, stage: int, name: str) -> list[str]:
    zero = [f"{role}.zero.stage={stage}" for role in ("actor", "critic")]
    often = [f"checkpoint.minutes={MINUTES}", "checkpoint.every=null"]
    return whole(lab, name, f"run.steps={STEPS}", *zero, *often, *(SHARDED if stage == 3 else ()))


def newest_checkpoint(run_dir: Path) -> int:
    """Returns the step of the newest undamaged checkpoint, or 0 without a checkpoint."""
    folders = sorted((run_dir / "checkpoints").glob("step_*"), reverse=True)
    return next((int(folder.name[5:]) for folder in folders if not damage_of(folder)), 0)


class Killer:
    """Chooses how each start is killed, and counts where the kills occurred."""

    def __init__(self, choices: random.Random, startup: float, duration: float, log: Path):
        self.choices, self.startup, self.duration, self.log = choices, startup, duration, log
        self.phases: Counter[str] = Counter()
        self.signals: Counter[str] = Counter()

    def environment(self) -> dict[str, str]:
        """Chooses the next kill, and returns the environment variables that cause it."""
        self.log.unlink(missing_ok=True)
        choices = self.choices
        number = choices.choice([signal.SIGKILL, signal.SIGTERM])
        rank = choices.randrange(2)
        to_all = choices.random() < 0.4
        if choices.random() < 0.4:
            place = choices.choice(list(FAULTS))
            action = "kill" if number == signal.SIGKILL else "stop"
            self.chosen = f"{number.name} {'to all' if to_all else 'to one'}", f"at {place}"
            ranks = "" if to_all else f":rank={rank}"
            return {"PPO_DS_FAULT": f"{action}@{place}:at={choices.randint(1, FAULTS[place])}{ranks}"}
        if choices.random() < 0.25:
            after = choices.uniform(0.0, self.startup)
        else:
            after = self.startup + choices.uniform(0.0, min(8.0, self.duration - self.startup))
        self.chosen = f"{number.name} {'to all' if to_all else 'to one'}", ""
        kill = {"rank": rank, "signal": number, "after": after, "all": to_all, "log": str(self.log)}
        return {"KILL": json.dumps(kill)}

    def count(self) -> None:
        """Counts the kill that was chosen last; it has ended the ranks."""
        name, place = self.chosen
        self.signals[name] += 1
        self.phases[place or self.log.read_text()] += 1


@pytest.mark.parametrize("stage", [2, 3])
def test_randomly_killed_runs_end_like_undisturbed_ones(
    lab: Lab, rank_server: RankServer, stage: int, record_property: Callable[[str, object], None]
) -> None:
    print(f"\nPPO_DS_KILL_SEED={SEED}")
    began = time.monotonic()
    undisturbed = lab.root / f"undisturbed_{stage}"
    group = rank_server.start(WORKER, 2, "launch.train:main", *command(lab, stage, undisturbed.name))
    while not (undisturbed / "metrics.jsonl").exists() and time.monotonic() - began < 300:
        time.sleep(0.02)
    startup = time.monotonic() - began
    assert rank_server.wait(group) == [0, 0], group.output()
    killer = Killer(
        random.Random(SEED + stage), startup, time.monotonic() - began, lab.root / f"phase_{stage}"
    )

    goal = KILLS // 2 + (KILLS % 2 if stage == 2 else 0)
    kills = runs = repeated = 0
    history: list[Any] = []
    began = time.monotonic()
    while kills < goal or runs == 0 or history[-1][1] != [0, 0]:
        run_dir = lab.root / f"killed_{stage}_{runs}"
        environment = killer.environment() if kills < goal else {}
        group = rank_server.start(
            WORKER, 2, "launch.train:main", *command(lab, stage, run_dir.name), **environment
        )
        codes = rank_server.wait(group)
        history.append((environment, codes))
        known = f"seed {SEED}, start {len(history)}: {environment}: {codes}\n{group.output()[-4000:]}"
        assert set(codes) <= {0, 1, 143, -signal.SIGKILL, -signal.SIGTERM}, known
        if codes == [0, 0]:
            assert_equal_ends(run_dir, undisturbed, STEPS)
            runs += 1
            continue
        assert environment, known
        kills += 1
        killer.count()
        done = steps(run_dir)[-1:] if (run_dir / "metrics.jsonl").exists() else []
        repeated += max(0, (done or [0])[0] - newest_checkpoint(run_dir))
        found = metrics(run_dir)
        assert found[:-1] == metrics(undisturbed)[: len(found[:-1])], known
    seconds = time.monotonic() - began
    figures = {
        "seed": SEED, "kills": kills, "runs compared": runs, "steps of each run": STEPS,
        "repeated steps": repeated, "seconds": round(seconds, 1), "starts": len(history),
        "signals": dict(killer.signals.most_common()), "phases": dict(killer.phases.most_common()),
    }  # fmt: skip
    print(f"ZeRO-{stage}: {json.dumps(figures, indent=1)}")
    record_property(f"ZeRO-{stage}", ", ".join(f"{name} {figures[name]}" for name in ("seed", *COUNTED)))
