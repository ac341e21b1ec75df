"""Tests a whole run with rows and verifiers of reasoning-gym: resumed, and on two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppo_ds.examples.sums import prepare_stages
from tests.support.forked import Ranks

pytest.importorskip("reasoning_gym", reason="the extra reasoning-gym is not installed")
pytestmark = pytest.mark.slow

ARGUMENTS = (
    *("+experiment=grpo", "debug=tiny", "reward=reasoning_gym", "run.steps=4"),
    *(
        "actor.model.dtype=fp32",
        "data.path=reasoning_gym:chain_sum",
        "data.eval_path=reasoning_gym:chain_sum",
    ),
    *(
        "data.task.max_terms=2",
        "data.task.max_digits=1",
        "data.eval_task.size=40",
        "data.max_prompt_tokens=48",
    ),
    *("eval.every=2", "eval.max_prompts=8", "checkpoint.every=2", "tracker.samples=-1", "rollout.backend=hf"),
)


def trained(ranks: Ranks, count: int, folder: Path, *more: str) -> list[list[dict]]:
    """Runs four steps in ``folder``, from its checkpoint if it has one, and returns their samples."""
    model = f"actor.model.path={folder.parent}/tiny/model"
    codes, output = ranks.run(count, [*ARGUMENTS, model, f"run.dir={folder}", *more])
    assert codes == count * [0] and "rows have changed" not in output, output
    files = sorted((folder / "samples").glob("step_*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def test_a_run_resumes_with_the_same_rows_and_ranks_share_them(ranks: Ranks, tmp_path: Path) -> None:
    prepare_stages(str(tmp_path / "tiny"), seed=0)
    whole = trained(ranks, 1, tmp_path / "whole")
    assert len(whole) == 4 and any(row["score"] > 0 for step in whole for row in step)
    trained(ranks, 1, tmp_path / "parts", "run.stop_at_step=2")
    assert trained(ranks, 1, tmp_path / "parts") == whole
    asked = [[(row["asked"], row["columns"]) for row in step] for step in whole]
    parallel = trained(ranks, 2, tmp_path / "parallel")
    assert [[(row["asked"], row["columns"]) for row in step] for step in parallel] == asked
    assert all(row["columns"]["task"] == "chain_sum" for step in whole for row in step)
