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

import httpx
import pytest

from launch.hub import DECIDED, use_caches_without_the_hub
from tests.support.environment import ROOT, environment


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
    monkeypatch.delitem(sys.modules, "huggingface_hub", raising=False)


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found", "503 Service Unavailable"])
def test_any_answer_counts_as_reachable(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode()) as (url, connections):
        monkeypatch.setenv("HF_ENDPOINT", url)
        use_caches_without_the_hub(["org/model"])
    assert len(connections) == 1 and "HF_HUB_OFFLINE" not in os.environ


@pytest.mark.parametrize("kind", ["refused", "closed", "silent", "nonsense"])
def test_without_an_answer_only_the_cache_is_read(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, server(None) as (closed, _), socket.socket() as no:
        no.bind(("127.0.0.1", 0))  # nobody listens on this port
        urls = {"closed": closed, "nonsense": "nonsense"}
        for name, one in (("silent", silent), ("refused", no)):
            urls[name] = f"http://127.0.0.1:{one.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", urls[kind])
        monkeypatch.setenv("HF_HUB_OFFLINE", "x")  # so that it is restored after the test
        monkeypatch.delenv("HF_HUB_OFFLINE")
        use_caches_without_the_hub(["org/model"], seconds=0.2)
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
    assert f"warning: {urls[kind]} cannot be reached (" in capsys.readouterr().err


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
    monkeypatch.setattr(httpx, "head", lambda url, timeout: asked.append(url))
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    use_caches_without_the_hub(names)
    assert asked == ["http://mirror"] * asks


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
    expected = "the shapes that ship with ppo_ds" if script == "doctor" else missing
    assert expected in done.stdout + done.stderr
