"""Tests that no failure and no wait of a dashboard reaches the run: each ends in one warning line."""

import threading

import pytest

from ppo_ds.tracking import background
from ppo_ds.tracking.background import BackgroundTracker, run_id
from ppo_ds.types import Histogram

METHODS = ("start", "log", "samples", "event", "histograms", "rewind", "finish")


class Recorder:
    """A dashboard that keeps its calls, and does what ``reactions`` says in a method."""

    name = "recorder"
    finish_timeout = 60.0

    def __init__(self, **reactions):
        self.calls, self.reactions = [], reactions

    def __getattr__(self, method):
        if method not in METHODS:
            raise AttributeError(method)

        def call(*arguments):
            self.calls.append((method, *arguments))
            self.reactions.get(method, lambda: None)()

        call.__name__ = method
        return call


def run(dashboard):
    tracker = BackgroundTracker(dashboard)
    tracker.start({"run": {"seed": 1}})
    tracker.log(1, {"policy/loss": 0.5, "value/loss": None})
    tracker.samples(1, [{"prompt": "a", "tokens": {"ids": [1]}}], "eval")
    tracker.event(1, "alarm", "kl is high")
    tracker.histograms(1, {"adv/hist": Histogram([1], [0.0, 1.0])})
    tracker.rewind(0)
    tracker.finish({"exit_reason": "done"})


def raising(error):
    def reaction():
        raise error

    return reaction


def test_a_dashboard_gets_all_calls_in_order_without_null_metrics_and_tokens(capfd):
    dashboard = Recorder()
    run(dashboard)
    assert dashboard.calls == [
        ("start", {"run": {"seed": 1}}),
        ("log", 1, {"policy/loss": 0.5}),
        ("samples", 1, [{"prompt": "a"}], "eval"),
        ("event", 1, "alarm", "kl is high"),
        ("histograms", 1, {"adv/hist": Histogram([1], [0.0, 1.0])}),
        ("rewind", 0),
        ("finish", {"exit_reason": "done"}),
    ]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("method", METHODS)
def test_the_first_failure_is_one_warning_and_drops_the_dashboard(method, capfd):
    dashboard = Recorder(**{method: raising(OSError(28, "No space left\non device"))})
    run(dashboard)
    assert [name for name, *_ in dashboard.calls] == list(METHODS[: METHODS.index(method) + 1])
    assert capfd.readouterr().err == (
        "warning: recorder failed (OSError: [Errno 28] No space left); continuing without it; "
        "metrics.jsonl and samples/ have everything\n"
    )


def test_a_library_that_is_missing_is_named_with_its_extra(capfd):
    run(Recorder(start=raising(ModuleNotFoundError("No module named 'recorder'"))))
    err = capfd.readouterr().err
    assert err.count("\n") == 1
    assert "recorder is not installed; run: pip install -c constraints.txt -e '.[recorder]'" in err


@pytest.mark.parametrize("method", ["start", "log", "finish"])
def test_a_dashboard_that_never_answers_costs_a_bounded_time(method, monkeypatch, capfd):
    monkeypatch.setattr(background, "START_TIMEOUT", 1.0)
    released = threading.Event()
    dashboard = Recorder(**{method: released.wait})
    dashboard.finish_timeout = 1.0
    run(dashboard)
    released.set()
    err = capfd.readouterr().err
    waited_for = "start" if method == "start" else "finish"
    assert err.count("\n") == 1 and f"has not ended its {waited_for} within 1 s" in err


def test_an_endless_backlog_drops_the_dashboard(monkeypatch, capfd):
    monkeypatch.setattr(background, "MAX_PENDING", 5)
    released = threading.Event()
    tracker = BackgroundTracker(Recorder(log=released.wait))
    tracker.start({})
    for step in range(50):
        tracker.log(step, {})
    tracker.finish({})  # does not wait
    released.set()
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "does not keep up: 5 calls wait" in err


@pytest.mark.parametrize("content", ["", "\n", "../../elsewhere", "a b"])
def test_an_id_that_is_no_part_of_a_file_name_is_not_used(tmp_path, content):
    (tmp_path / "wandb.id").write_text(content)
    assert run_id(tmp_path / "wandb.id").isalnum()
    (tmp_path / "wandb.id").write_text("abc-1\n")
    assert run_id(tmp_path / "wandb.id") == "abc-1"
