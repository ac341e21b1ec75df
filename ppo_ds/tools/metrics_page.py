"""Renews the tables of docs/metrics.md from tracking/metrics.toml and the rules of the alarms.

`python -m ppo_ds.tools.metrics_page docs/metrics.md` replaces the text between its two pairs of comments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from ppo_ds.run.alarms import ALARMS, condition
from ppo_ds.tracking.catalogue import SECTIONS, Range, Section


def renewed(page: str) -> str:
    """Returns the text of docs/metrics.md with its tables of metrics and of alarms renewed."""
    tables = {"metrics": "\n".join(map(section_text, SECTIONS)), "alarms": alarms_text()}
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    return page


def section_text(section: Section) -> str:
    title = f"{section.title}: `{section.prefix}/`" if section.prefix else section.title
    lines = [f"## {title}", "", "| metric | unit | meaning | healthy | what to do |", "|---|---|---|---|---|"]
    for metric in section.metrics:
        healthy = "" if metric.healthy is None else f"{in_words(metric.healthy)}; {metric.reason}"
        lines.append(table_row((f"`{metric.name}`", metric.unit, metric.meaning, healthy, metric.remedy)))
    return "\n".join(lines) + "\n"


def in_words(healthy: Range) -> str:
    """Returns a range in words, such as "0 to 0.3" or "at least 0"."""
    low, high = healthy
    if low is None or high is None:
        return f"at most {high:g}" if low is None else f"at least {low:g}"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def alarms_text() -> str:
    rows = ["| metric | condition | steps | problem | what to change |", "|---|---|---|---|---|"]
    rows += [
        table_row((f"`{name}`", condition(alarm), str(alarm.steps), alarm.problem, alarm.advice))
        for name, alarm in ALARMS.items()
    ]
    return "\n".join(rows) + "\n"


def table_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text(encoding="utf-8")), encoding="utf-8")
