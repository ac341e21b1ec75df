"""Tests the tables of docs/metrics.md, which are generated."""

from pathlib import Path

from ppo_ds.run.alarms import ALARMS, WINDOW
from ppo_ds.tools.metrics_page import in_words, renewed
from ppo_ds.tracking.catalogue import METRICS

PAGE = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date():
    expected = "python -m ppo_ds.tools.metrics_page docs/metrics.md"
    assert renewed(PAGE) == PAGE, expected
    assert expected in PAGE and f"the mean of the first {WINDOW} steps" in PAGE


def test_every_metric_has_one_row():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `")]
    for name, metric in METRICS.items():
        cells = [row.split(" | ") for row in rows if row.startswith(f"| `{name}` | {metric.unit} |")]
        assert len(cells) == 1 and len(cells[0]) == 5, name
    problems = [alarm.problem for alarm in ALARMS.values()]
    for problem in problems:
        assert sum(problem in row for row in rows) == problems.count(problem)


def test_ranges_in_words():
    given = [(0.0, 0.3), (None, 2.0), (0.5, None), (0.0, 0.0)]
    assert list(map(in_words, given)) == ["0 to 0.3", "at most 2", "at least 0.5", "0"]
