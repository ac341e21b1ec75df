"""Tests that a run asks once whether the Hub can be reached, and not at all for names that are local."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch import hub
from launch.hub import DECIDED, use_caches_without_the_hub, why_unreachable
from tests.support.environment import ROOT, environment

LIMIT = 120.0  # seconds; never reached


@contextmanager
def server(answer: bytes | None) -> Iterator[tuple[str, list[int]]]:
    """Serves ``answer`` to every connection, or closes it if None; yields the URL and the connections."""
    connections: list[int] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, address = listener.accept()
                except OSError:  # the listener is closed
                    return
                connections.append(address[1])
                with connection:
                    if answer is not None:
                        connection.recv(4096)
                        connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", connections
        listener.shutdown(socket.SHUT_RDWR)  # wakes up accept


@pytest.fixture(autouse=True)
def undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*DECIDED, "http_proxy", "HTTP_PROXY", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "503 Service Unavailable"])
def test_any_answer_counts_as_reachable(status: str) -> None:
    with server(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()) as (url, connections):
        assert why_unreachable(url, LIMIT) is None
    assert len(connections) == 1


def test_reasons_why_the_hub_cannot_be_reached() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens on this port
        assert why_unreachable(f"http://127.0.0.1:{bound.getsockname()[1]}", LIMIT) == "Connection refused"
    with server(None) as (url, _):
        assert why_unreachable(url, LIMIT) is not None
    assert why_unreachable("nonsense", LIMIT) == "unknown url type: 'nonsense'"


def test_a_server_that_never_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, but not accepted
        reason = why_unreachable(f"http://127.0.0.1:{silent.getsockname()[1]}", 0.2)
    assert reason == "no answer within 0.2 s"


@pytest.mark.parametrize(
    ("names", "setting", "asks"),
    [
        (["org/model"], {}, True),
        ([], {}, False),
        (["org/model"], {"HF_HUB_OFFLINE": "0"}, False),
        (["org/model"], {"TRANSFORMERS_OFFLINE": "1"}, False),
        (["org/model"], {"LOCAL_RANK": "1"}, False),
        (["org/model"], {"RANK": "8", "LOCAL_RANK": "0"}, True),  # the first rank of the second node
    ],
)
def test_who_asks(
    names: list[str], setting: dict[str, str], asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)
    monkeypatch.setattr(hub, "why_unreachable", lambda url, seconds: asked.append(url))
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    use_caches_without_the_hub(names)
    assert asked == ["http://mirror"] * asks
    assert os.environ.get("HF_HUB_OFFLINE") == setting.get("HF_HUB_OFFLINE")


@pytest.mark.parametrize(
    ("script", "arguments", "code"),
    [("doctor", ["--gpu", "h100", "--gpus", "1"], 1), ("train", ["run.dir=RUN_DIR"], 2)],
)
def test_an_unreachable_hub_is_asked_once(
    script: str, arguments: list[str], code: int, tmp_path: Path
) -> None:
    """A model, a reference, a reward model and two data sets come from the Hub."""
    arguments = [argument.replace("RUN_DIR", str(tmp_path / "run")) for argument in arguments]
    offline = environment()
    for name in DECIDED:
        offline.pop(name, None)
    with server(None) as (url, connections):
        done = subprocess.run(
            [sys.executable, ROOT / f"launch/{script}.py", "+experiment=rlhf", "tracker=local", *arguments],
            env=offline | {"HF_ENDPOINT": url},
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert len(connections) == 1
    assert done.returncode == code
    assert done.stderr.startswith(f"warning: {url} cannot be reached (")
    missing = "actor.model.path=Qwen/Qwen2.5-0.5B-Instruct: no folder of that name, not in the"
    assert missing in done.stdout + done.stderr
