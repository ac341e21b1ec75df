"""Tests the benchmark of threads on a busy machine."""

from __future__ import annotations

import pytest

from benchmarks.busy import parsed, table
from tests.support.environment import run_python


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rounds", "0"], "must be a positive integer"),
        (["--threads", "0"], "must be a positive integer"),
        (["--prompts", "0"], "must be a positive integer"),
        (["--setting", "a:X=1", "--setting", "a:X=2"], "--setting a: given twice"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, said, capsys):
    with pytest.raises(SystemExit) as left:
        parsed(words)
    assert left.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_ratios_are_medians_over_rounds():
    def steps(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": s, "cpu": 2 * s, "yielded": 7, "preempted": 3} for s in seconds]

    lines = table(2, {"a": steps(1, 2, 4), "b": steps(3, 2, 2)})
    assert lines[1] == "2 busy processes"
    assert lines[3].split() == ["a", "2.00", "4.00", "7", "3", "1.00", "to", "4.00", "1.00"]
    assert lines[4].split() == ["b", "2.00", "4.00", "7", "3", "2.00", "to", "3.00", "1.00"]


@pytest.mark.slow
def test_it_measures_beside_a_busy_process():
    done = run_python(*"benchmarks/busy.py W0 --dry --busy 1 --rounds 1 --settle 0.1".split())
    assert done.returncode == 0, done.stderr
    firsts = [line.split()[0] for line in done.stdout.splitlines()[-4:]]
    assert firsts == ["1", "setting", "runtime", "ppo_ds"]
