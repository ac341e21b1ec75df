"""Tests the table of the scaling benchmark.

The benchmark runs ppo_step.py, which has its own tests.
"""

from __future__ import annotations

from benchmarks import scaling
from benchmarks.scaling import table


def test_ratios_are_to_the_first_case_round_by_round() -> None:
    lines = table(
        "t",
        [((1, 32), [(1.0, 2.0), (4.0, 2.0), (2.0, 2.0)]), ((2, 64), [(2.0, 3.0), (4.0, 1.0), (1.0, 2.0)])],
    )
    assert lines[:2] == ["", "t"]
    assert lines[3].split() == ["1", "32", "2.0000", "1.0000", "to", "4.0000", "1.00", "2.0000", "1.00"]
    # ratios of seconds 2/1, 4/4 and 1/2; of CPU seconds 3/2, 1/2 and 2/2
    assert lines[4].split() == ["2", "64", "2.0000", "1.0000", "to", "4.0000", "1.00", "2.0000", "1.00"]


def test_each_case_runs_once_per_round_with_the_cpu_seconds_of_all_ranks(monkeypatch, capsys) -> None:
    runs = []

    def fake(args, ranks, prompts):
        runs.append((ranks, prompts))
        return {"seconds": {"time/step": 2.0}, "cpu_seconds_of_all_ranks": [3.0 * ranks, 5.0 * ranks]}

    monkeypatch.setattr(scaling, "run", fake)
    scaling.main("--prompts 8 --ranks 1 --per-rank 8 --same-work 2 8 --samples 16 --rounds 2".split())
    assert runs == 2 * [(1, 8), (2, 16), (8, 16)]
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-2:] for line in lines if line[:1] == ["1"]] == [["0.5000", "1.00"], ["4.0000", "1.00"]]
    assert [line[-2:] for line in lines if line[:1] in (["2"], ["8"])] == [
        ["8.0000", "1.00"],
        ["32.0000", "4.00"],
    ]
