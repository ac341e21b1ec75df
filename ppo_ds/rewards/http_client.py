"""Posts JSON to a service and returns the JSON of its reply.

Transient failures (no connection, a timeout, status 429 or 5xx) are retried; other failures are final. The
API key comes from an environment variable and is redacted in all errors and replies.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
from base64 import b64encode
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
from pydantic import PlainValidator

from ppo_ds.config.types import refuse

_MAX_PAUSE = 60.0  # seconds; also the limit of Retry-After, because other ranks wait meanwhile
_MIN_KEY_LENGTH = 8  # shorter keys ("EMPTY") are redacted in errors only
_MAX_QUOTED = 200  # characters of a reply that an error quotes
_MAX_SEARCHED = 20_000  # characters of a reply in which the key is searched; no timeout interrupts the search
_URL_SAFE = str.maketrans("+/", "-_")  # from base64 to the URL-safe alphabet
_SECRET = re.compile(r"key|token|secret|passw|signature|^(sig|auth|code)$", re.IGNORECASE)


def _service_url(value: Any) -> str:
    """Validates a config key that holds a URL; refuses URLs that contain secrets.

    Runs before config.yaml is written, so that a refused secret is not stored there.
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
        shown = "" if "@" in value else f"={value}"  # me:password@host is parsed as a URL without userinfo
        refuse(f"$KEY{shown}: must begin with http:// or https:// and a host", whole_line=True)
    return str(url)


def _key_variable(value: Any) -> str:
    """Validates a config key that holds the name of an environment variable; errors never show secrets."""
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


