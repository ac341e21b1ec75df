"""Tests the table that compares estimates with measurements; ppo_step.py and the estimate have own tests."""

from __future__ import annotations

import pytest

from benchmarks.estimate_check import running, table


def test_ratios_are_medians_over_rounds_and_short_phases_are_left_out() -> None:
    rounds = [
        ({"generate": 1.0, "values": 0.1, "step": 10.0}, {"generate": 2.0, "values": 0.001, "step": 8.0}),
        ({"generate": 3.0, "values": 0.1, "step": 10.0}, {"generate": 2.0, "values": 0.001, "step": 10.0}),
        ({"generate": 2.4, "values": 0.1, "step": 12.0}, {"generate": 3.0, "values": 0.001, "step": 10.0}),
    ]
    lines = [line.split() for line in table("W1", rounds).splitlines()]
    # ratios of generate: 0.5, 1.5 and 0.8; of the step 1.25, 1.0 and 1.2
    assert lines[1] == ["generate", "2.400", "2.000", "0.80", "0.50", "to", "1.50"]
    assert lines[2] == ["step", "10.000", "10.000", "1.20", "1.00", "to", "1.25"]
    assert len(lines) == 3


def test_time_in_which_a_run_waits_for_a_core_is_not_counted() -> None:
    found = {"cpu_seconds": [4.0, 6.0, 5.0], "seconds": {"time/step": 10.0}}
    assert running(found, threads=1) == pytest.approx(0.5)
    assert running(found, threads=2) == 1.0
    assert running(found | {"seconds": {"time/step": 4.0}}, threads=1) == 1.0
