"""Tests runs in which a rank runs out of memory, and resumes on machines with another memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml

from ppo_ds.config.validation import validated
from ppo_ds.engine.memory_budget import cpu_memory
from ppo_ds.planning.budgets import resolve
from ppo_ds.planning.run_memory import USABLE, Hardware
from ppo_ds.tools.doctor.ppo import plan_ppo
from ppo_ds.tools.doctor.report import Report
from tests.faults.memory_worker import GIB, REPEATED
from tests.faults.worlds_worker import config
from tests.invariant import invariant_assets
from tests.support.forked import Ranks
from tests.support.ranks import RankServer
from tests.support.run_files import compared as steps

pytestmark = pytest.mark.slow


def memory(run_dir: Path) -> dict[str, Any]:
    return yaml.safe_load((run_dir / "config.yaml").read_text())["memory"]


def saved_memory(run_dir: Path, step: int) -> dict[str, Any]:
    state = run_dir / "checkpoints" / f"step_{step:06d}" / "state.json"
    return json.loads(state.read_text())["settings"]["memory"]


def test_a_repeated_phase_gives_the_run_with_half_the_budget(root: Path, rank_server: RankServer) -> None:
    codes, said = rank_server.run("tests.faults.memory_worker:repeat", 2, str(root))
    assert codes == [0, 0], said[-6000:]
    for name, (_, _, key) in REPEATED.items():
        failed, small = root / name / "failed", root / name / "small"
        assert steps(failed) == steps(small) != [], name
        assert memory(failed) == memory(small) == saved_memory(failed, 1), name
        before = {"rollout_tokens": 200, "score_tokens": 150, "train_tokens": 100}[key]
        record = {key: {"before": before, "tokens": before // 2, "ranks": 2}}
        assert (
            json.loads((failed / "memory.json").read_text()) == record and memory(failed)[key] == before // 2
        )
        assert f"with memory.{key}={before}: it is repeated with {before // 2}, which the run keeps" in said
    # where graphs are kept, the phase is repeated without them, with the same budget
    failed, off = root / "kept graphs" / "failed", root / "kept graphs" / "off"
    assert "out of memory in log-probs and values: it is repeated with memory.reuse_forwards=off" in said
    assert steps(failed) == steps(off) != []
    assert memory(failed)["score_tokens"] == 300 and not (failed / "memory.json").exists()
    assert said.count("it is repeated with") == len(REPEATED) + 1


@pytest.mark.parametrize(
    ("stage", "fault", "key", "done"),
    [(2, "update:rank=1:at=2", "train_tokens", 1), (3, "score:rank=0:at=2", "score_tokens", 1)],
)
def test_other_phases_end_all_ranks_and_the_same_command_resumes_with_half_the_budget(
    root: Path, rank_server: RankServer, stage: int, fault: str, key: str, done: int
) -> None:
    run_dir, ranks = root / f"ended {stage}", Ranks(rank_server)
    arguments = [
        f"run.dir={run_dir}",
        "run.steps=2",
        f"actor.model.path={root}/actor",
        "actor.model.dtype=fp32",
        f"data.path={root}/prompts.jsonl",
        f"critic.model.path={root}/scorer",
        "critic.init=path",
        *(f"{role}.zero.stage={stage}" for role in ("actor", "critic")),
        "rollout.prompts_per_step=4",
        "sampling.max_new_tokens=10",
        "checkpoint.every=1",
        "reward=function",
        f"reward.path={invariant_assets.__file__}:score",
        *("memory.rollout_tokens=200", "memory.score_tokens=150", "memory.train_tokens=100"),
    ]
    before = {"train_tokens": 100, "score_tokens": 150}[key]
    codes, said = ranks.run(2, arguments, fault=f"memory@{fault}")
    assert codes == [1, 1] and len(steps(run_dir)) == done, said
    (line,) = [line for line in said.splitlines() if "out of memory" in line]
    assert line.startswith("error: rank ") and f"resumes with memory.{key}={before // 2} (fault at" in line
    assert "Traceback" not in said and saved_memory(run_dir, done)[key] == before

    codes, said = ranks.run(2, arguments)
    assert codes == [0, 0] and len(steps(run_dir)) == 2, said
    assert f"{key}={before // 2}: an earlier start ran out of memory with {before} " in said
    assert memory(run_dir)[key] == saved_memory(run_dir, 2)[key] == before // 2

    if stage == 3:
        return
    # the budget is halved only once
    again = [*(a.replace("run.steps=2", "run.steps=3") for a in arguments)]
    codes, said = ranks.run(2, again, fault=f"memory@{fault.replace(':at=2', '')}")
    assert codes == [1, 1] and f"={before // 2}, which was halved from {before} before: set a lower" in said
    assert memory(run_dir)[key] == before // 2


def test_a_resume_takes_the_numbers_of_the_checkpoint(
    root: Path, rank_server: RankServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, said = rank_server.run("tests.faults.memory_worker:resume", 2, str(root))
    assert codes == [0, 0], said[-6000:]
    small, large, moved = (root / "auto" / name for name in ("small", "large", "moved"))
    limits = {"rollout_tokens": 32768, "score_tokens": 16384, "train_tokens": 8192}
    limits |= {"layout": "auto", "reuse_forwards": "auto", "sequence_parallel": 1}
    assert memory(large) == limits
    # one row each: the longest prompt has 24 tokens, a response at most 10
    row = dict.fromkeys(("rollout_tokens", "score_tokens", "train_tokens"), 34)
    assert memory(small) == memory(moved) == saved_memory(moved, 4) == limits | row
    assert steps(moved) == steps(small) and len(steps(small)) == 4
    assert steps(large) != steps(small), "the budgets make no difference, so the test shows nothing"
    assert "train_tokens=34: from the checkpoint" in said

    # the doctor shows the same arithmetic for the same machine
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=GIB))
    tree = config(root, stage=2) | {"memory": {}}
    settings = validated(tree, 2)
    plan = plan_ppo(settings, Hardware(2, None), Report())
    found = resolve(settings, plan.estimate, int(USABLE * cpu_memory(2)), on_gpu=False)
    assert found.numbers == row and len(found.lines) == 4
    assert all(line in said for line in found.lines)
    assert "train_tokens=8192: update_" in said and "a larger number is not faster" in said
