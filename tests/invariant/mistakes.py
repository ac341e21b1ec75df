"""Makes the mistakes that the comparisons must detect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.ppo import experience as experience_module
from ppo_ds.ppo import learner as learner_module
from ppo_ds.ppo.kept_forwards import KeptForwards, KeptOutputs
from ppo_ds.types import Experience

totals, backward, take = learner_module.batch_totals, TrainedModel.backward, KeptForwards.take


def no_ranks_in_the_scale(masks: Any, dp_size: int, norm: float) -> Any:
    return totals(masks, dp_size=1, norm=norm)


def own_rows_only(experience: Experience, world: World) -> Experience:
    """Keeps the widths, but replaces the rows of other ranks by this rank's rows."""
    wide = experience.resized(
        world.max_int(experience.prompt_width), world.max_int(experience.response_width)
    )
    return wide.select(torch.arange(len(wide)).repeat(world.size))


def always_the_last(self: TrainedModel, loss: Any, last: bool) -> None:
    backward(self, loss, last=True)


def rows_without_outputs(self: KeptForwards) -> KeptOutputs:
    return KeptOutputs(take(self).rows, {})


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "ranks forgotten in the scale": (learner_module, "batch_totals", no_ranks_in_the_scale),
    "no exchange": (experience_module, "all_gather_rows", own_rows_only),
    "each micro-batch taken for the last": (TrainedModel, "backward", always_the_last),
}
# not mistakes, but slower ways to the same results
SLOWER_WAYS = {"graphs dropped before the update": (KeptForwards, "take", rows_without_outputs)}


@contextmanager
def made(mistake: str | None) -> Iterator[None]:
    """Makes a mistake inside the block; with None nothing changes."""
    if mistake is None:
        yield
        return
    place, name, wrong = (MISTAKES | SLOWER_WAYS)[mistake]
    right = getattr(place, name)
    setattr(place, name, wrong)
    try:
        yield
    finally:
        setattr(place, name, right)
