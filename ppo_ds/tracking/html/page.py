"""Renders HTML pages, each a single file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_ds.tracking.tracker import finite

ASSETS = Path(__file__).parent
STYLES = ("vendor/uPlot.min.css", "style.css")  # of every page
SCRIPTS = ("vendor/uPlot.min.js", "dom.js", "charts.js")
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Cpath d='M2 13 6 8l3 2 5-7' fill='none' stroke='%230b6bb8' stroke-width='2.4' "
    "stroke-linecap='round' stroke-linejoin='round'/%3E%3C/svg%3E"
)


def asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def render_page(
    title: str, body: str, data: Any, scripts: Sequence[str] = (), styles: Sequence[str] = ()
) -> str:
    """Returns a complete HTML page with the shared style, a heading, a switch of the theme, and ``data``.

    The page's content security policy allows only the given scripts and styles, by their hashes. ``body``
    must not contain text of users, prompts or models: scripts read such text from ``pageData()`` and set it
    as ``textContent``. All scripts become one module. Raises ValueError if a script or style has an end tag.
    """
    style = "\n".join([*map(asset, STYLES), *styles])
    theme = asset("theme.js")
    module = "\n".join([*map(asset, SCRIPTS), *scripts])
    for text, end in ((style, "</style"), (theme, "</script"), (module, "</script")):
        if end in text.lower():
            raise ValueError(f"a style or script of the page contains {end!r}")
    sources = f"script-src {_hash(theme)} {_hash(module)}; style-src {_hash(style)}; img-src data:"
    policy = f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{html.escape(title)}</title>
<link rel="icon" href="{ICON}">
<style>{style}</style>
<script>{theme}</script>
</head>
<body>
<main>
<noscript><p class="card">This page shows its content with JavaScript, which is off. It needs no network.</p>
</noscript>
<header class="page-head">
<h1>{html.escape(title)}</h1>
<button class="theme-switch" data-theme-switch title="Light or dark"
  aria-label="Switch between light and dark">
</button>
</header>
{body}
</main>
<script type="application/json" id="page-data">{json_for_html(data)}</script>
<script type="module">{module}</script>
</body>
</html>
"""


def json_for_html(data: Any) -> str:
    """Returns ``data`` as JSON that is safe inside a ``<script>`` element and can be encoded as UTF-8."""
    text = json.dumps(finite(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    return re.sub("[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
