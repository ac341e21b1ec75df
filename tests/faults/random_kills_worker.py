"""Runs one rank of test_random_kills.py, which sends itself or all ranks a signal at a given time.

KILL in the environment is JSON: the ``rank`` that sends the signal, the ``signal``, the seconds ``after`` the
start, whether it goes to ``all`` ranks, and the file ``log`` to which the phase at that time is written.
"""

from __future__ import annotations

import json
import os
import threading
import time

from tests.faults import forked


def train() -> int:
    kill = json.loads(os.environ.get("KILL", "null"))
    if kill is not None and kill["rank"] == int(os.environ["RANK"]):
        threading.Thread(target=send, kwargs=kill, daemon=True).start()
    return forked.train()


def send(rank: int, signal: int, after: float, all: bool, log: str) -> None:
    from ppo_ds.distributed import heartbeat

    time.sleep(after)
    with open(log, "a") as file:
        file.write(heartbeat.read().phase)
        file.flush()
        os.fsync(file.fileno())
    if all:
        os.killpg(os.getpgid(0), signal)
    else:
        os.kill(os.getpid(), signal)
