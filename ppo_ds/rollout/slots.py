"""State of the cache slots on the device, and a decode step that never waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ppo_ds.ops.token_sampling import draw
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import to_device


class Slots:
    """State of S slots, each with at most one response in progress. B: rows of prompts; R: largest limit."""

    def __init__(self, slots: int, limits: Tensor, uniforms: Tensor, sampling: SamplingParams):
        """Creates empty slots for rows with ``limits`` [B] on the device of ``uniforms``.

        ``uniforms`` [B,R] float64 in [0,1) are the random numbers of all responses. Each number belongs to a
        row and a position, so a response does not depend on its slot or start time.
        """
        (rows, width), device = uniforms.shape, uniforms.device
        self.sampling = sampling
        self.stops = to_device(torch.tensor(sampling.stop_token_ids, dtype=torch.long), device)
        self.limits = to_device(torch.cat([limits, limits.new_ones(1)]), device)
        self.uniforms = torch.cat([uniforms, uniforms.new_zeros(1, width)])
        # slots without a response write their tokens to the last row
        self.responses = torch.zeros(rows + 1, width, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(rows + 1, width, dtype=torch.float32, device=device)
        # of each slot: next input token, its position, number of drawn tokens, row (B if it has no response)
        columns = torch.zeros(4, slots, dtype=torch.long, device=device)
        self.tokens, self.positions, self.counts, self.rows = columns
        self.rows += rows
        # of each slot: whether it has a response that continues
        self.alive = torch.zeros(slots, dtype=torch.bool, device=device)

    def put(self, slots: Tensor, rows: Tensor, tokens: Tensor, positions: Tensor, counts: Tensor) -> None:
        """Puts the responses of ``rows`` into ``slots``, to be continued by the next step.

        A response has ``counts`` tokens so far; its next input is ``tokens`` at ``positions`` (all [m]).
        """
        self.tokens[slots], self.positions[slots], self.rows[slots] = tokens, positions, rows
        self.counts[slots] = counts
        # assigning a number to indices would copy it to the device and wait
        self.alive.index_fill_(0, slots, True)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Moves responses to other slots; their old slots become free."""
        for column in (self.tokens, self.positions, self.rows, self.counts, self.alive):
            column[targets] = column[sources]
        self.alive.index_fill_(0, sources, False)

    def end(self, slots: Tensor) -> None:
        self.alive.index_fill_(0, slots, False)

    def step(self, n: int, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Draws one more token for each of the first n slots.

        ``forward`` maps tokens [n] and positions [n] to logits [n,V].
        """
        tokens, positions = self.tokens[:n], self.positions[:n]
        counts, alive = self.counts[:n], self.alive[:n]
        rows = torch.where(alive, self.rows[:n], len(self.limits) - 1)
        indices = rows * self.responses.shape[1] + counts * alive  # indices into the flattened responses
        s, barred = self.sampling, None
        if s.min_new_tokens and s.stop_token_ids:
            barred = (self.stops, counts < s.min_new_tokens)
        logits, uniforms = forward(tokens, positions), self.uniforms.view(-1)[indices]
        drawn, logprobs = draw(
            logits, uniforms, temperature=s.temperature, top_k=s.top_k, top_p=s.top_p, barred=barred
        )
        self.responses.view(-1).index_copy_(0, indices, drawn)
        self.logprobs.view(-1).index_copy_(0, indices, logprobs)
        tokens.copy_(drawn)
        positions += alive
        counts += alive
        alive &= counts < self.limits[rows]
        if s.stop_token_ids:
            alive &= (drawn[:, None] != self.stops).all(dim=1)
