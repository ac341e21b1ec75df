"""Tests the frame of all HTML pages: one file, a strict content security policy, data that cannot escape."""

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser

import pytest

from ppo_ds.tracking.html.page import json_for_html, render_page

NASTY = {
    "markup": "<script>alert(1)</script><!-- </SCRIPT >",
    "separators": "a\u2028b\u2029c",
    "surrogate": "\ud83d",
    "entities": "&lt;&amp;",
    "cjk": "奖励 👍",
    "long": "x" * 100_000,
}


class Page(HTMLParser):
    """Collects the start tags with their attributes, and the text of each script and style."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style", "title"):
            self._open = (tag, dict(attrs).get("type"))
            self.texts.append((*self._open, ""))

    def handle_data(self, data):
        if self._open:
            self.texts[-1] = (*self._open, self.texts[-1][2] + data)

    def handle_endtag(self, tag):
        self._open = None


def page_of(data, **options):
    return Page(render_page("A <title> & more", "<p>body</p>", data, **options))


def test_data_arrives_unchanged_and_stays_inside_its_element():
    page = page_of(NASTY)
    data = [text for tag, kind, text in page.texts if kind == "application/json"]
    assert len(data) == 1 and json.loads(data[0]) == NASTY
    assert [tag for tag, _ in page.tags].count("script") == 3  # theme, data, module
    assert not re.search("[<>&\u2028\u2029\ud800-\udfff]", data[0])
    assert render_page("t", "", NASTY).encode("utf-8")
    assert [text for tag, _, text in page.texts if tag == "title"] == ["A <title> & more"]


def test_numbers_that_json_cannot_represent_become_null():
    assert json_for_html({"a": [math.nan, math.inf, 1.5]}) == '{"a":[null,null,1.5]}'


def test_the_policy_allows_exactly_the_scripts_and_styles_of_the_page():
    page = page_of({}, scripts=["const a = 1;", "a + 1;"], styles=["p { color: red }"])
    (policy,) = [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "http-equiv" in attrs]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    for kind, tag in (("script-src", "script"), ("style-src", "style")):
        texts = [text for name, mime, text in page.texts if name == tag and mime != "application/json"]
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert rules[kind] == " ".join(f"'sha256-{digest}'" for digest in digests)
    assert "unsafe" not in policy and "http" not in policy


def test_a_page_refers_to_nothing_outside_itself():
    page = page_of({}, scripts=["1"], styles=["p {}"])
    for tag, attrs in page.tags:
        assert not attrs.get("src") and attrs.get("href", "data:").startswith("data:"), (tag, attrs)
        assert not any(name.startswith("on") or name == "style" for name in attrs), (tag, attrs)
    style = "".join(text for tag, _, text in page.texts if tag == "style")
    assert "noscript" in [tag for tag, _ in page.tags]
    assert "url(" not in style and "@import" not in style


@pytest.mark.parametrize("parts", [{"scripts": ["'</Script>'"]}, {"styles": ["/* </style> */"]}])
def test_a_script_that_would_end_its_own_element_is_refused(parts):
    with pytest.raises(ValueError, match="contains '</"):
        render_page("t", "", {}, **parts)
