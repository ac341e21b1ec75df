"""Tests the summary of the nightly tests on a JUnit file that pytest writes for three small tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tools.nightly_summary import summary

TESTS = """
import pytest

def test_good(record_property):
    record_property("kills", 3)

@pytest.mark.parametrize("n", [1, 2])
def test_bad(n):
    assert n == 1

@pytest.fixture
def broken():
    raise OSError

def test_error(broken):
    pass

@pytest.mark.skip
def test_skipped():
    pass
"""


def test_a_row_has_the_counts_and_figures_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_small.py").write_text(TESTS)
    (tmp_path / "setup.cfg").write_text("[tool:pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml=found.xml"]
    subprocess.run(command, cwd=tmp_path, capture_output=True)
    head, _, _, _, row, _, *notes = summary(tmp_path / "found.xml").splitlines()
    assert head.startswith("Commit ") and ": 2 passed, 2 failed, 1 skipped in 0 min" in head
    assert row == "| `tests/test_small.py` | 2 | 2 | 1 | 0.0 | kills: 3 |"
    assert sorted(notes) == [
        "- failed: `test_bad[2]`: assert 2 == 1",
        '- failed: `test_error`: failed on setup with "OSError"',
        "- skipped: `test_skipped`: unconditional skip",
    ]
