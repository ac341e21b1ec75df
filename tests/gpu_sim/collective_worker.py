"""Runs small PPO trainings on many ranks and records their collectives, for test_collectives.py.

``main`` trains each case of ``ROOT/cases.json`` and ``mistake`` calls collectives in wrong orders. Each rank
writes its record to ``FOLDER/rank<rank>.jsonl``; ``marks.json`` has the number of calls at each case's end.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppo_ds.assemble.run import build_run
from ppo_ds.config.validation import validated
from ppo_ds.distributed.world import connect
from ppo_ds.rollout import vllm_support
from tests.invariant.invariant_worker import check_complete
from tests.support import fake_vllm
from tests.support.collectives import read_calls, record_collectives

HANG = 120  # seconds after which a case that hangs prints its stacks and exits
RANK = int(os.environ.get("RANK", "0"))


class ParallelLLM(fake_vllm.LLM):
    """The fake engine with the process groups that vLLM 0.32 creates at its start, and collectives on them.

    The groups and their order are those of ``init_distributed_environment`` and ``initialize_model_parallel``
    in vllm/distributed/parallel_state.py: of all ranks, for tensor parallelism, and four kinds with one rank
    each. Every kind has a group for the device and one for the CPU. The collectives of a step, a sum after
    the attention and the MLP of each layer and a gather of the logits, are those of a dense model.
    """

    def __init__(self, model: str, **options: Any):
        super().__init__(model, **options)
        world, size = dist.get_world_size(), self.arguments["tensor_parallel_size"]

        def coordinator(group_size: int) -> tuple[Any, Any]:
            own = []
            for first in range(0, world, group_size):
                ranks = list(range(first, first + group_size))
                pair = tuple(dist.new_group(ranks, backend="gloo") for _ in ("device", "cpu"))
                own += [pair] if RANK in ranks else []
            return own[0]

        _, cpu = coordinator(world)
        # which ranks are on the node of rank 0 (in_the_same_node_as)
        dist.broadcast_object_list(["name of shared memory" if RANK == 0 else None], src=0, group=cpu)
        dist.barrier(group=cpu)
        dist.all_reduce(torch.zeros(world, dtype=torch.int32), group=cpu)
        self.device, cpu = coordinator(size)
        if size > 1:  # the message queue of the group
            dist.broadcast_object_list([None], src=RANK // size * size, group=cpu)
        self.others = [coordinator(1) for _ in ("dcp", "pcp", "pp", "dp")]
        step, hidden = self.llm_engine.step, self.llm_engine.model.config.hidden_size

        def step_of_group() -> Any:
            rows = len(self.llm_engine.requests)
            for _ in range(2 * self.llm_engine.model.config.num_hidden_layers):
                dist.all_reduce(torch.zeros(rows, hidden), group=self.device)
            dist.all_gather_into_tensor(torch.empty(rows * size), torch.zeros(rows), group=self.device)
            return step()

        self.llm_engine.step = step_of_group


def main() -> None:
    root = Path(sys.argv[1])
    folder = root / os.environ["WORLD_SIZE"]
    folder.mkdir(exist_ok=True)
    file = folder / f"rank{RANK}.jsonl"
    record_collectives(file)
    marks: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        fake_vllm.install(patch)
        patch.setattr(fake_vllm, "LLM", ParallelLLM)
        patch.setattr(vllm_support, "installed_version", lambda: fake_vllm.__version__)
        patch.setattr(vllm_support, "CPU_HEAD_SIZES", (8,))  # of the tiny model
        for label, config in json.loads((folder / "cases.json").read_text()).items():
            faulthandler.dump_traceback_later(HANG, exit=True)
            print("==", label, flush=True)
            config["run"]["dir"] = str(folder / label)
            run = build_run(validated(config, int(os.environ["WORLD_SIZE"])))
            assert run.fit() == "done"
            for model in run.stage.models.values():
                model.engine.destroy()
            del run
            gc.collect()
            marks[label] = len(read_calls(file))
    check_complete(file)
    if RANK == 0:
        (folder / "marks.json").write_text(json.dumps(marks))
    # torch does not split new groups from a group without a device (ppo_ds/distributed/world.py)
    assert dist.distributed_c10d._get_default_group().bound_device_id is None
    dist.barrier()
    dist.destroy_process_group()


def mistake() -> None:
    """Trains no model: calls collectives of which one is missing on a rank, or whose groups form a cycle."""
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    faulthandler.dump_traceback_later(HANG, exit=True)
    record_collectives(folder / f"rank{RANK}.jsonl")
    world = connect(1.0)
    pairs = [dist.new_group([i, (i + 1) % world.size]) for i in range(world.size)]
    x = torch.zeros(4)
    world.barrier()  # no rank ends while another one connects its groups
    if kind == "extra":
        waiting = [dist.all_reduce(x, async_op=True)] if RANK == 1 else []
        dist.all_reduce(x, async_op=True)
        del waiting
        os._exit(0)  # the last collective of rank 1 cannot end
    # gloo runs the collectives of each group in threads of its own, so that this ends
    first, second = pairs[RANK], pairs[RANK - 1]
    for work in [dist.all_reduce(x.clone(), group=group, async_op=True) for group in (first, second)]:
        work.wait()
    world.close()
