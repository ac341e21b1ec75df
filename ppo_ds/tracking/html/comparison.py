"""The page of an evaluation: figures of the models, and their responses side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppo_ds.tracking.html.page import asset, render_page

MAX_CHARACTERS = 4_000_000  # of prompts and responses in the page
MAX_TEXT = 20_000  # of one response or prompt; longer ones are cut in the page


def comparison_page(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders the content of evaluation.json and the rows of evaluation.jsonl as one HTML file.

    The page has the first prompts with all of their responses, up to MAX_CHARACTERS.
    """
    shown: list[dict[str, Any]] = []
    characters = 0
    for row in rows:
        characters += len(row["prompt"]) + sum(len(one["response"]) for one in row["responses"].values())
        if characters > MAX_CHARACTERS and shown and row["number"] != shown[-1]["number"]:
            break
        shown.append(shortened(row))
    data = {"summary": summary, "rows": shown, "rows_total": len(rows)}
    return render_page(
        f"Evaluation: {', '.join(summary['responses'])}",
        '<div id="comparison"><noscript>This page needs JavaScript.</noscript></div>',
        data,
        scripts=[asset("comparison.js")],
        styles=[asset("comparison.css")],
    )


def shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with texts of at most MAX_TEXT characters, and only its short columns."""
    return {
        **row,
        "prompt": cut(row["prompt"]),
        "asked": cut(row["asked"]),
        "columns": {key: value for key, value in row["columns"].items() if len(str(value)) <= 500},
        "responses": {
            name: {**one, "response": cut(one["response"])} for name, one in row["responses"].items()
        },
    }


def cut(text: str) -> str:
    """Returns a text of at most MAX_TEXT characters and a note of how many are missing."""
    return (
        text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} [... {len(text) - MAX_TEXT:,} more characters]"
    )
