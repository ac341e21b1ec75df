"""Tests the store of the ranks with a process that holds it and is suspended or ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from ppo_ds.distributed import store
from ppo_ds.distributed.store import RankStore, StoreClosed, StoreSilent

HOLDER = """
import time
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def holder():
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_calls_return_while_the_process_that_holds_the_store_is_suspended(holder, monkeypatch):
    port = int(holder.stdout.readline())
    client = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=timedelta(seconds=60))
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: client)
    ranks = RankStore()
    ranks.put("stop", "a signal")
    assert ranks.get("stop") == "a signal" and ranks.get("failure") is None and ranks.add("acks", 2) == 2

    holder.send_signal(signal.SIGSTOP)
    os.waitpid(holder.pid, os.WUNTRACED)
    monkeypatch.setattr(store, "ANSWER_TIMEOUT", 0.2)
    with pytest.raises(StoreSilent):
        ranks.add("acks")  # sent
    with pytest.raises(StoreSilent):
        ranks.add("acks", 100)  # never sent, since the first still waits
    holder.send_signal(signal.SIGCONT)
    monkeypatch.setattr(store, "ANSWER_TIMEOUT", 60.0)
    assert ranks.add("acks", 0) == 3 and ranks.get("stop") == "a signal"

    holder.kill()
    holder.wait()
    with pytest.raises(StoreClosed):
        ranks.get("stop")
