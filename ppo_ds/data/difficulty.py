"""Draws prompts less often while all their responses have equal scores (data.difficulty)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ppo_ds.data.order import SEED_OFFSET
from ppo_ds.errors import UserError
from ppo_ds.types import Metrics

NAMES = DUE, LAST, EQUAL = "due", "last", "equal"


class Difficulty:
    """Draws the prompts of each step, and stores the last scores of each prompt.

    A prompt is "settled" while its last ``responses`` responses all have the same score. Settled prompts are
    drawn in every 1 / ``floor``-th pass on average, all others in every pass. Each prompt has a random time
    in a pass at which it is due; a step draws the prompts that are due first. So without settled prompts, the
    draws are shuffled passes over all prompts. The cost of a draw does not depend on ``floor``.

    ``observe`` must be called between two draws. It receives the scores of all ranks, so that all ranks have
    the same state.
    """

    def __init__(
        self, prompts: int, floor: float, responses: int, *, seed: int, gather: Callable[[Tensor], Tensor]
    ):
        """Starts the first pass; ``gather`` concatenates tensors of all ranks, in rank order."""
        self._floor, self._responses, self._seed, self._gather = floor, responses, seed, gather
        self._observed = 0  # draws whose scores are known
        self._columns = {
            DUE: self._uniform(prompts),  # when each prompt is due, in passes
            LAST: torch.zeros(prompts),  # its last score
            EQUAL: torch.zeros(prompts, dtype=torch.int32),  # number of its last responses with this score
        }
        self._drawn = torch.tensor([], dtype=torch.long)
        self.metrics: Metrics = {}  # shares of settled prompts among all prompts and in the last draw

    @property
    def settled(self) -> Tensor:
        """True for each settled prompt, [prompts] bool."""
        return self._columns[EQUAL] >= self._responses

    def draw(self, count: int) -> list[int]:
        """Returns the indices of the ``count`` prompts that are due first; only ``observe`` changes these."""
        self._drawn = self._columns[DUE].topk(count, largest=False).indices
        settled = self.settled
        self.metrics = {
            "rollout/settled_frac": float(settled.double().mean()),
            "rollout/settled_drawn_frac": float(settled[self._drawn].double().mean()),
        }
        return self._drawn.tolist()

    def observe(self, scores: Tensor) -> None:
        """Adds this rank's scores of the last draw, equally many per prompt. All ranks must call this."""
        (due, last, equal), drawn = self._columns.values(), self._drawn
        for column in self._gather(scores).cpu().float().view(len(drawn), -1).T:
            repeated = (column == last[drawn]) & (equal[drawn] > 0)
            equal[drawn] = torch.where(repeated, equal[drawn] + 1, 1).int().clamp(max=self._responses)
            last[drawn] = column
        self._observed += 1
        # a random number of passes: with a fixed number, all settled prompts would be due in one pass
        skipped, moment = self._uniform(2 * len(drawn)).chunk(2)
        skipped = torch.where(self.settled[drawn], 2 * (1 / self._floor - 1) * skipped, 0.0)
        due[drawn] = (due[drawn] + 1 + skipped).floor() + moment

    def state_dict(self) -> dict[str, Any]:
        return {"observed": self._observed, **self._columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, column in self._columns.items():
            if len(state[name]) != len(column):
                raise UserError(
                    f"data.difficulty: the checkpoint remembers {len(state[name])} prompts, but the data has "
                    f"{len(column)}; restore the data, or begin anew with run.resume=restart"
                )
            self._columns[name] = state[name]
        self._observed = state["observed"]

    def _uniform(self, count: int) -> Tensor:
        """Draws numbers in [0, 1) that depend only on the seed and the number of observed draws."""
        generator = torch.Generator().manual_seed(self._seed * SEED_OFFSET + self._observed)
        return torch.rand(count, generator=generator, dtype=torch.float64)
