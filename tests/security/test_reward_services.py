"""Tests what a reward service, or a proxy of the environment, can do with its replies."""

from __future__ import annotations

import json
import subprocess
import sys
from base64 import b64encode, urlsafe_b64encode

import pytest

from ppo_ds.errors import UserError
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.http_client import JsonClient
from ppo_ds.rewards.remote import SCORE
from tests.rewards.conftest import tokenizer
from tests.rewards.service import lengths, says, serving
from tests.rewards.test_remote import JUDGE_SETTINGS, SECRET, ask, bound, environment, refused

__all__ = ["ask", "environment", "tokenizer"]  # fixtures

BLANKS = 450_000  # a pattern of quadratic time would take a quarter of an hour


def test_a_reply_of_blanks_takes_linear_time():
    code = (
        "import re, sys; n = int(sys.argv[2])\n"
        "for text in ('score: 1' + ' ' * n + 'x', 'score: ' + '1' * n + 'x', ('\\n' + ' ' * 9) * (n // 10),\n"
        "             'score' + ' ' * n, 'score: 1' + '\\n' * n + 'x', 'score: 1.' * (n // 9)):\n"
        "    assert not re.search(sys.argv[1], text), text[:99]\n"
    )
    subprocess.run([sys.executable, "-c", code, SCORE, str(BLANKS)], timeout=120, check=True)


def test_an_own_pattern_searches_the_end_of_a_reply_only(ask):
    """Python cannot interrupt a search, so the length of the searched text is limited."""
    settings = JUDGE_SETTINGS | dict(pattern=r"score: (\d)", parse_retries=0)
    with serving(lambda number, body: says("score: 4" + " " * 9_000)) as service:
        assert ask(service, "a", **settings).tolist() == [4]
    with serving(lambda number, body: says("score: 4" + " " * 10_000)) as service:
        assert "gave no score" in refused(ask, service, "a", **settings)


def escaped(text: str, i: int, spelling: str) -> str:
    """Returns the text with its character ``i`` spelled in another way."""
    return text[:i] + spelling.format(ord(text[i])) + text[i + 1 :]


SPELLINGS = [
    SECRET,
    *(escaped(SECRET, i, r"\u{:04x}") for i in range(len(SECRET))),
    escaped(SECRET, 0, r"\u{:04X}"),
    escaped(SECRET, 4, r"\\u{:04x}"),
    "".join(rf"\u{ord(c):04x}" for c in SECRET),
    "".join(f"%{ord(c):02X}" for c in SECRET),
    "".join(f"%25{ord(c):02x}" for c in SECRET),
    escaped(SECRET, 4, "&#{};"),
    escaped(SECRET, 4, "&#x{:x};"),
    SECRET.replace("/", "\\/"),
    *(b64encode((before + SECRET + "after").encode()).decode() for before in ("", "B", "Be", "Bearer ")),
    urlsafe_b64encode(f"??>{SECRET}".encode()).decode(),
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_no_spelling_of_the_key_is_shown(ask, spelling):
    inner = spelling.strip("=")[8:-4]  # not even the middle of the key may be shown
    replies = (
        (403, {}, f"wrong key {spelling} given".encode()),
        (403, {}, f'{{"error": "wrong key {spelling}"}}'.encode()),
        (200, {}, f"no JSON: {spelling}".encode()),
        (200, {}, {"scores": [spelling, 1]}),
        (200, {}, {spelling: 1}),
    )
    for reply in replies:
        with serving(lambda number, body, reply=reply: reply) as service:
            line = refused(ask, service, key_env="JUDGE_KEY")
        assert inner not in line and "***" in line, line


@pytest.mark.parametrize("status", [200, 403])
def test_the_key_is_searched_only_in_the_part_of_a_reply_that_an_error_can_quote(ask, monkeypatch, status):
    """A search cannot be interrupted, and one of several MB could take longer than timeout_seconds."""
    searched, search = [], JsonClient._without_key
    monkeypatch.setattr(
        JsonClient, "_without_key", lambda self, text: searched.append(len(text)) or search(self, text)
    )
    body = f"no JSON: {SECRET} ".encode() + b"\\" * 4_000_000
    with serving(lambda number, _: (status, {}, body)) as service:
        line = refused(ask, service, key_env="JUDGE_KEY")
    assert SECRET not in line and "***" in line
    assert searched and max(searched) <= 20_000


def test_a_deep_reply_is_an_error(ask):
    for depth in (500, 900, 5_000, 100_000):
        with serving(lambda number, body, depth=depth: (200, {}, b"[" * depth + b"]" * depth)) as service:
            with pytest.raises(RewardError):
                ask(service, key_env="JUDGE_KEY")


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_gets_nothing(ask, monkeypatch, variable):
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(lengths) as proxy, serving(lengths) as service:
        monkeypatch.setenv(variable, proxy.url.removesuffix("/score"))
        assert ask(service, key_env="JUDGE_KEY").tolist() == [3, 2]
        assert (len(proxy.bodies), len(service.bodies)) == (0, 1)


def test_a_proxy_of_the_config_is_used(ask):
    with serving(lengths) as proxy, serving(lengths) as service:
        assert ask(service, proxy=proxy.url.removesuffix("/score")).tolist() == [3, 2]
        assert (len(proxy.bodies), len(service.bodies)) == (1, 0)


def test_a_password_of_a_proxy_is_refused(tokenizer):
    with pytest.raises(UserError, match="^reward.proxy: holds a password or a key"):
        bound(tokenizer, "http://host/x", proxy="http://me:you@proxy")


def test_passwords_of_the_environment_are_not_sent(ask, monkeypatch, tmp_path):
    """Without a key_env, httpx would send the password that ~/.netrc has for the host."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secretpass\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with serving(lengths) as service:
        ask(service)
    assert "Authorization" not in service.headers[0], json.dumps(service.headers[0])
