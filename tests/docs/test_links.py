"""Tests that every relative link, anchor and image of the Markdown pages exists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import anchors, links, name_of, pages


def broken(page: Path) -> list[str]:
    """Returns the links of a page whose target does not exist."""
    found = []
    for link in links(page):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            found.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            found.append(f"{link}: no such heading")
    return found


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_every_relative_link_has_a_target(page: Path) -> None:
    assert broken(page) == []


def test_the_pages_are_found() -> None:
    names = {name_of(page) for page in pages()}
    assert {"README.md", "README.zh.md", "CHANGELOG.md", "CONTRIBUTING.md"} <= names
    assert {"docs/index.md", "docs/config.md"} <= names
    assert sum(len(links(page)) for page in pages()) > 100


def test_wrong_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b`: c\n\n[x](#a-b-c) [x](nothing.md) ![x](nothing.png) [x](#nothing) `[x](code.md)`\n\n"
        "    [x](code.md)\n"
    )
    assert links(page) == ["#a-b-c", "nothing.md", "nothing.png", "#nothing"]
    assert anchors(page) == {"a-b-c"}
    assert len(broken(page)) == 3


def test_no_page_holds_two_versions_of_a_merge() -> None:
    marks = ("<<<<<<< ", ">>>>>>> ")
    assert [name_of(page) for page in pages() if any(mark in page.read_text() for mark in marks)] == []