class ServiceError(Exception):
    """Raised if a service sends no usable reply.

    ``retry_after`` is the minimum pause in seconds before the next attempt; None: no further attempt.
    """

    def __init__(self, reason: str, retry_after: float | None = None):
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass
class JsonClient:
    """Posts JSON to one URL with retries."""

    url: str  # as validated by ServiceUrl
    key_env: str | None  # the environment variable with the API key, as validated by KeyVariable
    timeout_seconds: float  # the time limit of one attempt, from the connection to the reply's last byte
    retries: int  # the number of attempts after the first
    backoff_seconds: float  # the pause before the first retry, times 0.5 to 1 at random; it doubles each time
    max_response_mb: float
    proxy: str | None = None  # the URL of a proxy, through which all requests are sent

    def __post_init__(self) -> None:
        # both libraries log URLs with their queries, and headers that may contain the key
        for library in ("httpx", "httpcore"):
            logging.getLogger(library).setLevel(logging.WARNING)
        self._url, self._ssl = httpx.URL(self.url), httpx.create_ssl_context()
        self._max_bytes = int(self.max_response_mb * 2**20)
        self._jitter = random.Random()  # a separate generator, so that retries do not change the run
        self._key = os.environ[self.key_env].strip() if self.key_env else ""
        self._key_pattern = _spellings(self._key) if self._key else None
        self._headers = dict.fromkeys(("Content-Type", "Accept"), "application/json")
        self._headers["Accept-Encoding"] = "identity"
        if self._key:
            self._headers["Authorization"] = f"Bearer {self._key}"

    @property
    def shown(self) -> str:
        return str(self._url.copy_with(query=None, fragment=None))

    async def post(self, payload: bytes) -> Any:
        """Posts ``payload`` and returns the JSON of the reply; raises ServiceError after the last attempt."""
        attempt = 1
        while True:
            try:
                async with asyncio.timeout(self.timeout_seconds):
                    return await self._attempt(payload)
            except (TimeoutError, httpx.TimeoutException):
                failure = ServiceError(f"no reply within {self.timeout_seconds:g} s", retry_after=0.0)
            except httpx.TransportError as error:
                failure = ServiceError(self._excerpt(f"{type(error).__name__}: {error}"), retry_after=0.0)
            except ServiceError as error:
                failure = error
            if failure.retry_after is None or attempt > self.retries:
                raise ServiceError(f"{failure}; {attempt} attempt(s)") from None
            # the jitter keeps clients from retrying all at once
            backoff = self.backoff_seconds * 2 ** (attempt - 1) * self._jitter.uniform(0.5, 1.0)
            await asyncio.sleep(min(_MAX_PAUSE, max(failure.retry_after, backoff)))
            attempt += 1

    async def _attempt(self, payload: bytes) -> Any:
        # trust_env=False ignores the environment's proxies, which would receive the key, and passwords in
        # ~/.netrc; the SSL context still reads SSL_CERT_FILE
        client = httpx.AsyncClient(timeout=None, trust_env=False, verify=self._ssl, proxy=self.proxy)
        body = bytearray()
        async with client, client.stream("POST", self._url, content=payload, headers=self._headers) as reply:
            if reply.headers.get("Content-Encoding", "identity") != "identity":
                # a small compressed body can expand to a huge one
                raise ServiceError("the reply is compressed, which the request does not accept")
            async for piece in reply.aiter_raw():
                body += piece
                if len(body) > self._max_bytes:
                    break
        status, retry_after = reply.status_code, None
        if 300 <= status < 400:
            raise ServiceError(f"status {status}: redirects are not followed; give the final URL")
        if status >= 400:
            if status == 429 or status >= 500:
                retry_after = 0.0
                with suppress(ValueError):  # a date is ignored: the usual pause applies
                    retry_after = max(0.0, float(reply.headers.get("Retry-After", "")))
            text = body[: self._max_bytes].decode("utf-8", "replace")
            raise ServiceError(self._excerpt(f"status {status}: {text}"), retry_after)
        if len(body) > self._max_bytes:
            raise ServiceError(f"the reply exceeds {self._max_bytes / 2**20:g} MB")
        try:  # errors quote parts of the reply, so the key is redacted first
            return self._without_key_in(json.loads(body))
        except (ValueError, RecursionError):
            text = body.decode("utf-8", "replace")
            raise ServiceError(self._excerpt(f"the reply is not JSON: {text}")) from None

    def _without_key(self, text: str) -> str:
        return text if self._key_pattern is None else self._key_pattern.sub("***", text)

    def _without_key_in(self, reply: Any) -> Any:
        """Returns a JSON value with the key removed from its texts, unless the key is a short placeholder."""
        if len(self._key) < _MIN_KEY_LENGTH:
            return reply
        if isinstance(reply, dict):
            return {self._without_key(name): self._without_key_in(item) for name, item in reply.items()}
        if isinstance(reply, list):
            return [self._without_key_in(item) for item in reply]
        return self._without_key(reply) if isinstance(reply, str) else reply

    def _excerpt(self, text: str) -> str:
        """Prepares a service's text for an error message: one line, shortened, without the API key."""
        words = " ".join(text[:_MAX_SEARCHED].split())
        text = self._without_key("".join(c if c.isprintable() else "?" for c in words))
        return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."


def _spellings(key: str) -> re.Pattern[str]:
    """Returns a pattern that matches the encodings of the key that a reply may contain.

    Each character may be escaped as in JSON, a URL or HTML, and the key may be part of a base64 text.
    """
    characters = []
    for c in key:
        code = f"{ord(c):x}"
        in_json = rf"\\{{1,8}}+(?:u0*{code}|{re.escape(c)})"  # \u0073, \/ and their repeated escapes
        characters.append(rf"(?:{re.escape(c)}|(?i:{in_json}|%(?:25)*{code}|&#(?:0*{ord(c)}|x0*{code});))")
    texts = ["".join(characters)]
    for shift in range(3) if len(key) >= _MIN_KEY_LENGTH else ():
        # the base64 letters of the key if ``shift`` bytes precede it in its group of 3; letters that also
        # depend on the bytes around the key are left out
        letters = b64encode(bytes(shift) + key.encode()).decode().rstrip("=")
        letters = letters[-(-8 * shift // 6) : 8 * (shift + len(key)) // 6]
        texts += [re.escape(letters), re.escape(letters.translate(_URL_SAFE))]
    return re.compile("|".join(texts))
