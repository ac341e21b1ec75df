"""Tests that a decode backend with stale weights stops a run before it trains on wrong responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.parity_worker import CASES
from tests.support.ranks import RankServer

pytestmark = pytest.mark.slow
MEAN = "parity/logp_abs_diff_mean"


@pytest.fixture(scope="module")
def output(root: Path, rank_server: RankServer) -> str:
    """Runs all cases on two ranks and returns what they print."""
    codes, said = rank_server.run("tests.faults.parity_worker:main", 2, str(root))
    assert codes == [0, 0], said[-6000:]
    return said


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def ended(run_dir: Path) -> list[str]:
    events = map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())
    return [event["text"] for event in events if event["kind"] == "ended"]


@pytest.mark.parametrize("case", CASES)
def test_a_layer_left_out_of_the_copy_ends_the_run(root: Path, output: str, case: str) -> None:
    """The first copy is complete. The second lacks the first update of one layer."""
    text = ended(root / case / "stale")[0]
    assert text.startswith(f"max_parity: step 2: {MEAN}=") and "stale weights" in text
    saved = f"step 1 is saved in {root / case / 'stale'}/checkpoints/step_000001 "
    assert f"error: {text.removeprefix('max_parity: ')}; {saved}" in output
    first = steps(root / case / "stale")[0]
    assert first["step"] == 1 and first[MEAN] < 1e-5


def test_each_run_ends_with_one_line(root: Path, output: str) -> None:
    assert output.count("error:") == len(CASES) and "Traceback" not in output


def test_the_step_before_is_saved(root: Path, output: str) -> None:
    run_dir = root / "update" / "stale"
    assert [folder.name for folder in (run_dir / "checkpoints").glob("step_*")] == ["step_000001"]
    assert [line["step"] for line in steps(run_dir)] == [1]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit_reason"] == "max_parity" and not (run_dir / "model").exists()


def test_the_refused_step_leaves_no_trace(root: Path, output: str) -> None:
    """The run continues with a complete copy and ends with the weights of a run that never failed."""
    repaired, whole = (root / "rollout" / name for name in ("stale", "whole"))
    assert len(ended(repaired)) == 2 and [line["step"] for line in steps(repaired)] == [1, 2, 3]
    assert all(line[MEAN] < 1e-5 for line in steps(repaired))
    weights, expected = (load_file(folder / "model" / "model.safetensors") for folder in (repaired, whole))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)
    start = load_file(root / "actor" / "model.safetensors")
    assert any((weights[name] - start[name]).abs().max() > 1e-3 for name in weights)
