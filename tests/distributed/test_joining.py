"""Tests how a rank on a GPU joins the process group, with a stand-in for NCCL."""

from __future__ import annotations

import os
import warnings
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.distributed import world

GPU = torch.device("cuda", 3)
RANK = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node0"}


def test_the_group_is_not_bound_to_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch splits later groups from a group that is bound to a GPU."""
    calls: list[tuple] = []
    monkeypatch.setattr(world.os, "environ", {**os.environ, **RANK})
    monkeypatch.setattr(
        world.dist, "init_process_group", lambda *names, **options: calls.append((names, options))
    )
    monkeypatch.setattr(world.deepspeed, "init_distributed", lambda **options: calls.append(((), options)))
    with warnings.catch_warnings():
        world.join_process_group(on_gpu=True, timeout=timedelta(minutes=5))
    (names, options), (_, rest) = calls
    assert (names, options) == (("nccl",), {"timeout": timedelta(minutes=5)})
    assert rest == {"timeout": timedelta(minutes=5), "verbose": False}


@pytest.mark.parametrize(("device", "ids"), [(GPU, [3]), (torch.device("cpu"), None)])
def test_a_barrier_uses_the_device_of_the_rank(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, ids: list[int] | None
) -> None:
    found = []
    monkeypatch.setattr(world.dist, "barrier", lambda device_ids: found.append(device_ids))
    monkeypatch.setattr(world.dist, "destroy_process_group", lambda: found.append("left"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    rank = world.World(3, 16, 3, device, SimpleNamespace(), world.Waiting(device))
    rank.barrier()
    rank.close()
    assert found == [ids, ids, "left"]
