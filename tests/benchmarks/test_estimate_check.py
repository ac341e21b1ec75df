"""Tests the table of estimates and measurements. Other files test ppo_step.py and the estimate."""

from __future__ import annotations

from benchmarks.estimate_check import table


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
