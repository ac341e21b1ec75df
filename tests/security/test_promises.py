"""Tests that the dev pages on security and reliability name a test for each promise, and that it exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def promise_rows() -> list[str]:
    """Returns the rows of all tables of the pages whose last column names a test."""
    rows, in_table = [], False
    pages = [(ROOT / "docs" / "dev" / f"{name}.md").read_text() for name in ("security", "reliability")]
    for line in "\n\n".join(pages).splitlines():
        if not line.startswith("|"):
            in_table = False
        elif line == "| promise | test |":
            in_table = True
        elif in_table and not line.startswith("|--"):
            rows.append(line)
    return rows


def test_the_pages_have_promises():
    assert len(promise_rows()) > 80


def test_all_tests_that_the_pages_name_exist():
    for page in ("security", "reliability"):
        for file in re.findall(r"`(tests/[\w/]+\.py)", (ROOT / "docs" / "dev" / f"{page}.md").read_text()):
            assert (ROOT / file).is_file(), file


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
