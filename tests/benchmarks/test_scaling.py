"""Tests the table of the scaling benchmark.

The benchmark runs ppo_step.py, which has its own tests.
"""

from __future__ import annotations

from benchmarks.scaling import parsed, table


def test_ratios_are_to_the_first_case_round_by_round() -> None:
    lines = table(
        "t",
        [((1, 32), [(1.0, 2.0), (4.0, 2.0), (2.0, 2.0)]), ((2, 64), [(2.0, 3.0), (4.0, 1.0), (1.0, 2.0)])],
    )
    assert lines[:2] == ["", "t"]
    assert lines[3].split() == ["1", "32", "2.0000", "1.0000", "to", "4.0000", "1.00", "2.0000", "1.00"]
    # ratios of seconds 2/1, 4/4 and 1/2; of CPU seconds 3/2, 1/2 and 2/2
    assert lines[4].split() == ["2", "64", "2.0000", "1.0000", "to", "4.0000", "1.00", "2.0000", "1.00"]


def test_the_usual_cases() -> None:
    args = parsed([])
    assert (args.workload, args.prompts, args.ranks, args.per_rank) == ("W0", [32, 128, 512], [1, 2], 128)
