"""Tests the comparison of recorded collectives."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import deepspeed.comm
import pytest
import torch
import torch.distributed as dist

from ppo_ds.distributed.world import connect
from tests.support.collectives import Call, differences, read_calls, record_collectives, unrecorded
from tests.support.ranks import RankServer

ALL, PAIR = (0, 1, 2, 3), (2, 3)
SUM = Call("all_reduce SUM", ALL, "float32", (5,))
BARRIER = Call("barrier", ALL, "", ())
IN_PAIR = Call("all_gather", PAIR, "bfloat16", (2, 3))


def test_the_first_difference_of_each_rank_is_described() -> None:
    right = [SUM, BARRIER, SUM]
    other_shape = [SUM, BARRIER, Call("all_reduce SUM", ALL, "float32", (6,))]
    other_type = [SUM, BARRIER, Call("all_reduce SUM", ALL, "int64", (5,))]
    assert differences([right, other_shape, right, other_type]) == [
        "rank 1, call 3: all_reduce SUM float32 [6] against all_reduce SUM float32 [5] of rank 0",
        "rank 2, call 3: all_reduce SUM float32 [5] against all_reduce SUM float32 [6] of rank 1",
        "rank 3, call 3: all_reduce SUM int64 [5] against all_reduce SUM float32 [5] of rank 0",
    ]
    assert differences([right, [SUM, SUM, BARRIER]]) == [
        "rank 1, call 2: all_reduce SUM float32 [5] against barrier of rank 0"
    ]


def test_the_order_across_groups_counts() -> None:
    quiet = [SUM]
    assert differences([quiet, quiet, [SUM, IN_PAIR], [IN_PAIR, SUM]]) == [
        "rank 3, call 1: all_gather bfloat16 [2, 3] against all_reduce SUM float32 [5] of rank 2; "
        "groups [2, 3] and [0, 1, 2, 3]"
    ]


def rank() -> None:
    """Calls one collective of each kind on each path; rank 1 reduces another type at the end."""
    folder, this = Path(sys.argv[1]), int(os.environ["RANK"])
    record_collectives(folder / f"rank{this}.jsonl")
    world = connect(5.0)
    world.sum(torch.ones(2, 3))
    world.max_int(3)
    world.gather_objects("a" * this)
    pair = dist.new_group([0, 1])
    dist.broadcast(torch.ones(4, dtype=torch.bfloat16), src=1, group=pair)
    deepspeed.comm.all_gather_into_tensor(torch.empty(6), torch.ones(3), group=pair)
    deepspeed.comm.reduce_scatter_fn(torch.empty(3), torch.ones(6))
    dist.all_reduce(torch.ones(2, dtype=torch.int32 if this == 0 else torch.float32))
    assert unrecorded(read_calls(folder / f"rank{this}.jsonl")) == {}
    world.close()


@pytest.mark.slow
def test_every_path_is_recorded(tmp_path: Path, rank_server: RankServer) -> None:
    rank_server.check("tests.distributed.test_collectives:rank", 2, str(tmp_path), limit=300)
    calls = [read_calls(tmp_path / f"rank{i}.jsonl") for i in range(2)]
    assert [str(call) for call in calls[0]] == [
        "all_gather_object",  # the cores of each rank
        "all_reduce SUM float32 [2, 3]",
        "all_reduce MAX int64 []",
        "all_gather_object",
        "new_group [0, 1]",
        "broadcast 1 bfloat16 [4]",
        "all_gather_into_tensor float32 [3]",
        "reduce_scatter_tensor SUM float32 [6]",
        "all_reduce SUM int32 [2]",
        "barrier",
    ]
    assert differences(calls) == [
        "rank 1, call 9: all_reduce SUM float32 [2] against all_reduce SUM int32 [2] of rank 0"
    ]
