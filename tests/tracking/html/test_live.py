"""Tests that report.html is written while a run goes on, seldom enough, and never ends the run."""

import logging

from ppo_ds.tracking.html import live
from ppo_ds.tracking.html.live import ReportTracker
from ppo_ds.tracking.jsonl import JsonlTracker
from ppo_ds.tracking.tracker import Trackers


class Clock:
    """A clock that moves only when a test sets it."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_at_most_one_percent_of_the_time_goes_into_reports(tmp_path, monkeypatch):
    clock, written = Clock(), []

    def write(run_dirs, target, *, running):
        clock.now += 0.5
        written.append((round(clock.now, 1), running))

    monkeypatch.setattr(live, "write_report", write)
    tracker = ReportTracker(tmp_path, clock=clock)
    for step in range(1, 41):
        clock.now += 3.0
        tracker.log(step, {})
    assert written == [(103.5, True), (154.5 + 0.5, True), (206.0 + 0.5, True)]
    tracker.finish({})
    assert written[-1] == (clock.now, False)


def test_a_page_of_the_run_so_far(tmp_path):
    trackers = Trackers([JsonlTracker(tmp_path), ReportTracker(tmp_path)])
    trackers.event(0, "started", "started")
    trackers.log(1, {"reward/score_mean": 0.5})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The run is in progress: step 1" in page and '"running":true' in page
    trackers.log(2, {"reward/score_mean": 0.7})
    trackers.event(2, "ended", "done")
    trackers.finish({"exit_reason": "done"})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "The run finished all 2 steps" in page and '"running":false' in page


def test_a_report_that_fails_is_one_warning(tmp_path, monkeypatch, caplog):
    def write(run_dirs, target, *, running):
        raise ZeroDivisionError("odd data")

    monkeypatch.setattr(live, "write_report", write)
    clock = Clock()
    tracker = ReportTracker(tmp_path, clock=clock)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            clock.now += 1000.0
            tracker.log(step, {})
        tracker.finish({})
    assert [record.message for record in caplog.records] == [
        "warning: report.html was not written: ZeroDivisionError: odd data"
    ]
