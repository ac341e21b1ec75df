"""The main loop of the process that ``child.py`` starts.

It reads JSON lines from standard input (options, then log, samples, histograms, alert, artifact and finish
messages) and writes replies to standard output. If the input ends without a finish message (the trainer was
killed), the run is closed as failed. The library's own output goes to standard error, which is a log file.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol, TextIO

ORPHAN_TIMEOUT = 20.0  # seconds to close the run after the trainer has died
MAX_REFUSED = 20  # consecutive messages that the library refuses before this process gives up


class Client(Protocol):
    """A run in the library of a tracker. Any method may raise."""

    def log(self, step: int, metrics: dict[str, float]) -> None: ...

    def samples(self, step: int, rows: list[dict[str, Any]], split: str) -> None: ...

    def histograms(self, step: int, histograms: dict[str, dict[str, list[float]]]) -> None:
        """Records histograms: name -> counts and edges, see ``types.Histogram``."""

    def alert(self, step: int, text: str) -> None: ...

    def artifact(self, path: str, kind: str) -> None:
        """Uploads a file or folder; ``kind`` is report or model."""

    def finish(self, summary: dict[str, Any] | None) -> None:
        """Sends everything and closes the run; ``summary`` is None if the trainer was killed."""


def run_client(start: Callable[[dict[str, Any]], tuple[Client, str]]) -> None:
    """Serves the trainer until the run ends.

    ``start`` begins a run with the options and returns it, with a description of where it can be seen.
    """
    # Launchers signal every descendant. This process must outlive the signal to receive the trainer's last
    # messages; it exits when its input ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    messages = open(0, encoding="utf-8", closefd=False)  # UTF-8 whatever the locale
    options = json.loads(messages.readline() or "null")
    if options is None:
        return
    try:
        client, where = start(options)
    except Exception as error:  # the trainer continues without the library, whatever the reason
        lines = str(error).strip().splitlines()
        _send(replies, failed=": ".join([type(error).__name__, *lines[:1]]))
        return
    _send(replies, started=where)
    summary, refused = _serve(client, messages)
    if summary is None:
        threading.Timer(ORPHAN_TIMEOUT, os._exit, [1]).start()
    client.finish(summary)
    _send(replies, finished=True, refused=refused)
    os._exit(0)  # skips the library's exit hooks and the timer


def _serve(client: Client, messages: TextIO) -> tuple[dict[str, Any] | None, int]:
    """Forwards messages to the library until the finish message.

    Returns the summary (None if the input ended without it) and the number of messages that the library
    refused. A refused message does not affect later messages: a table of wandb, for example, needs the
    server, which may be unreachable for a minute.
    """
    refused = consecutive = 0
    for line in messages:
        message = json.loads(line)
        if "finish" in message:
            return message["finish"], refused
        try:
            _forward(client, message)
            consecutive = 0
        except Exception:
            traceback.print_exc()
            refused, consecutive = refused + 1, consecutive + 1
            if consecutive == MAX_REFUSED:
                raise
    return None, refused


def _forward(client: Client, message: dict[str, Any]) -> None:
    match message:
        case {"log": metrics, "step": step}:
            client.log(step, metrics)
        case {"samples": rows, "split": split, "step": step}:
            client.samples(step, rows, split)
        case {"histograms": histograms, "step": step}:
            client.histograms(step, histograms)
        case {"alert": text, "step": step}:
            client.alert(step, text)
        case {"artifact": path, "kind": kind}:
            client.artifact(path, kind)


def _send(stream: TextIO, **content: Any) -> None:
    try:
        print(json.dumps(content), file=stream, flush=True)
    except BrokenPipeError:
        pass  # the trainer is gone; the run is still closed
