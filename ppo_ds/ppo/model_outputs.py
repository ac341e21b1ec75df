"""Forwards of the models on a rollout, before the update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, SupportsInt

import torch
from torch import Tensor

from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.ppo.kept_forwards import KeptForwards
from ppo_ds.ppo.minibatches import all_gather_rows, scatter_states, scatter_tokens
from ppo_ds.run.microbatches import forward_rows, scoring_plan
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.types import Rollout, Sequences

# Source of the actor's log-probs and of the old log-probs: a forward of the actor before the update, the
# forward of the update itself (learner.py), or the decode backend
OldLogprobs = Literal["forward", "update", "rollout"]


class ModelOutputs(NamedTuple):
    """Holds the model outputs for a rollout. Entries that the run does not need are None."""

    logprobs: Tensor | None = None  # [B,R] of the actor
    old_logprobs: Tensor | None = None  # [B,R]
    ref_logprobs: Tensor | None = None  # [B,R]
    values: Tensor | None = None  # [B,S]
    entropy: Tensor | None = None  # [B,R] of the actor


@dataclass(kw_only=True)
class ModelForwards:
    """Runs the models on the rows of this rank."""

    actor: TrainedModel
    lagged: WeightCopy | None  # the old policy, if it lags behind the actor
    reference: FrozenModel | None  # None if nothing needs the KL to the reference
    critic: TrainedModel | None  # None: critic-free, or the actor has the value head
    share_trunk: bool  # the actor has the value head
    old_logprobs: OldLogprobs
    actor_options: Mapping[str, bool] = field(default_factory=dict)  # of the forward for the log-probs
    token_budget: SupportsInt  # halved if memory runs out (run/token_budgets.py)
    guard: Callable[[Callable[..., Any]], Callable[..., Any]]  # repeats forwards if memory runs out
    packed: bool  # the models take rows without padding
    world: World
    timer: PhaseTimer
    kept: KeptForwards | None = None  # keeps graphs for the update

    def __call__(self, rollout: Rollout, critic_only: bool) -> ModelOutputs:
        """Runs all models on the rollout; retries if memory runs out. All ranks must call this."""
        return self.guard(self.forward_models)(rollout, critic_only)

    def forward_models(self, rollout: Rollout, critic_only: bool) -> ModelOutputs:
        rows = self.group_rows(rollout)
        plan = self.plan(rows)
        logprobs = old_logprobs = ref_logprobs = values = entropy = None
        with nullcontext() if self.kept is None else self.kept.of_rollout(rows, plan, critic_only):
            fault("score")
            if self.reference is not None:
                with self.timer("ref_logprobs"), self.reference.resident():  # log pi_ref(a|s)
                    ref_logprobs = self.logprobs_of(self.reference, rows, plan)
            if self.critic is not None:
                with self.timer("values"):  # V(s)
                    outputs = self.forward("critic", self.critic, rows, plan)
                    values = scatter_states(outputs, rows, plan)
            if self.old_logprobs == "forward":  # last, since the graph may be kept
                with self.timer("old_logprobs"):  # log pi_old(a|s), training engine, dropout 0
                    logprobs, old_logprobs, trunk_values, entropy = self.forward_actor(rows, plan)
                values = trunk_values if self.share_trunk else values
        found = (logprobs, old_logprobs, ref_logprobs, values, entropy)
        made = ModelOutputs(*(None if x is None else self.own_rows(x, rollout, rows) for x in found))
        if self.old_logprobs == "rollout":
            return made._replace(logprobs=rollout.logprobs, old_logprobs=rollout.logprobs)
        return made

    def actor_logprobs(self, sequences: Sequences) -> Tensor:
        """Computes the actor's log-probs [B,R]; retries if memory runs out. All ranks must call this."""
        rows = self.group_rows(sequences)
        logprobs = self.guard(lambda: self.logprobs_of(self.actor, rows, self.plan(rows)))()
        return self.own_rows(logprobs, sequences, rows)

    def group_rows(self, sequences: Sequences) -> Sequences:
        """Returns all rows of the ranks that divide tokens with this rank. All ranks must call this."""
        if self.world.sequence is None:
            return sequences
        plain = Sequences(sequences.ids, sequences.attention_mask, sequences.response_mask)
        rows = all_gather_rows(plain, self.world)
        return rows.select(torch.arange(len(rows)).chunk(self.world.data_size)[self.world.data_rank])

    def own_rows(self, outputs: Tensor, sequences: Sequences, rows: Sequences) -> Tensor:
        """Returns the part of ``outputs`` ([B,R] or [B,S], for ``rows``) that belongs to ``sequences``."""
        if self.world.sequence is None:
            return outputs
        columns = outputs.shape[1] - rows.response_width + sequences.response_width
        return outputs.chunk(self.world.sequence.size)[self.world.sequence.rank][:, :columns]

    def forward(
        self, name: str, model: TrainedModel, rows: Sequences, plan: list[Tensor], **options: Any
    ) -> list[Any]:
        """Runs a trained model on each entry of ``plan`` (row indices); ``kept`` may store its output."""
        if self.kept is not None and name in self.kept.names:
            return [self.kept.forward(name, model)]
        return forward_rows(model, rows, plan, **self.world.sequence_argument, **options)

    def plan(self, sequences: Sequences) -> list[Tensor]:
        """Returns the row indices of each forward. All ranks must call this."""
        return scoring_plan(sequences, int(self.token_budget), self.world, self.packed)

    def forward_actor(
        self, rollout: Sequences, plan: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Computes log-probs and old log-probs [B,R], values [B,S] or None, and entropies [B,R] or None."""
        outputs = self.forward("actor", self.actor, rollout, plan, **self.actor_options)
        logprobs = scatter_tokens([out.logprobs for out in outputs], rollout, plan)
        old_logprobs, values, entropy = logprobs, None, None
        if self.actor_options.get("with_entropy"):
            entropy = scatter_tokens([out.entropy for out in outputs], rollout, plan)
        if self.share_trunk:
            values = scatter_states([out.values for out in outputs], rollout, plan)
        if self.lagged is not None:
            with self.lagged.swapped():
                old_logprobs = self.logprobs_of(self.actor, rollout, plan)
        return logprobs, old_logprobs, values, entropy

    def logprobs_of(
        self, model: TrainedModel | FrozenModel, sequences: Sequences, plan: list[Tensor]
    ) -> Tensor:
        """Computes the log-probs [B,R] of the responses under ``model``."""
        outputs = forward_rows(model, sequences, plan, **self.world.sequence_argument)
        return scatter_tokens([out.logprobs for out in outputs], sequences, plan)
