"""Tests the page of an evaluation: hostile texts, cut texts, and clicks in a headless Chromium."""

import pytest

from ppo_ds.tools.comparison import compare, estimate
from ppo_ds.tracking.html.comparison import MAX_TEXT, comparison_page
from tests.support.browser import Browser, find_chromium
from tests.tracking.html.test_page import NASTY, Page


def row(number, sample, scores, texts=("x", "y"), prompt="p"):
    """Makes a row of evaluation.jsonl for the models a and b."""
    responses = {
        name: {"response": text, "tokens": 2, "finished": name == "a", "scores": {"reward": score}}
        for name, text, score in zip("ab", texts, scores, strict=True)
    }
    responses["b"] |= {"log_ratio": 0.5, "judge": {"preference": 0.5, "position_bias": 0, "disagrees": False}}
    text = f"{prompt} {number}"
    return {
        "number": number, "sample": sample, "prompt": f"User: {text}", "asked": text,
        "columns": {"answer": 5}, "responses": responses,
    }  # fmt: skip


def summary_of(rows):
    scores = {name: [[one["responses"][name]["scores"]["reward"]] for one in rows] for name in "ab"}
    texts = {name: [[one["responses"][name]["response"]] for one in rows] for name in "ab"}
    tie = {"win_rate": estimate([0.5]), "position_bias": 0.0, "disagreement": 0.5275}
    return {
        "data": "held.jsonl",
        "prompts": len({one["number"] for one in rows}),
        "decoding": {"samples": 1, "greedy": True, "temperature": 1.0, "max_new_tokens": 8},
        "rewards": {"reward": compare(scores, texts)},
        "responses": {name: {"tokens_mean": 2.0, "finished_frac": float(name == "a")} for name in "ab"},
        "judge": {"function": "j.py:f", "first": "a", "models": {"b": tie}},
        "kl": {
            "name": "KL", "first": "a", "estimator": "k1.",
            "models": {"b": estimate([0.4775]) | {"per_token": 0.1}},
        },
        "tokens_per_second": {"a": 10.0, "b": 20.0},
        "remarks": ["a remark"],
        "by": {
            "column": "kind",
            "values": {
                value: {"prompts": i + 1, "score": {"reward": {name: estimate([i, 0.5]) for name in "ab"}}}
                for i, value in enumerate(("short", NASTY["markup"]))
            },
        },
    }  # fmt: skip


def test_hostile_texts_stay_inside_the_data():
    rows = [row(0, 0, (0.0, 1.0), texts=(NASTY["markup"], NASTY["separators"]), prompt=NASTY["markup"])]
    page = Page(comparison_page(summary_of(rows), rows))
    assert [tag for tag, _ in page.tags].count("script") == 3


def test_long_texts_and_many_rows_are_cut():
    rows = [row(0, 0, (0.0, 1.0), texts=("y" * 100_000, "z"))]
    text = comparison_page(summary_of(rows), rows)
    assert f"… ({100_000 - MAX_TEXT:,} more characters)" in text and len(text) < 200_000
    rows = [row(i, 0, (0.0, 1.0), texts=("y" * 1_000_000, "z")) for i in range(20)]
    assert len(comparison_page(summary_of(rows), rows)) < 500_000


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(find_chromium(), tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.slow
def test_the_page_shows_filters_and_sorts_responses(browser, tmp_path):
    """b wins on prompt 2, loses on prompt 3, ties on all others; prompt 1 has markup in its texts."""
    scores = {1: (0.0, 1.0), 2: (3.0, 0.0)}
    rows = [row(i, 0, scores.get(i, (1.0, 1.0)), texts=(f"one {i}", f"two {i}")) for i in range(12)]
    rows[0]["responses"]["a"]["response"] = "<img src=x onerror=alert(1)><b>bold</b>"
    rows[0]["asked"] = "ab\u202ecd"
    (tmp_path / "page.html").write_text(comparison_page(summary_of(rows), rows))
    browser.open(tmp_path / "page.html")
    lead = browser.text(".lead").replace("\u202f", " ")
    assert lead == "12 prompts of held.jsonl \u00b7 greedy responses \u00b7 at most 8 tokens"
    assert "50.0 %" in browser.text(".card").replace("\u202f", " ") and browser.count(".outcomes .won") == 1
    cards = " ".join(browser.texts(".card")).replace("\u202f", " ")
    assert "52.8 %" in cards and "0.478" in cards  # 0.5275 and 0.4775: halves up, as on the terminal
    assert browser.count(".prompt") == 10
    assert browser.texts(".answer")[0] == rows[0]["responses"]["a"]["response"]
    assert browser.count(".answer img, .answer b") == 0
    by = [card for card in browser.texts(".card") if card.startswith("reward by kind")]
    assert len(by) == 1 and NASTY["markup"] in by[0] and "0.25" in by[0]  # the mean of 0 and 0.5
    assert "null" not in browser.text("main")
    assert browser.texts(".prompt .asked")[0] == "ab\\u202ecd"
    assert browser.texts(".prompt .asked")[1] == "p 1" and browser.text(".columns") == "answer 5"
    browser.click(".pager button:last-child")
    browser.wait_for("document.querySelectorAll('.prompt').length === 2")
    browser.click("[aria-label='Outcome'] button:nth-child(2)")
    browser.wait_for("document.querySelectorAll('.prompt').length === 1")
    assert browser.text(".asked") == "p 1" and "b wins" in browser.text(".prompt .badge")
    browser.click("[aria-label='Outcome'] button:nth-child(4)")
    browser.wait_for("document.querySelector('.asked').innerText === 'p 2'")
    browser.click("[aria-label='Outcome'] button:nth-child(1)")
    browser.run(
        "(s => { s.value = 'loss'; s.dispatchEvent(new Event('change')); })"
        "([...document.querySelectorAll('select')].at(-1))"
    )
    browser.wait_for("document.querySelector('.asked').innerText === 'p 2'")
    browser.run(
        "(s => { s.value = 'two 7'; s.dispatchEvent(new Event('input')); })"
        "(document.querySelector('input[type=search]'))"
    )
    browser.wait_for("document.querySelectorAll('.prompt').length === 1")
    assert browser.text(".asked") == "p 7"
    assert browser.errors == [] and browser.requests == []


@pytest.mark.slow
def test_models_that_are_named_by_integers_keep_their_order(browser, tmp_path):
    """JavaScript sorts keys that are integers, also in a copy of an object."""
    names = {"a": "200", "b": "100"}
    rows = [row(0, 0, (0.0, 1.0), texts=("first", "second"))]
    summary = renamed(summary_of(rows), names)
    (tmp_path / "page.html").write_text(comparison_page(summary, renamed(rows, names)))
    browser.errors.clear()
    browser.open(tmp_path / "page.html")
    assert browser.texts(".answer") == ["first", "second"] and browser.errors == []
    assert browser.texts(".prompt .model-name") == ["200", "100"]
    assert "100 wins" in browser.text(".prompt .badge")


def renamed(value, names):
    """Replaces keys and values that are names of models."""
    if isinstance(value, dict):
        return {names.get(key, key): renamed(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [renamed(one, names) for one in value]
    return names.get(value, value) if isinstance(value, str) else value
