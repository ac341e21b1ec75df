"""Groups of consecutive ranks that generate together, and their collectives."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from ppo_ds.distributed.world import World

T = TypeVar("T")


class Subgroup:
    """The group of this rank when the ranks are divided into groups of ``size`` consecutive ranks.

    All ranks must create this object. All ranks of the group must call each method, which uses gloo.
    """

    def __init__(self, world: World, size: int):
        self.size = size
        self.rank = world.rank % size  # within the group
        self._group, _ = dist.new_subgroups(size, backend="gloo")
        self.ranks = dist.get_process_group_ranks(self._group)  # of the whole world

    def gather_objects(self, item: T) -> list[T]:
        """Returns every rank's ``item`` on every rank of the group, in rank order. Items are pickled."""
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def barrier(self) -> None:
        dist.barrier(group=self._group)

    def any(self, flag: bool) -> bool:
        return any(self.gather_objects(flag))
