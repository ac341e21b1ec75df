"""Groups of consecutive ranks that generate together, and their collectives."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from ppo_ds.distributed.world import World

T = TypeVar("T")


class Subgroup:
    """The group of this rank if the ranks are divided into groups of ``size`` consecutive ranks.

    A collective of all ranks. The groups use gloo, since they exchange small objects in CPU memory. All
    methods are collectives of the group.
    """

    def __init__(self, world: World, size: int):
        assert world.size % size == 0
        self.size = size
        self.rank = world.rank % size  # within the group
        for first in range(0, world.size, size):
            group = dist.new_group(list(range(first, first + size)), backend="gloo")
            if first <= world.rank < first + size:
                self._group = group
                self.ranks = list(range(first, first + size))  # of the whole world

    def gather_objects(self, item: T) -> list[T]:
        """Returns every rank's ``item`` on every rank of the group, in rank order. Items are pickled."""
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item, group=self._group)
        return items

    def barrier(self) -> None:
        """Waits until all ranks of the group have called it."""
        dist.barrier(group=self._group)

    def any(self, flag: bool) -> bool:
        """Returns whether ``flag`` is true on any rank of the group."""
        return any(self.gather_objects(flag))
