"""An address on the network: JSON is posted to it, JSON comes back.

What may pass by itself is tried again, after a pause that doubles: no connection, a time-out, 429, 5xx. Anything else fails at once. Redirects are
not followed, replies are read up to a limit, and the service's key, which the environment alone holds, is cut out of whatever is said of it.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import socket
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Event, Lock, Timer
from typing import Any
from urllib.parse import quote

import httpx

from ppo_ds.errors import UserError

_LONGEST_PAUSE = 60.0  # seconds, whatever Retry-After asks for
_SHORTEST_KEY = (
    8  # of those that are looked for in what a judge says; shorter ones are stand-ins for none ("EMPTY")
)
_QUOTED = 200  # characters of a reply that an error shows
_SECRET = re.compile(r"key|token|secret|passw|signature|^(sig|auth|code)$", re.IGNORECASE)


class Address:
    """How a config key that holds an address is read: before config.yaml is written, since that is no place for a password."""

    def read(self, value: Any, key: str) -> str:
        try:
            url = httpx.URL(value)
        except (httpx.InvalidURL, TypeError, ValueError):
            raise UserError(f"{key}: is no address; give one such as http://localhost:8000/score") from None
        if url.userinfo or any(_SECRET.search(name) for name in url.params):
            raise UserError(
                f"{key}: holds a password or a key; put it into an environment variable and name that in {_beside(key, 'key_env')}"
            )
        if url.scheme not in ("http", "https") or not url.host:
            quoted = (
                "" if "@" in value else f"={value}"
            )  # me:password@host has no scheme, and so no user either
            raise UserError(f"{key}{quoted}: must begin with http:// or https:// and a host")
        return str(url)


class KeyName:
    """How a config key that names an environment variable is read. What looks like the secret itself is not shown again."""

    def read(self, value: Any, key: str) -> str:
        if not isinstance(value, str) or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise UserError(
                f"{key}: must be the name of an environment variable, in capitals, never the secret itself"
            )
        secret = os.environ.get(value, "").strip()
        if not secret:
            raise UserError(
                f"{key}={value}: no such environment variable, or an empty one; set it where the run starts"
            )
        if not (secret.isascii() and secret.isprintable() and " " not in secret):
            raise UserError(
                f"{key}={value}: what this variable holds cannot be sent as a key: it has blanks, line breaks or letters beyond ASCII"
            )
        return value


class ServiceError(RuntimeError):
    """No reply that could be used: what was the matter, and how often the service was asked."""


class _Failure(Exception):
    """One attempt in vain. ``pause``: the seconds to wait at least before another one makes sense; None: it makes none."""

    def __init__(self, reason: str, pause: float | None = None):
        super().__init__(reason)
        self.pause = pause


class _Deadline:
    """Ends a request that takes longer than ``seconds`` in all, by shutting its connection: httpx's own limits are for each piece that comes.

    Only a new connection is told of, so that none may be used twice.
    """

    def __init__(self, seconds: float):
        self.passed = False
        self._socket: socket.socket | None = None
        self._lock, self._timer = Lock(), Timer(seconds, self._pass)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def watch(self, event: str, info: dict[str, Any]) -> None:
        """httpcore's trace: what it does, and the stream that came of it."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                self._shut()

    def _pass(self) -> None:
        with self._lock:
            self.passed = True
            self._shut()

    def _shut(self) -> None:
        if self.passed and self._socket is not None:
            with suppress(OSError):  # closed by the other side or by httpx meanwhile
                socket.socket.shutdown(
                    self._socket, socket.SHUT_RDWR
                )  # of a TLS socket too, which another thread is reading


