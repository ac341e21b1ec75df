"""Tests that a run on one machine cannot be reached over the network, and that it checks the store's content.

Linux answers on all of 127.0.0.0/8. A socket bound to 127.0.0.1 does not accept a connection to 127.0.0.2,
but a socket bound to all interfaces does: 127.0.0.2 stands for the network.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.distributed.test_watchdog import Exited, Rank1Of2
from tests.integration.launching import TRAIN, command
from tests.support.environment import environment

WORKER = Path(__file__).with_name("store_worker.py")
OUTSIDE = "127.0.0.2"
SILENT_END = json.dumps({"rank": 7, "reason": "", "code": 0, "stuck": False, "quiet": True})
PREFIXES = ("0//", "default_pg/0//")  # prefixes of the process group's keys in torch 2.13
SECONDS = 120.0  # until a hang fails the test


@contextmanager
def waiting_run(launcher: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Starts ranks that wait for ``folder / "go"`` and yields their launcher."""
    start = [str(WORKER) if part == TRAIN else part for part in command(launcher, str(folder))]
    log = (folder / "log").open("w")
    run = subprocess.Popen(start, env=environment(), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + SECONDS
        while not all(
            (folder / f"ready_{rank}").exists() for rank in range(1 if launcher == "python" else 2)
        ):
            assert run.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.1)
        yield run
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Returns the addresses at which a process accepts connections."""
    sockets = process.net_connections("inet")
    return {tuple(one.laddr) for one in sockets if one.status == psutil.CONN_LISTEN}


def write_failure(port: int) -> None:
    """Publishes a forged failure, which says that a rank has failed and the run ends silently with code 0."""
    with contextlib.suppress(OSError), socket.create_connection((OUTSIDE, port), timeout=5):
        store = dist.TCPStore(OUTSIDE, port, is_master=False, timeout=timedelta(seconds=5))
        for prefix in PREFIXES:
            store.set(f"{prefix}ppo_ds/failure", SILENT_END)


@pytest.mark.parametrize(
    "launcher",
    ["python", *(pytest.param(name, marks=pytest.mark.slow) for name in ("deepspeed", "torchrun"))],
)
def test_a_stranger_cannot_reach_or_end_a_run_on_one_machine(tmp_path, launcher):
    with waiting_run(launcher, tmp_path) as run:
        processes = [psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)]
        everywhere = {address for process in processes for address in listening(process)}
        ranks = [process for process in processes if str(WORKER) in process.cmdline()[:4]]
        of_ranks = {address for rank in ranks for address in listening(rank)}
        for _, port in everywhere:
            write_failure(port)
        time.sleep(2.0)  # a watchdog reads the store twice a second
        (tmp_path / "go").touch()
        code = run.wait(SECONDS)
    finished = sorted(file.name for file in tmp_path.glob("finished_*"))
    expected = ["finished_0"] if launcher == "python" else ["finished_0", "finished_1"]
    assert (finished, code) == (expected, 0), (tmp_path / "log").read_text()
    assert of_ranks and all(ipaddress.ip_address(host).is_loopback for host, _ in of_ranks), of_ranks


FAILURE = {"rank": 0, "reason": "ValueError: x", "code": 1, "stuck": False, "quiet": False}


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(FAILURE | {"code": 0, "quiet": True}),
        json.dumps(FAILURE | {"code": 143}),
        json.dumps(FAILURE | {"code": "1"}),
        json.dumps(FAILURE | {"rank": 2}),
        json.dumps(FAILURE | {"rank": -1}),
        json.dumps(FAILURE | {"reason": ["x"]}),
        json.dumps(FAILURE | {"more": 1}),
        json.dumps({"code": 1}),
        "[" * 100_000,
        "\x1b]0;title\x07",
        "",
    ],
)
def test_a_failure_that_no_rank_wrote_ends_the_run_with_an_error(text):
    rank = Rank1Of2()
    rank.store.put("failure", text)
    with pytest.raises(Exited) as exited:
        rank.watchdog.check()
    (line,) = rank.process.written
    assert exited.value.args == (1,) and line.isprintable() and len(line) < 3000
    assert line.startswith("rank 1: stopped because the store that all ranks share holds a failure that none")


def test_the_text_of_another_rank_is_escaped_and_cut():
    rank = Rank1Of2()
    rank.store.put("failure", json.dumps(FAILURE | {"reason": "\x1b[31mred\n" + "x" * 10**6}))
    with pytest.raises(Exited) as exited:
        rank.watchdog.check()
    (line,) = rank.process.written
    assert exited.value.args == (1,) and line.isprintable() and len(line) < 3000
    assert line.startswith(r"rank 1: stopped because rank 0 failed (\x1b[31mred\nxxx")


def test_a_stranger_cannot_switch_a_watchdog_off():
    """A rank ignores a notice that it has failed itself only while it is reporting a failure."""
    rank = Rank1Of2()
    rank.store.put("failure", json.dumps(FAILURE | {"rank": 1}))
    with pytest.raises(Exited) as exited:
        rank.watchdog.check()
    assert exited.value.args == (1,)
