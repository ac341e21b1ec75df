"""Posts JSON to a service and returns the JSON of its reply.

Transient failures (no connection, a timeout, status 429 or 5xx) are retried after a pause that doubles each
time; any other failure is final. Redirects are not followed and replies are read up to a size limit. The
service's key comes from the environment and is removed from every error and reply.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import socket
from base64 import b64encode
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from threading import Event, Lock, Timer
from typing import Annotated, Any

import httpx
from pydantic import PlainValidator

from ppo_ds.config.types import refuse

_MAX_PAUSE = 60.0  # seconds; also the limit of Retry-After, because the other ranks wait meanwhile
_MIN_KEY_LENGTH = 8  # shorter keys are placeholders ("EMPTY"), and are not removed from replies
_MAX_QUOTED = 200  # characters of a reply that an error quotes
_URL_SAFE = str.maketrans("+/", "-_")  # from base64 to its URL-safe alphabet
_SECRET = re.compile(r"key|token|secret|passw|signature|^(sig|auth|code)$", re.IGNORECASE)


def _service_url(value: Any) -> str:
    """Validates a config key that holds a URL and refuses URLs that contain secrets.

    This happens before config.yaml is written, so a refused secret is not stored there.
    """
    try:
        url = httpx.URL(value)
    except (httpx.InvalidURL, TypeError, ValueError):
        refuse("$KEY: is not a URL; give one such as http://localhost:8000/score", whole_line=True)
    if url.userinfo or any(_SECRET.search(name) for name in url.params):
        refuse(
            "$KEY: holds a password or a key; put it into an environment variable and name "
            "that in $SECTION.key_env",
            whole_line=True,
        )
    if url.scheme not in ("http", "https") or not url.host:
        shown = "" if "@" in value else f"={value}"  # me:password@host is parsed without userinfo
        refuse(f"$KEY{shown}: must begin with http:// or https:// and a host", whole_line=True)
    return str(url)


def _key_variable(value: Any) -> str:
    """Validates a config key that names an environment variable; errors never repeat a secret."""
    if not isinstance(value, str) or not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
        refuse(
            "$KEY: must be the name of an environment variable, in capitals, never the secret itself",
            whole_line=True,
        )
    secret = os.environ.get(value, "").strip()
    if not secret:
        refuse("this environment variable is not set or empty; set it where the run starts")
    if not (secret.isascii() and secret.isprintable() and " " not in secret):
        refuse(
            "the value of this variable cannot be sent as a key: it contains spaces, line breaks or "
            "non-ASCII characters"
        )
    return value


ServiceUrl = Annotated[str, PlainValidator(_service_url)]
KeyVariable = Annotated[str, PlainValidator(_key_variable)]


class ServiceError(RuntimeError):
    """Raised when a service gives no usable reply; the message has the reason and the number of attempts."""


class _FailedAttempt(Exception):
    """Raised for a failed attempt. ``retry_after`` is the minimum pause in seconds, None for no retry."""

    def __init__(self, reason: str, retry_after: float | None = None):
        super().__init__(reason)
        self.retry_after = retry_after


class _Deadline:
    """Bounds the total time of a request by shutting down its socket.

    httpx cannot limit the total time: its timeouts apply to each read. httpcore reports only the sockets of
    new connections, so connections must not be reused.
    """

    def __init__(self, seconds: float):
        self.passed = False
        self._socket: socket.socket | None = None
        self._lock, self._timer = Lock(), Timer(seconds, self._expire)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """Receives httpcore's trace events and keeps the socket of the connection."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                self._shut_down_if_passed()

    def _expire(self) -> None:
        with self._lock:
            self.passed = True
            self._shut_down_if_passed()

    def _shut_down_if_passed(self) -> None:
        if self.passed and self._socket is not None:
            with suppress(OSError):  # the other side or httpx has closed it
                # the plain socket's method also interrupts a thread that is reading from a TLS socket
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class JsonClient:
    """Posts JSON to one URL with retries.

    The retries are not left to a library, because a pause must respect ``Retry-After``, end as soon as the
    run is cancelled, and have a jitter that leaves the process-wide random state unchanged.
    """

    def __init__(
        self,
        url: str,
        key_env: str | None,
        *,
        timeout_seconds: float,
        retries: int,
        backoff_seconds: float,
        max_response_mb: float,
        proxy: str | None = None,
    ):
        """Initializes the client.

        Args:
            url: The service's URL, as validated by ServiceUrl.
            key_env: The environment variable with the service's key, as validated by KeyVariable.
            timeout_seconds: The time limit of one attempt, from the connection to the reply's last byte.
            retries: The number of attempts after the first.
            backoff_seconds: The pause before the first retry.
            max_response_mb: The maximum size of a reply.
            proxy: The URL of a proxy, through which all requests are sent.
        """
        self._url, self._proxy = httpx.URL(url), proxy
        self._key = os.environ[key_env].strip() if key_env else None
        self._timeout, self._retries, self._backoff = timeout_seconds, retries, backoff_seconds
        self._max_bytes = int(max_response_mb * 2**20)
        self._jitter = random.Random()  # a separate generator, so that retries do not change the run
        self._key_pattern = _spellings(self._key) if self._key else None

    @property
    def shown(self) -> str:
        """The URL without query and fragment."""
        return str(self._url.copy_with(query=None, fragment=None))

    def open(self, connections: int) -> httpx.Client:
        """Opens an httpx client for at most ``connections`` simultaneous requests."""
        # both libraries log URLs with their queries, and headers that may contain the key
        for library in ("httpx", "httpcore"):
            logging.getLogger(library).setLevel(logging.WARNING)
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
        }
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=0)  # see _Deadline
        return httpx.Client(
            headers=headers,
            timeout=self._timeout,
            limits=limits,
            follow_redirects=False,
            # ignores the environment's proxies, which would receive the key, and passwords in ~/.netrc; the
            # context below still reads SSL_CERT_FILE
            trust_env=False,
            verify=httpx.create_ssl_context(),
            proxy=self._proxy,
        )

    def post(self, client: httpx.Client, payload: bytes, cancelled: Event) -> Any:
        """Posts ``payload`` and returns the JSON of the reply.

        Raises ServiceError after a final failure or the last attempt. Nothing is retried once ``cancelled``
        is set.
        """
        attempt = 1
        while True:
            try:
                return self._attempt(client, payload)
            except _FailedAttempt as failure:
                give_up = failure.retry_after is None or attempt > self._retries
                if not give_up:
                    # the jitter keeps clients from retrying all at once
                    backoff = self._backoff * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.0)
                    give_up = cancelled.wait(min(_MAX_PAUSE, max(failure.retry_after, backoff)))
                if give_up:
                    raise ServiceError(f"{failure}; {attempt} attempt(s)") from None
            attempt += 1

    def _attempt(self, client: httpx.Client, payload: bytes) -> Any:
        timed_out = _FailedAttempt(f"no reply within {self._timeout:g} s", retry_after=0.0)
        with _Deadline(self._timeout) as deadline:
            try:
                with client.stream(
                    "POST", self._url, content=payload, extensions={"trace": deadline.trace}
                ) as response:
                    body = self._read_body(response)
            except httpx.TimeoutException:
                raise timed_out from None
            except httpx.TransportError as error:
                if deadline.passed:
                    raise timed_out from None
                reason = self._excerpt(f"{type(error).__name__}: {error}")
                raise _FailedAttempt(reason, retry_after=0.0) from None
        if deadline.passed:  # a reply without Content-Length looks complete when it is cut off
            raise timed_out
        self._check_status(response, body)
        if len(body) > self._max_bytes:
            raise _FailedAttempt(f"the reply exceeds {self._max_bytes / 2**20:g} MB")
        try:
            reply = json.loads(body)
            if self._key is None or len(self._key) < _MIN_KEY_LENGTH:
                return reply
            return self._without_key_in(reply)  # errors quote parts of the reply
        except (ValueError, RecursionError):
            text = body.decode("utf-8", "replace")
            raise _FailedAttempt(self._excerpt(f"the reply is not JSON: {text}")) from None

    def _read_body(self, response: httpx.Response) -> bytes:
        """Reads the body, and stops once it exceeds the size limit."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            # a small compressed body can expand to a huge one
            raise _FailedAttempt("the reply is compressed, which the request does not accept")
        body = b""
        for piece in response.iter_raw():
            body += piece
            if len(body) > self._max_bytes:
                break
        return body

    def _check_status(self, response: httpx.Response, body: bytes) -> None:
        status = response.status_code
        if status < 300:
            return
        if status < 400:
            raise _FailedAttempt(
                f"status {status} redirects to {self._redirect_target(response)}; redirects are not followed"
            )
        text = body[: self._max_bytes].decode("utf-8", "replace")
        retry_after = None
        if status == 429 or status >= 500:
            retry_after = _parse_retry_after(response.headers.get("Retry-After", ""))
        raise _FailedAttempt(self._excerpt(f"status {status}: {text}"), retry_after)

    def _redirect_target(self, response: httpx.Response) -> str:
        """Describes the target of a redirect, without its query and without the key."""
        try:
            target = self._url.join(response.headers.get("Location", ""))
        except httpx.InvalidURL:
            return "an invalid URL"
        if (target.scheme, target.host, target.port) == (self._url.scheme, self._url.host, self._url.port):
            return self._excerpt(f"{target.path} of the same host")
        return self._excerpt(f"another host, {target.scheme}://{target.host}")

    def _without_key(self, text: str) -> str:
        return text if self._key_pattern is None else self._key_pattern.sub("***", text)

    def _without_key_in(self, reply: Any) -> Any:
        """Returns a JSON value with the key removed from all of its texts."""
        if isinstance(reply, dict):
            return {self._without_key(name): self._without_key_in(item) for name, item in reply.items()}
        if isinstance(reply, list):
            return [self._without_key_in(item) for item in reply]
        return self._without_key(reply) if isinstance(reply, str) else reply

    def _excerpt(self, text: str) -> str:
        """Prepares a service's text for an error message: one line, shortened, without the key."""
        text = self._without_key("".join(c if c.isprintable() else "?" for c in " ".join(text.split())))
        return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."


