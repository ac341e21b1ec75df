"""Tests the study of over-optimization: gold reward, labels, table, and the whole command with tiny sizes."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import gold_reward
from benchmarks.gold_reward import WORST, best_accuracy, draw_pairs, gold, table
from tests.support.environment import ROOT, run_python


def test_the_gold_reward_falls_with_the_distance_from_the_sum() -> None:
    responses = ["46", "47", "43", "53", "77", "99", "", "046", "4x", "²"]
    rows = [{"answer": "46"}] * len(responses)
    assert gold([""] * len(responses), responses, rows) == [0, -1, -2, -3, WORST, WORST, *[WORST] * 4]


def test_labels_follow_bradley_terry(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that is off by one is preferred to the correct one with probability sigmoid(-1) = 0.27."""
    monkeypatch.setattr(gold_reward, "wrong_answer", lambda answer, generator: str(int(answer) + 1))
    pairs = draw_pairs([{"prompt": "1+1=", "answer": "2"}], 4000, random.Random(0))
    counts = Counter((pair["chosen"], pair["difference"]) for pair in pairs)
    assert counts.keys() == {("2", 1.0), ("3", -1.0)}
    expected = 1 / (1 + math.e)
    error = math.sqrt(expected * (1 - expected) / 4000)
    assert counts[("3", -1.0)] / 4000 == pytest.approx(expected, abs=4 * error)


def test_the_best_accuracy_counts_labels_that_agree_with_the_gold_reward() -> None:
    assert best_accuracy([{"difference": d} for d in (2.0, 1.0, -1.0, 0.0)]) == 2.5 / 4


def test_the_table_has_the_highest_gold_reward_and_its_distance() -> None:
    steps = [
        {"distance": 0.0, "gold": -2.0, "proxy": -2.0},
        {"distance": 1.0, "gold": -1.0, "proxy": -1.5},
        {"distance": 2.0, "gold": -3.0, "proxy": -0.5},
    ]
    lines = table([{"pairs": 300, "accuracy": 0.8, "steps": steps}], best=0.9)
    assert lines[0].endswith("90.0%")
    assert lines[-1] == "| 300 | 80.0% | -2.00 | -1.00 | 1.00 | -3.00 | -0.50 | 2.00 |"


@pytest.mark.slow
def test_the_command_trains_all_models_and_draws_the_plot(tmp_path: Path) -> None:
    script = str(ROOT / "benchmarks" / "gold_reward.py")
    done = run_python(script, "--quick", "--folder", "study", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "study" / "results.json").read_text())
    assert [study["pairs"] for study in found["studies"]] == [8, 16]
    for study in found["studies"]:
        first, last = study["steps"]
        assert first["distance"] == pytest.approx(0, abs=1e-3) and last["distance"] > 0
        assert first["proxy"] == pytest.approx(first["gold"])
    assert (tmp_path / "study" / "gold_reward.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
