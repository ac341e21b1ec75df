"""Runs the protocols of a run on many ranks, without models: the engines of the checkpoints are stubs.

    first    exchange of rows, store, stop request, checkpoints; at the end one rank fails
    fewer    resumes from a checkpoint of ``first`` on fewer ranks and saves; at the end one rank hangs
    again    resumes from the checkpoint of ``fewer`` on more ranks and ends normally

Each rank writes its observations to ``FOLDER/<part>/rank<rank>.json``.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ppo_ds.distributed import watchdog
from ppo_ds.distributed.exit import exit_now
from ppo_ds.distributed.store import RankStore
from ppo_ds.distributed.watchdog import Watchdog
from ppo_ds.distributed.world import World, connect
from ppo_ds.engine.checkpoint import shards
from ppo_ds.engine.checkpoint.checkpoints import Checkpoints
from ppo_ds.engine.checkpoint.files import CheckpointError
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.ppo.minibatches import all_gather_rows
from ppo_ds.run.stopping import StopRequest
from ppo_ds.types import Rollout

FAILING, FULL_DISK, HANGING = 37, 21, 11  # ranks
SIGNALLED, SENDER = 41, 5
SOFT_LIMIT = 150  # of open files, which rank 0 exceeds
TENSORS = 100  # more than there are ranks, so that some ranks write two shards
LIMIT = 300.0  # seconds to wait for other ranks
Found = dict[str, Any]


class StubModel(TrainedModel):
    """A model with TENSORS parameters on an engine without ZeRO; its values depend on ``step`` only."""

    def __init__(self, world: World, step: int):
        module = nn.Module()
        for i in range(TENSORS):
            module.register_parameter(f"p{i}", nn.Parameter(torch.full((1 + i % 3,), 1000.0 * step + i)))
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        for i, parameter in enumerate(module.parameters()):
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": torch.full_like(parameter, step + i / 128),
                "exp_avg_sq": torch.full_like(parameter, step + i / 256),
            }
        self.world, self.steps, self.settings = world, step, {}
        self._weights_replaced, self._refresh_weights = False, None
        self.engine = SimpleNamespace(
            module=module, optimizer=optimizer, basic_optimizer=optimizer, zero_optimization_stage=lambda: 0
        )

    def content(self) -> list[Any]:
        """Returns the numbers of steps, weights and moments as lists."""
        states = [self.engine.optimizer.state[parameter] for parameter in self.module.parameters()]
        moments = [[state[key].tolist() for key in ("step", "exp_avg", "exp_avg_sq")] for state in states]
        return [self.steps, [parameter.tolist() for parameter in self.module.parameters()], moments]


def part(run: Callable[[Path, World, Watchdog], Found]) -> Callable[[], None]:
    """Returns the function of one rank: connects, runs ``run`` and ends like launch/train.py."""

    def rank() -> None:
        shards.SHARD_BYTES = 1  # one file per parameter
        # only waiting times: the ranks wait for all others, however slow the machine is
        watchdog.ACK_TIMEOUT = watchdog.HARD_EXIT_MARGIN = LIMIT
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
        folder, watch = Path(sys.argv[1]), Watchdog()
        world = connect(10.0)
        try:
            found = run(folder, world, watch)
            (folder / run.__name__ / f"rank{world.rank}.json").write_text(json.dumps(found))
            world.barrier()
            end(run.__name__, world, watch)
            world.barrier()
        except BaseException as error:
            exit_now(watch.fail(traceback.format_exc(), f"{type(error).__name__}: {error}", 1))
        watch.stop()
        world.close()

    return rank


def end(name: str, world: World, watch: Watchdog) -> None:
    if name == "first" and world.rank == FAILING:
        raise ValueError("a tensor of 3 elements\nin a row of 4")
    if name == "fewer":
        watch.set_timeout(0.05, lambda reason: None)
        if world.rank == HANGING:
            time.sleep(1e6)


def start(world: World, watch: Watchdog) -> tuple[RankStore, StopRequest]:
    """Starts the watchdog and the stop requests like assemble/run.py."""
    store = RankStore()
    watch.start(world, store)
    stop = StopRequest(world, None, store)
    watch.add_callback(stop.poll)
    stop.install_handlers()
    world.barrier()
    return store, stop


@part
def first(folder: Path, world: World, watch: Watchdog) -> Found:
    torch.manual_seed(world.rank)
    store, stop = start(world, watch)
    found = {"files": len(os.listdir("/proc/self/fd")), "rows": exchange(world)}
    found |= messages(world, store) | stopped(world, stop)
    checkpoints = Checkpoints(folder / "checkpoints", world=world, keep_last=2)
    for step in (1, 2, 3):
        # the second checkpoint fails on one rank
        os.environ["PPO_DS_FAULT"] = f"full@checkpoint.write:rank={FULL_DISK}:times=0" if step == 2 else ""
        try:
            checkpoints.save(step, {"actor": StubModel(world, step)}, {"step": step})
        except CheckpointError as error:
            found["refused"] = str(error)
        world.barrier()  # rank 0 removes the draft of a failed checkpoint when the others have the error
        found[f"after {step}"] = sorted(path.name for path in (folder / "checkpoints").iterdir())
        world.barrier()
    return found | {"next": torch.rand(1).item()}  # a resume from step 3 draws the same number


@part
def fewer(folder: Path, world: World, watch: Watchdog) -> Found:
    start(world, watch)
    found = resumed(folder, world)
    Checkpoints(folder / "checkpoints", world=world, keep_last=2).save(
        4, {"actor": StubModel(world, 4)}, {"step": 4}
    )
    return found | {"next": torch.rand(1).item()}


@part
def again(folder: Path, world: World, watch: Watchdog) -> Found:
    start(world, watch)
    return resumed(folder, world)


def resumed(folder: Path, world: World) -> Found:
    """Loads the newest checkpoint into another model, and draws a random number."""
    checkpoints = Checkpoints(folder / "checkpoints", world=world, keep_last=2)
    path, model = checkpoints.latest(), StubModel(world, 0)
    state = checkpoints.load(path, {"actor": model})
    saved = StubModel(world, state["step"])
    return {
        "from": path.name,
        "ranks": checkpoints.world_size_of(path),
        "equal": model.content() == saved.content(),
        "drawn": torch.rand(1).item(),
    }


def rows_of(rank: int) -> Rollout:
    """Makes two rows of a rank; prompts and responses have other lengths on each rank."""
    prompt, response = 1 + rank % 5, 1 + rank % 7
    ids = torch.full((2, prompt + response), rank)
    mask = torch.ones(2, response, dtype=torch.bool)
    mask[1] = torch.arange(response) < 1
    return Rollout(
        ids=ids,
        attention_mask=torch.cat([torch.ones(2, prompt, dtype=torch.bool), mask], dim=1),
        response_mask=mask,
        finished=torch.tensor([False, True]),
        limits=torch.tensor([response, response]),
        logprobs=torch.full((2, response), -rank / 8) * mask,
        metadata=({"row": 2 * rank}, {"row": 2 * rank + 1}),
    )


def exchange(world: World) -> list[Any]:
    """Returns the rows of all ranks: ids, length and summed log-probs of the response, and the number."""
    rows = all_gather_rows(rows_of(world.rank), world)
    return [
        [
            rows.ids[i][rows.attention_mask[i]].tolist(),
            int(rows.response_mask[i].sum()),
            rows.logprobs[i].sum().item(),
            rows.metadata[i]["row"],
        ]
        for i in range(len(rows))
    ]


def messages(world: World, store: RankStore) -> Found:
    """Sends a message to each rank, and counts to the number of ranks."""
    store.put(f"from{world.rank}", f"message {world.rank}")
    world.barrier()
    received = [store.get(f"from{rank}") for rank in range(world.size)]
    return {"received": received, "count": store.add("count"), "absent": store.get("nothing")}


def stopped(world: World, stop: StopRequest) -> Found:
    """Steps until all ranks agree on a stop; one rank sends SIGTERM to another at some time in step 3."""
    pids = world.gather_objects(os.getpid())
    step = 0
    while stop.agreed_reason() is None:
        step += 1
        if step == 3 and world.rank == SENDER:
            os.kill(pids[SIGNALLED], signal.SIGTERM)
    deadline = time.monotonic() + LIMIT
    while not stop.should_stop() and time.monotonic() < deadline:
        time.sleep(0.05)  # the request reaches this rank through the store
    return {"stopped at": step, "told": stop.should_stop(), "reason": stop.agreed_reason()}
