"""Tests the parts of docs/metrics.md that are generated."""

import re
from pathlib import Path

from ppo_ds.run.alarms import ALARMS, WINDOW
from ppo_ds.tools.metrics_page import in_words, renewed
from ppo_ds.tracking.catalogue import METRICS
from tests.docs.pages import anchors

FILE = Path(__file__).parents[2] / "docs" / "metrics.md"
PAGE = FILE.read_text(encoding="utf-8")


def test_the_page_is_up_to_date():
    expected = "python -m ppo_ds.tools.metrics_page docs/metrics.md"
    assert renewed(PAGE) == PAGE, expected
    assert expected in PAGE and f"the mean of the first {WINDOW} steps" in PAGE


def test_every_metric_has_one_heading_or_list_item():
    lines = PAGE.partition("<!-- end of metrics -->")[0].splitlines()
    for name, metric in METRICS.items():
        advised = metric.healthy is not None or metric.remedy
        assert lines.count(f"### `{name}`") == bool(advised), name
        assert sum(line.startswith(f"- `{name}`: ") for line in lines) == (not advised), name
        assert metric.meaning.removesuffix(".") in PAGE and metric.remedy in PAGE, name
    problems = [alarm.problem for alarm in ALARMS.values()]
    for problem in problems:
        assert PAGE.count(f"): {problem}.\n") == problems.count(problem)


def test_the_alarms_link_to_their_metrics():
    linked = re.findall(r"^- \[`(.+)`\]\(#(.+?)\) ", PAGE, re.MULTILINE)
    assert [name for name, _ in linked] == list(ALARMS)
    assert all(anchor in anchors(FILE) for _, anchor in linked)


def test_ranges_in_words():
    given = [(0.0, 0.3), (None, 2.0), (0.5, None), (0.0, 0.0)]
    assert list(map(in_words, given)) == ["0 to 0.3", "at most 2", "at least 0.5", "0"]
