"""Renders the page of an evaluation: metrics of the models, and their responses side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ppo_ds.tracking.html.page import asset, render_page
from ppo_ds.tracking.html.run_data import cut

MAX_CHARACTERS = 4_000_000  # of prompts and responses in the page
MAX_TEXT = 20_000  # of one response or prompt; longer texts are cut in the page


def comparison_page(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Renders evaluation.json and the first rows of evaluation.jsonl, up to MAX_CHARACTERS, as a page."""
    shown: list[dict[str, Any]] = []
    characters = 0
    for row in rows:
        characters += len(row["prompt"]) + sum(len(one["response"]) for one in row["responses"].values())
        if characters > MAX_CHARACTERS and shown and row["number"] != shown[-1]["number"]:
            break
        shown.append(shortened(row))
    models = list(summary["responses"])  # in order; JavaScript moves names that are integers to the front
    data = {"summary": summary, "models": models, "rows": shown, "rows_total": len(rows)}
    return render_page(
        f"Evaluation: {', '.join(summary['responses'])}",
        '<div id="comparison"><noscript>This page needs JavaScript.</noscript></div>',
        data,
        scripts=[asset("comparison.js")],
        styles=[asset("comparison.css")],
    )


def shortened(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with texts cut to MAX_TEXT characters, without data columns of over 500 characters."""
    responses = {
        name: one | {"response": cut(one["response"], MAX_TEXT)} for name, one in row["responses"].items()
    }
    columns = {key: value for key, value in row["columns"].items() if len(str(value)) <= 500}
    texts = {key: cut(row[key], MAX_TEXT) for key in ("prompt", "asked")}
    return {**row, **texts, "columns": columns, "responses": responses}
