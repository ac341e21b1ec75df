"""One rank of test_nodes.py."""

from __future__ import annotations

import sys
from pathlib import Path

from ppo_ds.distributed import world as world_module
from ppo_ds.distributed.world import World, connect
from ppo_ds.errors import UserError


def main() -> None:
    folder, per_node = Path(sys.argv[1]), 2
    world = connect(timeout_minutes=30.0)
    assert world.is_first_on_node == (world.rank % per_node == 0)
    runs_first_rank_of_each_node_first(world, folder)
    raises_everywhere_and_runs_no_other_rank(world, folder)
    assert world.gather_objects(world.rank) == [0, 1, 2, 3]
    world.close()


def runs_first_rank_of_each_node_first(world: World, folder: Path) -> None:
    def done() -> set[str]:
        return {path.name for path in folder.glob("rank*")}

    def action() -> str:
        assert world.is_first_on_node or {"rank0", "rank2"} <= done()
        (folder / f"rank{world.rank}").touch()
        return f"result of {world.rank}"

    # A rank that waited in a collective for the action of another rank would run into a timeout.
    collective, at_collectives = world_module.dist.all_gather_object, []

    def record(*args: object) -> None:
        at_collectives.append(done())
        collective(*args)

    world_module.dist.all_gather_object = record
    assert world.on_first_of_node(action) == f"result of {world.rank}"
    world_module.dist.all_gather_object = collective
    first, second = at_collectives
    assert {"rank0", "rank2"} <= first and second == {"rank0", "rank1", "rank2", "rank3"}


def raises_everywhere_and_runs_no_other_rank(world: World, folder: Path) -> None:
    def action() -> None:
        (folder / f"failing{world.rank}").touch()
        if world.rank == 2:
            raise UserError("data.path=x: wrong", "data.split=y: wrong")

    try:
        world.on_first_of_node(action)
    except UserError as error:
        assert error.problems == ["data.path=x: wrong", "data.split=y: wrong"]
    else:
        raise AssertionError("no error")
    world.barrier()
    assert {path.name for path in folder.glob("failing*")} == {"failing0", "failing2"}
