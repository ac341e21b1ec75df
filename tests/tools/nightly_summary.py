"""Prints a summary of a run of the nightly tests, in Markdown, from the JUnit file that pytest has written.

    python tests/tools/nightly_summary.py outputs/nightly.xml > outputs/nightly.md

The table has a row for each test file, with the properties that its tests have recorded.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Row:
    """Counts of one test file."""

    counts: dict[str, int] = field(default_factory=lambda: {"passed": 0, "failed": 0, "skipped": 0})
    seconds: float = 0.0
    figures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # a line for each failed or skipped test


def rows_of(file: Path) -> dict[str, Row]:
    """Returns the rows by the modules of the tests."""
    rows: dict[str, Row] = {}
    for case in ElementTree.parse(file).iter("testcase"):
        row = rows.setdefault(case.get("classname", "?"), Row())
        found = {name: case.find(name) for name in ("failure", "error", "skipped")}
        outcome, reason = next(
            ((name, one.get("message", "")) for name, one in found.items() if one is not None), ("passed", "")
        )
        outcome = {"failure": "failed", "error": "failed"}.get(outcome, outcome)
        row.counts[outcome] += 1
        if outcome != "passed":
            row.notes.append(f"- {outcome}: `{case.get('name')}`: {' '.join(reason.split())[:200]}")
        row.seconds += float(case.get("time", 0))
        row.figures += [f"{item.get('name')}: {item.get('value')}" for item in case.iter("property")]
    return rows


def summary(file: Path) -> str:
    suite = next(ElementTree.parse(file).iter("testsuite"))
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=8"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    rows = rows_of(file)
    lines = [
        f"Commit {commit or 'unknown'}, {str(suite.get('timestamp'))[:16]}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}: "
        + ", ".join(f"{sum(row.counts[name] for row in rows.values())} {name}" for name in Row().counts)
        + f" in {float(suite.get('time', 0)) / 60:.0f} min",
        "",
        "| tests | passed | failed | skipped | min | figures |",
        "|---|--:|--:|--:|--:|---|",
    ]
    for name, row in rows.items():
        path = name.replace(".", "/") + ".py"
        numbers = " | ".join(str(count) for count in row.counts.values())
        lines.append(f"| `{path}` | {numbers} | {row.seconds / 60:.1f} | {'; '.join(row.figures)} |")
    return "\n".join([*lines, "", *(note for row in rows.values() for note in row.notes)]).rstrip("\n")


if __name__ == "__main__":
    print(summary(Path(sys.argv[1])))
