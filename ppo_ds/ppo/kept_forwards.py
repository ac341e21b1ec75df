"""Keeps the autograd graphs of forwards in make_experience, so that the update needs no second forward.

This requires one optimizer step per rollout, so that no weight changes between a forward and its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppo_ds.compute.batching import padded_tokens
from ppo_ds.distributed.world import World
from ppo_ds.types import Sequences


class KeptOutputs(NamedTuple):
    """Model outputs with autograd graphs, and the rows that they were computed for."""

    # indices of this rank's rows among the rows of all ranks, in the order of the outputs; None: no outputs
    rows: Tensor | None
    by_model: dict[str, Any]  # "actor" or "critic" -> output of its only micro-batch


@dataclass(kw_only=True)
class KeptForwards:
    """Runs the forwards of make_experience with gradients, and keeps their outputs for the update.

    Outputs are kept only if each rank's rows fit into one forward, in make_experience and in the update.
    """

    options: Mapping[str, Mapping[str, Any]]  # model -> options of its forward in the update
    token_budget: int  # of a micro-batch of the update
    packed: bool  # the models take rows without padding
    trained: int  # number of models in the update
    world: World

    # state
    off: bool = field(init=False, default=False)  # memory ran out, so no further forward is kept
    names: tuple[str, ...] = field(init=False, default=())  # models whose next forward is kept
    sequences: Sequences | None = field(init=False, default=None)  # rows of these forwards
    kept: KeptOutputs = field(init=False, default=KeptOutputs(None, {}))

    @contextmanager
    def of_rollout(self, rollout: Sequences, plan: list[Tensor], critic_only: bool) -> Iterator[None]:
        """Keeps forwards of ``rollout`` inside the block if ``fits`` returns True. All ranks must call this.

        If an exception leaves the block, the outputs are dropped.
        """
        self.kept = KeptOutputs(None, {})
        names = tuple(name for name in self.options if name != "actor" or not critic_only)
        if names and not self.off and self.fits(rollout, plan, names):
            (rows,) = plan
            self.names, self.sequences = names, rollout.select(rows).trimmed()
            self.kept = KeptOutputs(self.world.rank * len(rollout) + rows, {})
        try:
            yield
        except BaseException:
            self.kept = KeptOutputs(self.kept.rows, {})
            raise
        finally:
            self.names, self.sequences = (), None

    def fits(self, rollout: Sequences, plan: list[Tensor], names: Sized) -> bool:
        """Returns whether each rank's rows fit into one forward and keeping outputs of ``names`` saves time.

        A backward costs as much as two forwards. If nothing is kept, the update balances the tokens of the
        ranks, and each model costs 3 forwards of a balanced share. Otherwise each rank keeps its rows, and
        the rank with the most tokens T determines the cost: 3 T of each model, or 2 T if its forward is kept.
        All ranks must call this.
        """
        if len(plan) > 1:  # equal on all ranks, which run the same number of forwards
            return False
        tokens = padded_tokens(rollout.attention_mask.sum(1), self.packed)
        most = self.world.max_int(tokens)
        total = int(self.world.sum(torch.tensor(tokens)))
        kept = (3 * self.trained - len(names)) * most * self.world.size
        return most <= self.token_budget and kept <= 3 * self.trained * total

    def forward(self, name: str, model: Callable[..., Any]) -> Any:
        """Runs ``model`` with gradients on the rows of the rollout, keeps its output and returns it."""
        rows = self.sequences
        assert rows is not None
        with torch.enable_grad():
            out = model(rows.ids, rows.attention_mask, rows.response_width, **self.options[name])
        self.kept.by_model[name] = out
        return out

    def switch_off(self) -> str | None:
        """Drops the kept forwards and keeps none from now on; returns the setting that has the same effect.

        If no forwards were kept, does nothing and returns None.
        """
        if self.kept.rows is None:
            return None
        self.kept, self.off = KeptOutputs(None, {}), True
        return "memory.reuse_forwards=off"

    def take(self) -> KeptOutputs:
        """Returns the kept outputs and forgets them."""
        kept, self.kept = self.kept, KeptOutputs(None, {})
        return kept if kept.by_model else KeptOutputs(None, {})
