"""Makes the mistakes that the comparisons must detect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ppo_ds.algorithm.credit import whitening as whitening_module
from ppo_ds.distributed.world import World
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.ppo import experience as experience_module
from ppo_ds.ppo import learner as learner_module
from ppo_ds.ppo.kept_forwards import KeptForwards, KeptOutputs
from ppo_ds.types import Experience

totals, microbatch_rows = learner_module.batch_totals, learner_module.microbatch_rows
normalize, backward = whitening_module.normalize_advantages, TrainedModel.backward
take = KeptForwards.take


def no_ranks_in_the_scale(masks: Any, dp_size: int, norm: float) -> Any:
    return totals(masks, dp_size=1, norm=norm)


def rows_instead_of_tokens(masks: Any, dp_size: int, norm: float) -> Any:
    right = totals(masks, dp_size=dp_size, norm=norm)
    return replace(right, tokens=right.sequences)


def own_rows_only(experience: Experience, world: World) -> Experience:
    """Keeps the widths, but replaces the rows of other ranks by this rank's rows."""
    wide = experience.resized(
        world.max_int(experience.prompt_width), world.max_int(experience.response_width)
    )
    return wide.select(torch.arange(len(wide)).repeat(world.size))


def whitened_alone(raw: Any, mask: Any, unbiased: bool, reduce: Any) -> Any:
    return normalize(raw, mask, unbiased=unbiased)


def first_again_instead_of_last(
    minibatch: Experience, token_budget: int, world: World, packed: bool
) -> list[Tensor]:
    right = microbatch_rows(minibatch, token_budget, world, packed)
    return [*right[:-1], right[0]] if world.rank else right


def always_the_last(self: TrainedModel, loss: Any, last: bool) -> None:
    backward(self, loss, last=True)


def rows_without_outputs(self: KeptForwards) -> KeptOutputs:
    return KeptOutputs(take(self).rows, {})


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "ranks forgotten in the scale": (learner_module, "batch_totals", no_ranks_in_the_scale),
    "rows instead of tokens": (learner_module, "batch_totals", rows_instead_of_tokens),
    "no exchange": (experience_module, "all_gather_rows", own_rows_only),
    "advantages whitened on each rank": (whitening_module, "normalize_advantages", whitened_alone),
    "a micro-batch replaced by another": (learner_module, "microbatch_rows", first_again_instead_of_last),
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
