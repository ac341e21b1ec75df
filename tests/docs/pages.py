"""Reads the Markdown pages of the repository: headings, links, code blocks and commands."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = (".", "docs", "docs/recipes", "docs/smollm2", "docs/dev")

# The comment above a code block that tests/docs/test_running.py executes.
RUNS = "<!-- runs -->"

_FENCE = re.compile(r"\s*(```+|~~~+)\s*(\S*)")
_SPAN = re.compile(r"(`+)(?:.(?!\1))*?.?\1")


@dataclass(frozen=True)
class Block:
    """A code block of a page."""

    page: str
    line: int  # number of its first line of code
    language: str  # the first word of the info string, "" for an indented block
    lines: tuple[str, ...]
    runs: bool  # whether the comment RUNS is above it

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    def commands(self) -> list[str]:
        """Returns the lines without comments, with continued lines joined."""
        joined = re.sub(r"\\\n\s*", " ", "\n".join(self.lines))
        return [line.strip() for line in joined.split("\n") if line.strip()]


@cache
def pages() -> tuple[Path, ...]:
    return tuple(sorted(file for folder in FOLDERS for file in (ROOT / folder).glob("*.md")))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


@cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Returns the fenced and the indented code blocks of a page."""
    return tuple(_split(page)[1])


@cache
def prose(page: Path) -> tuple[str, ...]:
    """Returns the lines of a page; those of code blocks are empty."""
    return tuple(_split(page)[0])


def _split(page: Path) -> tuple[list[str], list[Block]]:
    text, found, code = [], [], []
    fence, language, indent, start, ended = "", "", "", 0, 0
    lines = page.read_text(encoding="utf-8").splitlines()

    def close() -> None:
        nonlocal ended
        above = next((line for line in reversed(text[ended : start - 1]) if line.strip()), "")
        found.append(Block(name_of(page), start + 1, language, tuple(code), above.strip() == RUNS))
        code.clear()
        ended = len(text)

    for number, line in enumerate([*lines, ""]):
        opening = _FENCE.match(line)
        if fence:
            if line.strip().startswith(fence):
                close()
                fence = ""
            else:
                code.append(line.removeprefix(indent))
        elif opening:
            fence, language, start = opening[1], opening[2], number + 1
            indent = line[: opening.start(1)]
        elif line.startswith("    ") and (code or not any(text[-1:]) and not _in_list(text)):
            if not code:
                language, start = "", number
            code.append(line[4:])
        else:
            if code:
                close()
            text.append(line)
            continue
        text.append("")
    assert not fence, f"{page}: a code block is not closed"
    return text, found


def _in_list(text: list[str]) -> bool:
    """Returns whether the last paragraph belongs to a list, whose items may be indented."""
    last = next((line for line in reversed(text) if line.strip()), "")
    return bool(re.match(r"\s*([-*]|\d+\.)\s|\s+\S", last))


@cache
def spans(page: Path) -> tuple[str, ...]:
    """Returns the inline code of a page."""
    text = " ".join(prose(page))
    return tuple(match[0].strip("`") for match in _SPAN.finditer(text))


@cache
def anchors(page: Path) -> frozenset[str]:
    """Returns the anchors of a page's headings, as code hosts and mkdocs create them."""
    found: dict[str, int] = {}
    result = set()
    for line in prose(page):
        heading = re.match(r"#{1,6}\s+(.*)", line)
        if heading:
            text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1])
            slug = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
            count = found[slug] = found.get(slug, -1) + 1
            result.add(f"{slug}-{count}" if count else slug)
    return frozenset(result)


def links(page: Path) -> list[str]:
    """Returns the targets of all links and images of a page, without those in code."""
    text = _SPAN.sub(lambda match: "x" * len(match[0]), "\n".join(prose(page)))
    inline = re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text)
    defined = re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.M)
    html = re.findall(r"<(?:img|a|source)\b[^>]*?\b(?:src|href|srcset)=\"([^\"]+)\"", text)
    return [*inline, *defined, *html]


def words(command: str) -> list[str]:
    """Splits a command like a shell, without comments."""
    return shlex.split(command, comments=True)
