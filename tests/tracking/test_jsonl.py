"""Tests that metrics.jsonl survives kills, resumes and non-finite numbers."""

import json
import os
import signal
import subprocess
import sys

import pytest

from ppo_ds.tracking.jsonl import JsonlTracker, read_events, read_metrics
from ppo_ds.tracking.tracker import Trackers


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_line_per_step_with_step_and_time(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path)], elapsed=100.0)
    trackers.start({})
    trackers.log(1, {"reward/score_mean": 0.25, "episodes": 8, "tokens": 80})
    trackers.log(2, {"reward/score_mean": 0.5, "episodes": 16, "tokens": 150})
    lines = written(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1] | {"time": 0} == {
        "step": 2,
        "time": 0,
        "reward/score_mean": 0.5,
        "episodes": 16,
        "tokens": 150,
        "health/nonfinite": 0,
    }
    assert 100.0 <= lines[0]["time"] <= lines[1]["time"] < 110.0


def test_nonfinite_is_null_and_counted(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path)])
    trackers.log(
        1,
        {
            "policy/loss": float("nan"),
            "policy/ratio_max": float("inf"),
            "kl/coef": 0.1,
            "health/nonfinite": 2.0,
        },
    )
    (line,) = written(tmp_path / "metrics.jsonl")
    assert line["policy/loss"] is None and line["policy/ratio_max"] is None and line["kl/coef"] == 0.1
    assert line["health/nonfinite"] == 4.0


def test_a_killed_process_keeps_every_finished_step(tmp_path):
    script = "import os, sys; from ppo_ds.tracking.jsonl import JsonlTracker as J; t = J(sys.argv[1])\n"
    script += "for i in (1, 2, 3): t.log(i, {'kl/coef': 0.1})\nos.kill(os.getpid(), 9)"
    child = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env={**os.environ, "PYTHONPATH": os.getcwd()}
    )
    assert child.returncode == -signal.SIGKILL
    assert [line["step"] for line in written(tmp_path / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("rest", ['{"step": 4, "kl/co', "\x00\x00\x00", '{"step"', "7"])
def test_resume_removes_partial_lines_and_lines_after_the_checkpoint(tmp_path, rest):
    first = Trackers([JsonlTracker(tmp_path)])
    for step in (1, 2, 3):
        first.log(step, {"kl/coef": float(step)})
        first.samples(step, [{"prompt": "p", "response": "r"}])
        first.samples(step, [{"prompt": "p", "response": "r"}], "eval")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(rest)
    second = JsonlTracker(tmp_path, resumed_at=2)
    second.log(3, {"kl/coef": 30.0})
    assert [(line["step"], line["kl/coef"]) for line in written(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 2.0),
        (3, 30.0),
    ]
    files = sorted(file.name for file in (tmp_path / "samples").iterdir())
    assert files == [
        "eval_step_000001.jsonl",
        "eval_step_000002.jsonl",
        "step_000001.jsonl",
        "step_000002.jsonl",
    ]


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
    lines = written(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3] and [
        line.get("eval/score_mean") for line in lines
    ] == [None, 0.5, None]


def test_time_continues_after_a_resume(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 50.5}\n{"step": 2, "time": 99.0}\n')
    assert JsonlTracker(tmp_path, resumed_at=1).elapsed == 50.5


def test_a_fresh_run_starts_with_an_empty_record(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 50.5}\n')
    assert JsonlTracker(tmp_path).elapsed == 0.0
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_samples_are_capped_and_keep_their_text(tmp_path):
    rows = [
        {
            "prompt": f"p{i}",
            "response": "答\u2028\n案 \ud800",
            "score": float("nan"),
            "components": {"a": float("inf")},
        }
        for i in range(5)
    ]
    trackers = Trackers([JsonlTracker(tmp_path)], max_samples=2)
    trackers.samples(12, rows)
    lines = (tmp_path / "samples" / "step_000012.jsonl").read_text(encoding="utf-8").rstrip("\n").split("\n")
    assert [json.loads(line)["prompt"] for line in lines] == ["p0", "p1"]
    assert json.loads(lines[0]) == {
        "prompt": "p0",
        "response": "答\u2028\n案 ?",
        "score": None,
        "components": {"a": None},
    }
    Trackers([JsonlTracker(tmp_path)], max_samples=-1).samples(13, rows)
    assert (
        len(read_lines := (tmp_path / "samples" / "step_000013.jsonl").read_text().rstrip("\n").split("\n"))
        == 5
    ), read_lines


def test_no_file_for_no_samples(tmp_path):
    Trackers([JsonlTracker(tmp_path)], max_samples=0).samples(1, [{"prompt": "p"}])
    assert not list((tmp_path / "samples").iterdir())


def test_summary_has_the_last_metrics_and_the_reason(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path)])
    trackers.log(1, {"policy/loss": 0.5})
    trackers.log(2, {"policy/loss": float("nan"), "kl/coef": 0.1})
    trackers.finish({"exit_reason": "done", "heldout_accuracy_before": 0.5, "heldout_accuracy_after": 0.9})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("wall_s") >= 0
    assert summary == {
        "exit_reason": "done", "steps": 2, "heldout_accuracy_before": 0.5, "heldout_accuracy_after": 0.9,
        "policy/loss": None, "kl/coef": 0.1, "health/nonfinite": 1.0,
    }  # fmt: skip


def test_summary_of_a_resumed_run_that_had_nothing_left_to_do(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 3, "time": 5.0, "kl/coef": 0.1}\n')
    JsonlTracker(tmp_path, resumed_at=3).finish({"exit_reason": "done"})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"exit_reason": "done", "steps": 3, "kl/coef": 0.1}


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trackers = Trackers()
    trackers.start({})
    trackers.log(1, {"a": 1.0})
    trackers.samples(1, [{"prompt": "p"}])
    trackers.finish({"exit_reason": "done"})
    assert not list(tmp_path.iterdir())


def test_a_missing_file_has_no_steps(tmp_path):
    assert read_metrics(tmp_path / "nothing.jsonl") == []


def test_a_rollback_removes_later_lines(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path)])
    for step, coef in ((1, 1.0), (2, 2.0), (3, 3.0)):
        trackers.log(step, {"kl/coef": coef})
        trackers.samples(step, [{"prompt": "p", "response": "r"}])
    trackers.rewind(1)
    trackers.log(2, {"kl/coef": 20.0})
    trackers.finish({"exit_reason": "done"})
    assert [(line["step"], line["kl/coef"]) for line in written(tmp_path / "metrics.jsonl")] == [
        (1, 1.0),
        (2, 20.0),
    ]
    assert [file.name for file in (tmp_path / "samples").iterdir()] == ["step_000001.jsonl"]
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
    JsonlTracker(tmp_path)
    assert read_events(tmp_path / "events.jsonl") == []


def test_the_time_of_events_continues_after_a_resume(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time": 50.5}\n')
    JsonlTracker(tmp_path, resumed_at=1).event(1, "resumed", "text")
    assert 50.5 <= read_events(tmp_path / "events.jsonl")[0]["time"] < 110.5
