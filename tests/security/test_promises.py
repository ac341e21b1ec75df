"""Tests that docs/security.md names a test for each promise, and that these tests exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promise_rows() -> list[str]:
    """Returns the rows of all tables of docs/security.md whose last column names a test."""
    rows, in_table = [], False
    for line in (ROOT / "docs" / "security.md").read_text().splitlines():
        if not line.startswith("|"):
            in_table = False
        elif line == "| promise | test |":
            in_table = True
        elif in_table and not line.startswith("|--"):
            rows.append(line)
    return rows


def test_the_page_has_promises():
    assert len(promise_rows()) > 20


@pytest.mark.parametrize("row", promise_rows())
def test_each_promise_names_tests_that_exist(row):
    promise, tests = row.strip("| ").rsplit(" | ", 1)
    named = NAMED.findall(tests)
    assert promise and named and NAMED.sub("", tests).strip(", ") == "", f"not a test: {tests}"
    for file, name in named:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
            f"{file}::{name}"
        )