class JsonClient:
    """``url`` and ``key_env`` as Address and KeyName leave them. One attempt may take ``timeout_seconds``; there are ``retries`` more."""

    def __init__(
        self,
        url: str,
        key_env: str | None,
        *,
        timeout_seconds: float,
        retries: int,
        backoff_seconds: float,
        max_response_mb: float,
    ):
        self._url = httpx.URL(url)
        self._secret = os.environ[key_env].strip() if key_env else None
        written = (
            []
            if self._secret is None
            else [
                self._secret,
                json.dumps(self._secret)[1:-1],
                quote(self._secret),
                quote(self._secret, safe=""),
            ]
        )
        self._forms = sorted(
            {form for text in written for form in (text, text.replace("/", "\\/"))}, key=len, reverse=True
        )
        self._timeout, self._retries, self._backoff = timeout_seconds, retries, backoff_seconds
        self._max_bytes = int(max_response_mb * 2**20)
        self._jitter = random.Random()  # its own: a run's random state must not hang on the weather

    @property
    def shown(self) -> str:
        """The address without what follows its path."""
        return str(self._url.copy_with(query=None, fragment=None))

    def client(self, connections: int) -> httpx.Client:
        for library in (
            "httpx",
            "httpcore",
        ):  # they log addresses with their queries, and headers, in which a service may repeat the key
            logging.getLogger(library).setLevel(logging.WARNING)
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
        }
        if self._secret:
            headers["Authorization"] = f"Bearer {self._secret}"
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)  # see _Deadline
        return httpx.Client(headers=headers, timeout=self._timeout, limits=limits, follow_redirects=False)

    def post(self, client: httpx.Client, payload: bytes, stopped: Event) -> Any:
        """The reply's JSON. Raises ServiceError: after the last attempt, or once ``stopped`` is set instead of the next one."""
        attempt = 1
        while True:
            try:
                return self._attempt(client, payload)
            except _Failure as failure:
                if (
                    failure.pause is None
                    or attempt > self._retries
                    or stopped.wait(self._pause(failure.pause, attempt))
                ):
                    raise ServiceError(f"{failure}; asked {attempt} time(s)") from None
            attempt += 1

    def _pause(self, asked: float, attempt: int) -> float:
        """Doubled each time, and not the same for all who wait."""
        return min(
            _LONGEST_PAUSE, max(asked, self._backoff * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.0))
        )

    def _attempt(self, client: httpx.Client, payload: bytes) -> Any:
        late = _Failure(f"no answer within {self._timeout:g} s", pause=0.0)
        with _Deadline(self._timeout) as deadline:
            try:
                with client.stream(
                    "POST", self._url, content=payload, extensions={"trace": deadline.watch}
                ) as response:
                    body, whole = self._body(response)
            except httpx.TimeoutException:
                raise late from None
            except httpx.TransportError as error:
                raise (
                    late
                    if deadline.passed
                    else _Failure(self._clean(f"{type(error).__name__}: {error}"), pause=0.0)
                ) from None
        if deadline.passed:  # a reply of no stated length looks complete where it was cut off
            raise late
        status, text = response.status_code, body.decode("utf-8", "replace")
        if status == 429 or status >= 500:
            raise _Failure(
                self._clean(f"answered {status}: {text}"),
                _asked_pause(response.headers.get("Retry-After", "")),
            )
        if 300 <= status < 400:
            raise _Failure(
                f"answered {status}, which sends to {self._goal(response)}; redirects are not followed"
            )
        if status >= 400:
            raise _Failure(self._clean(f"answered {status}: {text}"))
        if not whole:
            raise _Failure(f"answered more than {self._max_bytes / 2**20:g} MB")
        try:
            return self._unrevealing(json.loads(body))
        except (ValueError, RecursionError):
            raise _Failure(self._clean(f"answered what is no JSON: {text}")) from None

    def _body(self, response: httpx.Response) -> tuple[bytes, bool]:
        """The body as far as the limit, and whether that is all. Raw: a small compressed body could be a huge one."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise _Failure("answered in compressed form, which it was not asked for")
        body = b""
        for piece in response.iter_raw():
            body += piece
            if len(body) > self._max_bytes:
                return body[: self._max_bytes], False
        return body, True

    def _without_key(self, text: str) -> str:
        """Stars for the key, also as JSON and addresses write it."""
        for form in self._forms:
            text = text.replace(form, "***")
        return text

    def _unrevealing(self, reply: Any) -> Any:
        """The same without the key: errors quote parts of a reply. Written anew, since a service may have escaped any letter of it."""
        if self._secret is None or len(self._secret) < _SHORTEST_KEY:
            return reply
        return json.loads(self._without_key(json.dumps(reply, ensure_ascii=False)))

    def _goal(self, response: httpx.Response) -> str:
        """Where a redirect leads, as far as can be said aloud."""
        try:
            goal = self._url.join(response.headers.get("Location", ""))
        except httpx.InvalidURL:
            return "no address"
        if (goal.scheme, goal.host, goal.port) == (self._url.scheme, self._url.host, self._url.port):
            return self._clean(f"{goal.path} of the same host")
        return self._clean(f"another host, {goal.scheme}://{goal.host}")

    def _clean(self, text: str) -> str:
        """On one line, short, and without the key, which some services repeat."""
        text = self._without_key("".join(c if c.isprintable() else "?" for c in " ".join(text.split())))
        return text if len(text) <= _QUOTED else text[: _QUOTED - 3] + "..."


def _asked_pause(value: str) -> float:
    """Seconds, from a number of them or a date."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without a time zone
        return 0.0


def _beside(key: str, name: str) -> str:
    return f"{key.rpartition('.')[0]}.{name}".lstrip(".")
