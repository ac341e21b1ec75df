"""Tests that metrics.jsonl survives kills, resumes and non-finite numbers."""

import json
import os
import signal
import subprocess
import sys

import pytest

from ppo_ds.tracking.jsonl import JsonlTracker, read_events
from ppo_ds.tracking.tracker import Trackers

ROWS = [{"prompt": "p", "response": "r"}]


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def coefficients(run_dir):
    return [(line["step"], line["kl/coef"]) for line in written(run_dir / "metrics.jsonl")]


def logged(run_dir, *steps):
    trackers = Trackers([JsonlTracker(run_dir)])
    for step in steps:
        trackers.log(step, {"kl/coef": float(step)})
        trackers.samples(step, ROWS)
        trackers.samples(step, ROWS, "eval")
    return trackers


def test_one_line_per_step_with_time_and_without_values_that_are_not_finite(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path)], elapsed=100.0)
    trackers.start({})
    trackers.log(1, {"reward/score_mean": 0.25, "episodes": 8})
    nonfinite = {"policy/loss": float("nan"), "policy/ratio_max": float("inf"), "health/nonfinite": 2.0}
    trackers.log(2, {"kl/coef": 0.1, **nonfinite})
    first, second = written(tmp_path / "metrics.jsonl")
    times = [line.pop("time") for line in (first, second)]
    assert first == {"step": 1, "reward/score_mean": 0.25, "episodes": 8, "health/nonfinite": 0}
    nulls = {"policy/loss": None, "policy/ratio_max": None, "health/nonfinite": 4.0}
    assert second == {"step": 2, "kl/coef": 0.1, **nulls}
    assert 100.0 <= times[0] <= times[1] < 110.0


def test_a_killed_process_keeps_every_finished_step(tmp_path):
    script = "import os, sys; from ppo_ds.tracking.jsonl import JsonlTracker as J; t = J(sys.argv[1])\n"
    script += "for i in (1, 2, 3): t.log(i, {'kl/coef': 0.1})\nos.kill(os.getpid(), 9)"
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    child = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=env)
    assert child.returncode == -signal.SIGKILL
    assert [line["step"] for line in written(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("rest", ['{"step": 4, "kl/co', "\x00\x00\x00", '{"step"', "7"])
def test_resume_removes_partial_lines_and_lines_after_the_checkpoint(tmp_path, rest):
    logged(tmp_path, 1, 2, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(rest)
    JsonlTracker(tmp_path, resumed_at=2).log(3, {"kl/coef": 30.0})
    assert coefficients(tmp_path) == [(1, 1.0), (2, 2.0), (3, 30.0)]
    files = {file.name for file in (tmp_path / "samples").iterdir()}
    assert files == {f"{split}step_00000{step}.jsonl" for split in ("", "eval_") for step in (1, 2)}


@pytest.mark.parametrize("reopened", [False, True])
def test_a_second_line_of_the_last_step_replaces_the_first(tmp_path, reopened):
    """This happens if a resumed run repeats an interrupted evaluation."""
    tracker = JsonlTracker(tmp_path)
    for step in (1, 2):
        tracker.log(step, {"kl/coef": float(step)})
    if reopened:
        tracker = JsonlTracker(tmp_path, resumed_at=2)
    tracker.log(2, {"kl/coef": 2.0, "eval/score_mean": 0.5})
    tracker.log(3, {"kl/coef": 3.0})
    assert coefficients(tmp_path) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert "eval/score_mean" in written(tmp_path / "metrics.jsonl")[1]


def test_time_continues_after_a_resume_and_begins_anew_with_a_fresh_run(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 50.5}\n{"step": 2, "time": 99.0}\n')
    tracker = JsonlTracker(tmp_path, resumed_at=1)
    tracker.event(1, "resumed", "text")
    assert tracker.elapsed == 50.5 <= read_events(tmp_path / "events.jsonl")[0]["time"] < 110.5
    assert JsonlTracker(tmp_path).elapsed == 0.0
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "events.jsonl").read_text() == ""


@pytest.mark.parametrize(("limit", "kept"), [(2, 2), (-1, 5), (0, 0)])
def test_samples_are_capped_and_keep_their_text(tmp_path, limit, kept):
    row = {"response": "答\u2028\n案 \ud800", "score": float("nan"), "components": {"a": float("inf")}}
    Trackers([JsonlTracker(tmp_path)], max_samples=limit).samples(
        12, [{"prompt": i, **row} for i in range(5)]
    )
    found = [file.read_text("utf-8") for file in (tmp_path / "samples").glob("step_000012.jsonl")]
    rows = [json.loads(line) for text in found for line in text.rstrip("\n").split("\n")]
    clean = {"response": "答\u2028\n案 ?", "score": None, "components": {"a": None}}
    assert rows == [{"prompt": i, **clean} for i in range(kept)]


def test_summary_has_the_last_metrics_and_the_reason(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path)])
    trackers.log(1, {"policy/loss": 0.5})
    trackers.log(2, {"policy/loss": float("nan"), "kl/coef": 0.1})
    trackers.finish({"exit_reason": "done", "heldout_accuracy_after": 0.9})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("wall_s") >= 0
    metrics = {"policy/loss": None, "kl/coef": 0.1, "health/nonfinite": 1.0}
    assert summary == {"exit_reason": "done", "steps": 2, "heldout_accuracy_after": 0.9, **metrics}
    JsonlTracker(tmp_path, resumed_at=2).finish({"exit_reason": "done"})  # nothing was left to do
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"exit_reason": "done", "steps": 2, **metrics}


def test_a_rollback_removes_later_lines(tmp_path):
    trackers = logged(tmp_path, 1, 2, 3)
    trackers.rewind(1)
    trackers.log(2, {"kl/coef": 20.0})
    trackers.finish({"exit_reason": "done"})
    assert coefficients(tmp_path) == [(1, 1.0), (2, 20.0)]
    files = sorted(file.name for file in (tmp_path / "samples").iterdir())
    assert files == ["eval_step_000001.jsonl", "step_000001.jsonl"]
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


def test_events_are_kept_over_a_resume_and_a_rollback(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path)])
    trackers.event(0, "started", "a run: 9 steps")
    trackers.log(1, {"kl/coef": 0.1})
    trackers.log(2, {"kl/coef": 0.1})
    trackers.event(2, "warning", "two\nlines")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"step": 2, "time": 1.0, "ki')
    resumed = Trackers([JsonlTracker(tmp_path, resumed_at=1)])
    resumed.event(1, "resumed", "from a checkpoint")
    resumed.rewind(0)
    resumed.finish({"exit_reason": "done"})
    resumed.event(1, "ended", "an error after the end of the trackers")
    events = written(tmp_path / "events.jsonl")
    assert [(event["step"], event["kind"], event["text"]) for event in events] == [
        (0, "started", "a run: 9 steps"),
        (2, "warning", "two lines"),
        (1, "resumed", "from a checkpoint"),
        (1, "ended", "an error after the end of the trackers"),
    ]
    assert all(set(event) == {"step", "time", "kind", "text"} for event in events)
    assert read_events(tmp_path / "events.jsonl") == events
