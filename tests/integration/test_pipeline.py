"""Tests a whole pipeline with tiny models: SFT, reward model, PPO, evaluation, stop and resumption."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.faults.pipeline_lab import LIMIT, STAGES, kill_session, make, run, start

pytestmark = pytest.mark.slow


def test_a_stopped_pipeline_goes_on_and_ends_with_a_comparison(tmp_path: Path) -> None:
    make(tmp_path)
    folder, log = tmp_path / "outputs" / "sums", tmp_path / "sums.log"
    process = start(tmp_path, "sums", "reward_model:run.steps=100000")
    try:
        deadline = time.monotonic() + LIMIT
        metrics = folder / "reward_model" / "metrics.jsonl"
        # the file exists before the run handles signals, its first line does not
        while not (metrics.exists() and metrics.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT) == 143, log.read_text()
    finally:
        kill_session(process.pid)
    reasons = [json.loads((folder / name / "summary.json").read_text())["exit_reason"] for name in STAGES[:2]]
    assert reasons == ["done", "signal"] and not (folder / "ppo").exists()

    log.unlink()
    assert run(tmp_path, "sums") == 0, log.read_text()
    said = [line for line in log.read_text().splitlines() if line.startswith("pipeline ")]
    assert said[0] == "pipeline   sums: sft (1 of 4): is done" and len(said) == 4, said
    critic = next(line for line in log.read_text().splitlines() if line.startswith("critic "))
    assert critic.split()[1] == "outputs/sums/reward_model/model"
    result = json.loads((folder / "evaluation.json").read_text())
    assert result["prompts"] == 20 and list(result["rewards"]) == ["reward", "judge"]
    for found in result["rewards"].values():
        assert list(found["score"]) == ["base", "sft", "ppo"]
        assert list(found["win_rate"]["ppo"]) == ["base", "sft"]
    assert list(result["models"]) == ["base", "sft", "ppo"]

    log.unlink()
    assert run(tmp_path, "sums") == 0
    said = [line for line in log.read_text().splitlines() if line.startswith("pipeline ")]
    assert len(said) == 4 and all(line.endswith(": is done") for line in said)
