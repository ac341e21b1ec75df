"""Kills a pipeline of SFT, reward model and PPO at random moments: it ends like an undisturbed one.

PPO_DS_PIPELINE_KILLS=3     number of kills
PPO_DS_KILL_SEED=N          the seed of the random moments; by default different each time
PPO_DS_KILLS_FILE=PATH      file for the figures, as JSON
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.pipeline_lab import LIMIT, STAGES, kill_session, make, run, start, wait_until_ended

pytestmark = pytest.mark.nightly

KILLS = int(os.environ.get("PPO_DS_PIPELINE_KILLS", "3"))
SEED = int(os.environ.get("PPO_DS_KILL_SEED", random.SystemRandom().randrange(10**6)))


def test_a_pipeline_that_is_killed_at_random_moments_ends_like_an_undisturbed_one(tmp_path: Path) -> None:
    make(tmp_path)
    began = time.monotonic()
    assert run(tmp_path, "undisturbed") == 0, log(tmp_path, "undisturbed")
    duration = time.monotonic() - began
    choices, kills = random.Random(SEED), []
    while len(kills) < KILLS:
        # a pipeline that has been killed before needs less time to its end
        after = choices.uniform(0.5, duration * (1 - len(kills) / (KILLS + 1)))
        process = start(tmp_path, "killed")
        try:
            code = process.wait(after)
            assert code == 0, f"seed {SEED}: {log(tmp_path, 'killed')}"
            break  # it ended before the kill
        except subprocess.TimeoutExpired:
            ended = kill_session(process.pid)
            process.wait(LIMIT)
            wait_until_ended(ended)
            kills.append({"after": round(after, 1), "processes": len(ended), "during": running(tmp_path)})
    assert run(tmp_path, "killed") == 0, f"seed {SEED}: {log(tmp_path, 'killed')}"
    figures = {"seed": SEED, "seconds of an undisturbed pipeline": round(duration, 1), "kills": kills}
    print(json.dumps(figures, indent=1))
    for stage in STAGES:
        first, second = (weights(tmp_path / "outputs" / name / stage) for name in ("undisturbed", "killed"))
        assert first == second and first, f"seed {SEED}: {stage} has other weights"
        assert metrics(tmp_path, "undisturbed", stage) == metrics(tmp_path, "killed", stage)
    results = [
        json.loads((tmp_path / "outputs" / name / "evaluation.json").read_text())
        for name in ("undisturbed", "killed")
    ]
    for result in results:
        del result["tokens_per_second"], result["models"], result["data"]  # times and paths
    assert results[0] == results[1]
    if path := os.environ.get("PPO_DS_KILLS_FILE"):
        Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def weights(run_dir: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run_dir / "model").glob("*.safetensors")}


def metrics(folder: Path, name: str, stage: str) -> list[dict[str, Any]]:
    """Returns the metrics of all steps without times and memory."""
    lines = (folder / "outputs" / name / stage / "metrics.jsonl").read_text().splitlines()
    skipped = ("time", "perf/", "mem/", "elapsed")
    return [
        {key: value for key, value in json.loads(line).items() if not key.startswith(skipped)}
        for line in lines
    ]


def running(folder: Path) -> str:
    """Returns the job that the killed pipeline had begun last, and its steps so far."""
    record = folder / "outputs" / "killed" / "pipeline.json"
    if not record.exists():
        return "start-up"
    name, entry = list(json.loads(record.read_text())["jobs"].items())[-1]
    lines = folder / "outputs" / "killed" / name / "metrics.jsonl"
    steps = len(lines.read_text().splitlines()) if lines.exists() else 0
    return f"{name}, {'done' if entry['done'] else f'{steps} steps'}"


def log(folder: Path, name: str) -> str:
    return (folder / f"{name}.log").read_text()[-6000:]
