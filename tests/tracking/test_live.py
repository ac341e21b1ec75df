"""Tests the live view: progress, time left, phase and its work, alarms."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ppo_ds.distributed.heartbeat import Heartbeat, Work
from ppo_ds.tracking.live import LiveView, fraction, phase_in_words


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def rows(view: LiveView, columns: int, encoding: str = "utf-8") -> list[str]:
    """Returns the lines on a terminal, without colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    Console(file=file, width=columns, force_terminal=True, color_system=None).print(view)
    file.seek(0)
    return [line.rstrip() for line in file.read().splitlines()]


def test_progress_and_time_left() -> None:
    clock = Clock()
    view = LiveView("ppo", 10, lambda: Heartbeat(since=clock.now), step=4, clock=clock)
    assert view.seconds_left() is None
    assert rows(view, 60)[0].endswith("step 4/10  0 s, time left not known yet")
    for step, seconds in ((5, 30.0), (6, 10.0)):
        clock.now += seconds
        view.log(step)
    assert view.seconds_left() == 80.0  # 4 steps of 20 s
    clock.now += 5
    assert view.seconds_left() == 75.0
    clock.now += 1000  # a slow step: the three steps after it are still to come
    assert view.seconds_left() == 60.0
    assert rows(view, 80)[0].startswith("ppo ━")
    assert " step 6/10  17 min 25 s, 1 min 00 s left" in rows(view, 80)[0]
    view.rewind(5)
    assert view.seconds_left() == 100.0 and " step 5/10 " in rows(view, 80)[0]


def test_the_phase_and_its_work() -> None:
    clock = Clock()
    state = Heartbeat(
        "in the phase 'generate'", 990.0, work=(Work(0, 1, "groups"), Work(16, 32, "responses"))
    )
    view = LiveView("ppo", 10, lambda: state, clock=clock)
    assert rows(view, 60)[1].startswith("generation ━━")
    assert rows(view, 60)[1].endswith("16/32 responses  10 s")
    state = Heartbeat("after the phase 'generate'", 998.0)
    assert rows(view, 60)[1] == "after generation  2 s"


def test_phases_are_shown_in_words() -> None:
    assert phase_in_words("in the phase 'update_critic'") == "update of the critic"
    assert phase_in_words("after the phase 'old_logprobs'") == "after old log-probs"
    assert phase_in_words("in the phase 'new_phase'") == "new phase"
    assert phase_in_words("loading the model") == "loading the model"


def test_work_inside_work() -> None:
    assert fraction(()) == 0.0
    assert fraction((Work(3, 8, "steps"), Work(1, 4, "micro-batches"))) == pytest.approx(3.25 / 8)
    # the inner work is complete and still listed when the outer unit has been counted
    assert fraction((Work(8, 8, "steps"), Work(4, 4, "micro-batches"))) == 1.0


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("columns", [1, 60, 300])
def test_any_terminal(columns: int, encoding: str) -> None:
    work = (Work(2, 8, "optimizer steps"), Work(3, 4, "micro-batches"))
    view = LiveView("ppo", 1000, lambda: Heartbeat("in the phase 'update_actor'", 0.0, work=work))
    for step in range(20):
        view.log(step)
    view.alarm(19, "一行警告 " * 60)
    lines = rows(view, columns, encoding)
    assert columns < 80 or len(lines) <= 3
    assert columns < 60 or "step 19/1000" in lines[0]


def test_an_alarm_is_shown_for_some_steps() -> None:
    view = LiveView("ppo", 100, Heartbeat)
    view.log(3)
    view.alarm(3, "KL is 12: raise algo.kl.coef")
    assert rows(view, 80)[-1] == "alarm at step 3: KL is 12: raise algo.kl.coef"
    view.log(23)
    assert "alarm" not in rows(view, 80)[-1]
