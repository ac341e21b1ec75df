"""Tests a whole pipeline with tiny models: SFT, reward model, PPO, evaluation, stop and resumption."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from ppo_ds.models import tiny
from tests.faults.pipeline_lab import LIMIT, PIPELINE, STAGES, kill_session, make, run, start
from tests.support.environment import environment

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


def test_the_dry_run_of_deepspeed_chat_works_with_local_stand_ins(tmp_path: Path) -> None:
    """The scorer has the architecture of OPT-350m, whose output is projected and not normalized first."""
    tokenizer = tiny.character_tokenizer("abcdefghijklmnopqrstuvwxyz :\nHA")
    for name, width, before in (("actor", 32, True), ("scorer", 16, False)):
        config = OPTConfig(
            vocab_size=tokenizer.vocab_size, hidden_size=32, word_embed_proj_dim=width, num_hidden_layers=2,
            num_attention_heads=2, ffn_dim=64, do_layer_norm_before=before, pad_token_id=tokenizer.pad_id,
            bos_token_id=tokenizer.stop_ids[0], eos_token_id=tokenizer.stop_ids[0],
        )  # fmt: skip
        torch.manual_seed(0)
        tiny.save(OPTForCausalLM(config), tokenizer, tmp_path / name)
    rows = [
        {
            "prompt": f"\n\nHuman: {c}{d}\n\nAssistant:",
            "response": " yes",
            "chosen": " yes",
            "rejected": " no",
        }
        for c in "abcdef"
        for d in "abcdef"
    ]
    (tmp_path / "rm.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    local = ["data.path=rm.jsonl", "data.eval_path=rm.jsonl", "sft:actor.model.path=actor"]
    done = subprocess.run(
        [sys.executable, PIPELINE, "+pipeline=deepspeed_chat", "ranks=1", "run.dry_run=true", *local,
         "reward_model:scorer.model.path=scorer"],
        cwd=tmp_path, env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert done.stdout.count("dry run: config, data, ") == 3
    assert not (tmp_path / "outputs" / "deepspeed_chat").exists()
