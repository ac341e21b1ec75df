"""Tests the trace of run.profile: its spans, when it is written, and the steps that have none."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ppo_ds.assemble.run import check_profile
from ppo_ds.config.sections.run import RunConfig
from ppo_ds.errors import UserError
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.tracking.banner import Banner
from tests.engine.test_checkpoint import OneRank

RANK: Any = OneRank()


def spans(folder: Path) -> list[tuple[str, float]]:
    """Returns the name and the seconds of each phase in a trace, in their order."""
    with gzip.open(folder / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    phases = [event for event in events if str(event.get("name")).startswith("time/")]
    return [(event["name"], event["dur"] / 1e6) for event in sorted(phases, key=lambda event: event["ts"])]


def work(timer: PhaseTimer) -> None:
    """Runs two phases and a phase within one of them."""
    with timer("generate"):
        time.sleep(0.02)
        with timer("switch"):
            time.sleep(0.01)
    for seconds in (0.02, 0.03):
        with timer("update_actor"):
            time.sleep(seconds)
            torch.randn(8, 8) @ torch.randn(8, 8)


def test_the_spans_are_the_phases_of_the_metrics(tmp_path: Path) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    work(timer)  # outside the trace
    before = timer.take()
    with timer.trace(tmp_path / "profile", RANK):
        work(timer)
    found, metrics = spans(tmp_path / "profile"), timer.take()
    assert [name for name, _ in found] == ["time/generate", "time/update_actor", "time/update_actor"]
    for name in ("time/generate", "time/update_actor"):
        assert sum(seconds for phase, seconds in found if phase == name) == pytest.approx(
            metrics[name], abs=0.01
        )
    assert metrics["time/profile"] > 0 and "time/profile" not in before
    work(timer)  # phases after the trace need no profiler
    assert len(spans(tmp_path / "profile")) == 3


def test_a_step_that_fails_leaves_no_trace(tmp_path: Path) -> None:
    timer = PhaseTimer(torch.device("cpu"))
    with pytest.raises(ValueError, match="abandoned"), timer.trace(tmp_path / "profile", RANK):
        work(timer)
        raise ValueError("abandoned")
    assert not any(tmp_path.iterdir())
    with timer.trace(tmp_path / "profile", RANK):
        work(timer)
    assert len(spans(tmp_path / "profile")) == 3


@pytest.mark.parametrize(
    ("settings", "done", "said"),
    [
        ({}, 0, []),
        ({"profile": 5}, 4, []),
        ({"profile": 4}, 4, ["run.profile=4: no trace, since the run resumes after step 4"]),
        ({"profile": 6}, 0, "run.profile=6: the run ends with step 5; choose an earlier one"),
        ({"profile": 4, "stop_at_step": 3}, 0, "run.profile=4: the run ends with step 3"),
    ],
)
def test_a_step_that_the_run_does_not_make(settings: dict[str, Any], done: int, said: Any) -> None:
    """The number of steps of run.epochs is only known once the data have been read."""
    config: Any = SimpleNamespace(run=RunConfig(epochs=1.0, **settings))
    banner = Banner()
    if isinstance(said, str):
        with pytest.raises(UserError, match=f"^{said}"):
            check_profile(config, done, 5, banner)
    else:
        check_profile(config, done, 5, banner)
        assert banner.warnings == said