def _spellings(key: str) -> re.Pattern[str]:
    """Returns a pattern that matches the ways in which a reply may spell the key.

    Each character may be escaped as in JSON, a URL or HTML, and the key may be part of a base64 text.
    """
    characters = []
    for c in key:
        code = f"{ord(c):x}"
        in_json = rf"\\{{1,8}}(?:u0*{code}|{re.escape(c)})"  # \u0073, \/ and their repeated escapes
        characters.append(rf"(?:{re.escape(c)}|(?i:{in_json}|%(?:25)*{code}|&#(?:0*{ord(c)}|x0*{code});))")
    texts = ["".join(characters)]
    for shift in range(3) if len(key) >= _MIN_KEY_LENGTH else ():
        # the base64 letters of the key if ``shift`` bytes precede it in its group of 3; letters that also
        # depend on the bytes around the key are left out
        letters = b64encode(bytes(shift) + key.encode()).decode().rstrip("=")
        letters = letters[-(-8 * shift // 6) : 8 * (shift + len(key)) // 6]
        texts += [re.escape(letters), re.escape(letters.translate(_URL_SAFE))]
    return re.compile("|".join(texts))


def _parse_retry_after(value: str) -> float:
    """Converts a Retry-After header, a number or a date, to seconds; returns 0 if it is neither."""
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # TypeError: a date without a time zone
        return 0.0
