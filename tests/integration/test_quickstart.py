"""Tests `make quickstart`: it learns, and writes the files that the README names."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from ppo_ds.examples.sums import reward
from ppo_ds.tracking.catalogue import find
from ppo_ds.tracking.jsonl import read_events
from tests.integration.launching import run as run_command
from tests.support.environment import ROOT, environment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns the directory of the PPO run and the output of one quickstart with its defaults."""
    cwd = tmp_path_factory.mktemp("quickstart")
    command = [sys.executable, str(ROOT / "launch" / "pipeline.py"), "+pipeline=quickstart"]
    done = run_command(command, cwd, environment())
    assert done.returncode == 0, done.stdout + done.stderr
    return cwd / "outputs" / "quickstart" / "ppo", done.stdout


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_no_stage_raises_an_alarm_and_every_metric_is_documented(run):
    stages = [file.parent for file in run[0].parent.glob("*/metrics.jsonl")]
    assert len(stages) >= 2
    for folder in stages:
        assert [event["kind"] for event in read_events(folder / "events.jsonl")] == [
            "started",
            "evaluated",
            "ended",
        ]
        assert [name for line in metrics(folder) for name in line if find(name) is None] == []


def test_held_out_accuracy_rises_by_25_points(run):
    summary = json.loads((run[0] / "summary.json").read_text())
    assert 0.35 < summary["heldout_accuracy_before"] < 0.65
    assert summary["heldout_accuracy_after"] - summary["heldout_accuracy_before"] >= 0.25
    assert summary["exit_reason"] == "done"


def test_kl_starts_at_zero_and_stays_bounded(run):
    kl = [line["kl/ref_seq_mean"] for line in metrics(run[0])]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert all(math.isfinite(x) and abs(x) < 5 for x in kl)
    assert kl[-1] > 0.01  # the policy has changed


def test_every_step_is_recorded_and_on_policy(run):
    lines = metrics(run[0])
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert all(line["parity/ratio_first_minibatch_max"] == pytest.approx(1, abs=1e-5) for line in lines)
    assert all(line["parity/logp_abs_diff_max"] < 1e-3 for line in lines)
    assert all(line["health/nonfinite"] == 0 for line in lines)


def test_the_saved_model_is_the_one_that_was_measured(run):
    """Decoded by transformers, the saved model solves as many held-out sums as the run reports."""
    folder = run[0]
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder / "model"),
        AutoTokenizer.from_pretrained(folder / "model"),
    )
    heldout = folder.parent / "sft" / "start" / "heldout.jsonl"
    rows = [json.loads(line) for line in heldout.read_text().splitlines()]
    right = 0.0
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(ids, max_new_tokens=8, do_sample=False)
        right += reward(
            [row["prompt"]], [tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)], [row]
        )[0]
    after = json.loads((folder / "summary.json").read_text())["heldout_accuracy_after"]
    # two of 400 sums may differ, where rounding decides ties
    assert right / len(rows) == pytest.approx(after, abs=0.0051)


def test_the_evaluation_compares_base_sft_and_ppo(run):
    summary = json.loads((run[0] / "summary.json").read_text())
    found = json.loads((run[0].parent / "evaluation.json").read_text())["rewards"]["reward"]
    accuracy = {name: estimate["mean"] for name, estimate in found["score"].items()}
    assert accuracy["base"] < 0.05
    assert accuracy["sft"] == pytest.approx(summary["heldout_accuracy_before"], abs=0.0051)
    assert accuracy["ppo"] == pytest.approx(summary["heldout_accuracy_after"], abs=0.0051)
    assert found["win_rate"]["ppo"]["sft"]["low"] > 0.5


def test_what_is_left_behind(run):
    folder, output = run
    assert (folder / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert AutoModelForSequenceClassification.from_pretrained(folder / "critic").config.num_labels == 1
    sample = json.loads((folder / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
    assert {"prompt", "response", "score", "kl", "length", "finish"} <= sample.keys()
    assert (folder / "checkpoints" / "latest").read_text().strip().startswith("step_")
    for shown in ("Held-out data", "Sample responses", "curves.png", "optimizer steps"):
        assert shown in output
    assert "Traceback" not in output and "\x1b" not in output  # no colours, since there is no terminal
