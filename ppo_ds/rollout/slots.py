"""What the device knows of each slot while answers are decoded, and one step of all of them: nothing in it waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ppo_ds.ops.token_sampling import draw
from ppo_ds.rollout.base import SamplingParams


class Slots:
    """S slots, each with one answer under way or none. Rows are those of the prompts, B of them; R is the longest limit."""

    def __init__(self, slots: int, limits: Tensor, uniforms: Tensor, sampling: SamplingParams):
        """``limits`` [B]; ``uniforms`` [B,R] float64 in [0,1), on the device: the random numbers of all answers. They belong to rows and places,
        so that no answer depends on when its row got which slot."""
        (rows, width), device = uniforms.shape, uniforms.device
        self.sampling = sampling
        self.stops = torch.tensor(sampling.stop_token_ids, dtype=torch.long, device=device)
        self.limits = torch.cat([limits, limits.new_ones(1)]).to(device)
        self.uniforms = torch.cat([uniforms, uniforms.new_zeros(1, width)])
        self.answers = torch.zeros(
            rows + 1, width, dtype=torch.long, device=device
        )  # the last row takes what slots without an answer draw
        self.logprobs = torch.zeros(rows + 1, width, dtype=torch.float32, device=device)
        # what is fed next and where, how many tokens were drawn, whose answer it is (B: nobody's), whether it goes on
        self.tokens, self.positions, self.counts, self.rows = torch.zeros(
            4, slots, dtype=torch.long, device=device
        )
        self.rows += rows
        self.alive = torch.zeros(slots, dtype=torch.bool, device=device)

    def put(self, slots: Tensor, rows: Tensor, tokens: Tensor, positions: Tensor) -> None:
        """Begin answers: the last tokens of their prompts and the places of these, all [m]."""
        self.tokens[slots], self.positions[slots], self.rows[slots] = tokens, positions, rows
        self.counts[slots], self.alive[slots] = 0, True

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Answers change their slots; those that they leave hold none."""
        for column in (self.tokens, self.positions, self.rows, self.counts, self.alive):
            column[targets] = column[sources]
        self.alive[sources] = False

    def end(self, slots: Tensor) -> None:
        self.alive[slots] = False

    def step(self, n: int, forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        """One more token for each of the first n slots. ``forward``: tokens [n], positions [n] -> logits [n,V]."""
        tokens, positions, counts, alive = (
            self.tokens[:n],
            self.positions[:n],
            self.counts[:n],
            self.alive[:n],
        )
        rows = torch.where(alive, self.rows[:n], len(self.limits) - 1)
        places = rows * self.answers.shape[1] + counts * alive
        s, barred = self.sampling, None
        if s.min_new_tokens and s.stop_token_ids:
            barred = (self.stops, counts < s.min_new_tokens)
        drawn, logprobs = draw(
            forward(tokens, positions),
            self.uniforms.view(-1)[places],
            temperature=s.temperature,
            top_k=s.top_k,
            top_p=s.top_p,
            barred=barred,
        )
        self.answers.view(-1).index_copy_(0, places, drawn)
        self.logprobs.view(-1).index_copy_(0, places, logprobs)
        tokens.copy_(drawn)
        positions += alive
        counts += alive
        alive &= counts < self.limits[rows]
        if s.stop_token_ids:
            alive &= (drawn[:, None] != self.stops).all(dim=1)
