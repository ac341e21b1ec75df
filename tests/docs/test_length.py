"""Tests that the pages for users stay short: docs/ without docs/dev/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, name_of, prose

MOST_WORDS = 40_000
MOST_IN_A_CELL = 60
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "dev" not in page.parts)


def long_cells(page: Path) -> list[str]:
    rows = [line for line in prose(page) if line.lstrip().startswith("|")]
    cells = [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]
    return [cell.strip() for cell in cells if len(cell.split()) > MOST_IN_A_CELL]


def test_the_pages_have_few_words() -> None:
    counts = {name_of(page): len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert len(counts) > 20 and sum(counts.values()) <= MOST_WORDS, counts


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_cell_of_a_table_is_long(page: Path) -> None:
    assert long_cells(page) == []


def test_a_long_cell_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"| a | b |\n|---|---|\n| x | {'word ' * 60}|\n| x | {'word ' * 61}|\n")
    assert len(long_cells(page)) == 1
