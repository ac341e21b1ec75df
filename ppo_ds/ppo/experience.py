"""Implements make_experience, which turns a rollout and its scores into the experience that PPO trains on.

Departures from the paper, each of which the config can switch off: the score is clipped after the penalty for
a missing end token, the KL to the reference is subtracted from the reward of each token, and advantages are
whitened over the whole rollout of all ranks, not per minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, SupportsInt

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_ds.algorithm.credit.positions import ScorePosition
from ppo_ds.algorithm.credit.responses import AdvantageEstimator, CreditOptions, Responses
from ppo_ds.algorithm.credit.whitening import Whitening
from ppo_ds.algorithm.kl.estimators import k3
from ppo_ds.algorithm.rollout_is.weights import rollout_is_weights
from ppo_ds.algorithm.shaping.scores import ScoreShaper
from ppo_ds.background.pending import Pending
from ppo_ds.config.sections.algo import RolloutISConfig
from ppo_ds.distributed.faults import fault
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.ops.masked import masked_sum
from ppo_ds.ppo.kept_forwards import KeptForwards
from ppo_ds.ppo.minibatches import all_gather_rows, scatter_states, scatter_tokens
from ppo_ds.ppo.scoring import scored, wait_for_scores
from ppo_ds.run.metrics import MetricSums
from ppo_ds.run.microbatches import forward_rows, scoring_plan
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.types import Experience, Metrics, Rollout, ScoredRollout, Scores, Sequences

# Source of the actor's log-probs and of the old log-probs: a forward of the actor before the update, the
# forward of the update itself (learner.py), or the decode backend
OldLogprobs = Literal["forward", "update", "rollout"]


@dataclass(kw_only=True)
class ExperienceMaker:
    """Computes log-probs, KL, rewards, values, advantages and returns of a rollout."""

    # models
    actor: TrainedModel
    lagged: WeightCopy | None  # the old policy, if it lags behind the actor
    reference: FrozenModel | None  # None if nothing needs the KL to it
    critic: TrainedModel | None  # None: critic-free, or the actor has the value head
    share_trunk: bool  # the actor has the value head
    old_logprobs: OldLogprobs
    compute_entropy: bool = False  # in the forward that computes the old log-probs
    # the algorithm
    masked_stop_ids: tuple[int, ...]  # end tokens that are not actions
    shaper: ScoreShaper
    # estimator of the KL that is subtracted from the reward; None: the reward has no KL
    charged_kl: Callable[[Tensor, Tensor], Tensor] | None
    score_position: ScorePosition
    estimate_advantages: AdvantageEstimator
    credit: CreditOptions
    whitening: Whitening
    group_size: int  # consecutive rows with the same prompt
    rollout_is: RolloutISConfig
    # forwards
    token_budget: SupportsInt  # halved if memory runs out (run/token_budgets.py)
    guard: Callable[[Callable[..., Any]], Callable[..., Any]]  # repeats forwards if memory runs out
    packed: bool  # the models take rows without padding
    world: World
    timer: PhaseTimer
    check: Callable[[], None]  # a collective that raises Abandoned on all ranks after a stop request
    kept: KeptForwards | None = None  # keeps graphs for the update

    @torch.no_grad()
    def __call__(
        self, rollout: Rollout, pending_scores: Pending[Scores], kl_coef: float, critic_only: bool = False
    ) -> tuple[Experience, Metrics]:
        """Makes the experience of all ranks from the rollout of this rank, with metrics. A collective.

        ``critic_only`` says that the update will train only the critic.
        """
        if self.masked_stop_ids:
            rollout = mask_stops(rollout, self.masked_stop_ids)
        mask = rollout.response_mask
        logprobs, old_logprobs, ref_logprobs, values, entropy = self.guard(self.forward_models)(
            rollout, critic_only
        )

        with self.timer("reward"):  # waits for scores that are computed in the background
            found = wait_for_scores(pending_scores, self.world, self.check)
            rollout = scored(rollout, found)

        with self.timer("advantages"):
            scores, unclipped = self.shaper(rollout)  # r(x, y)
            if found.greedy is not None:
                rollout = replace(rollout, baselines=self.baselines(found.greedy))
            kl_penalty = torch.zeros(mask.shape)
            if self.charged_kl is not None:
                kl_penalty = kl_coef * self.charged_kl(logprobs, ref_logprobs)
            rewards = self.score_position.rewards(scores, kl_penalty, rollout)
            weights = torch.ones(mask.shape)
            if self.rollout_is.kind != "none":
                weights, _ = rollout_is_weights(logprobs, rollout.logprobs, mask, self.rollout_is)
            responses = Responses.of_rollout(
                rollout, self.score_position, rewards, scores, values, self.group_size
            )
            estimate = self.estimate_advantages(responses, self.credit)
            advantages = self.whitening.whiten_rollout(
                estimate.advantages, mask, self.group_size, self.world.sum
            )
        experience = Experience(
            ids=rollout.ids,
            attention_mask=rollout.attention_mask,
            response_mask=mask,
            finished=rollout.finished,
            decode_logprobs=rollout.logprobs,
            weights=weights,
            scores=rollout.score_sums,
            rewards=rewards,
            advantages=advantages,
            components=rollout.components if rollout.components[0] else None,
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            values=values,
            returns=estimate.returns,
            value_mask=estimate.value_mask,
            feedback_mask=rollout.feedback_mask,
            episode_ends=rollout.episode_ends,
        )
        metrics = self.metrics(rollout, experience, kl_penalty, estimate.advantages, scores != unclipped)
        return all_gather_rows(experience, self.world), metrics

    def baselines(self, greedy: ScoredRollout) -> Tensor:
        """Returns the shaped score of the greedy response to the prompt of each row, [B].

        The running moments do not include these scores.
        """
        shaped, _ = self.shaper(greedy, update=False)
        return (shaped + greedy.token_scores.sum(1)).repeat_interleave(self.group_size)

    def metrics(
        self,
        rollout: ScoredRollout,
        experience: Experience,
        kl_penalty: Tensor,
        advantages: Tensor,
        clipped: Tensor,
    ) -> Metrics:
        """Computes the metrics of rewards and of ``advantages`` [B,R] before whitening. A collective."""
        states, sums = self.score_position.states(rollout), MetricSums()
        sums.add_mean("reward/clipped_frac", clipped)
        # a score added outside the states has no effect, as in zysNLP's code
        sums.add_mean("reward/total_mean", masked_sum(experience.rewards, states, dim=1))
        sums.add_mean("reward/kl_penalty_mean", -masked_sum(kl_penalty, states[:, :-1], dim=1))
        if rollout.baselines is not None:
            sums.add_mean("reward/baseline_mean", rollout.baselines)
        for name in rollout.components[0]:
            component = torch.tensor([parts[name] for parts in rollout.components])
            sums.add_mean(f"reward/component/{name}_mean", component)
        if self.rollout_is.kind != "none":
            self.add_weight_metrics(sums, experience)
        sums.add_mean_and_std("adv", advantages, rollout.response_mask)
        sums.add_max("adv/max_abs", advantages.abs().max())
        return sums.reduced(self.world)

    def add_weight_metrics(self, sums: MetricSums, experience: Experience) -> None:
        """Adds the metrics of the importance weights of algo.rollout_is."""
        mask, section = experience.response_mask, self.rollout_is
        columns = experience.logprobs, experience.decode_logprobs
        _, bounded = rollout_is_weights(*columns, mask, section)
        sums.add_mean("parity/weight_mean", experience.weights, mask)
        sums.add_mean("parity/weight_outside_frac", (bounded < section.low) | (bounded > section.high), mask)
        # samples come from the decode backend, so d = log-prob of decoding - log-prob of training
        decode_to_training = k3(experience.decode_logprobs, experience.logprobs)
        sums.add_mean("parity/k3_token_mean", decode_to_training, mask)

    def forward_models(
        self, rollout: Rollout, critic_only: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Computes log-probs, old and reference log-probs [B,R], values [B,S], and entropies [B,R].

        Entries that the run does not need are None. A collective.
        """
        plan = self.plan(rollout)
        logprobs = old_logprobs = ref_logprobs = values = entropy = None
        with nullcontext() if self.kept is None else self.kept.of_rollout(rollout, plan, critic_only):
            fault("score")
            if self.reference is not None:
                with self.timer("ref_logprobs"), self.reference.resident():  # log pi_ref(a|s)
                    ref_logprobs = self._logprobs(self.reference, rollout, plan)
            if self.critic is not None:
                with self.timer("values"):  # V(s)
                    outputs = self.forward("critic", self.critic, rollout, plan)
                    values = scatter_states(outputs, rollout, plan)
            if self.old_logprobs == "rollout":
                logprobs = old_logprobs = rollout.logprobs
            elif self.old_logprobs == "forward":  # last, since the graph may be kept
                with self.timer("old_logprobs"):  # log pi_old(a|s), training engine, dropout 0
                    logprobs, old_logprobs, trunk_values, entropy = self.forward_actor(rollout, plan)
                values = trunk_values if self.share_trunk else values
        return logprobs, old_logprobs, ref_logprobs, values, entropy

    def forward(
        self, name: str, model: TrainedModel, rollout: Rollout, plan: list[Tensor], **options: Any
    ) -> list[Any]:
        """Runs a trained model on the rows of each entry of ``plan``; may keep the graph for the update."""
        if self.kept is not None and self.kept.keeps(name):
            return [self.kept.forward(name, model)]
        return forward_rows(model, rollout, plan, **options)

    def plan(self, sequences: Sequences) -> list[Tensor]:
        """Returns the row indices of each forward. A collective."""
        return scoring_plan(sequences, int(self.token_budget), self.world, self.packed)

    def forward_actor(
        self, rollout: Rollout, plan: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Computes log-probs and old log-probs [B,R].

        Also computes values [B,S] if the actor has the value head, and entropies [B,R] if they are needed.
        """
        options = {"with_entropy": True} if self.compute_entropy else {}
        outputs = self.forward("actor", self.actor, rollout, plan, **options)
        logprobs = scatter_tokens([out.logprobs for out in outputs], rollout, plan)
        old_logprobs, values, entropy = logprobs, None, None
        if self.compute_entropy:
            entropy = scatter_tokens([out.entropy for out in outputs], rollout, plan)
        if self.share_trunk:
            values = scatter_states([out.values for out in outputs], rollout, plan)
        if self.lagged is not None:
            with self.lagged.swapped():
                old_logprobs = self._logprobs(self.actor, rollout, plan)
        return logprobs, old_logprobs, values, entropy

    @torch.no_grad()
    def measure_kl(self, experience: Experience) -> Metrics:
        """Measures the KL to the reference (k1 per token) before and after the update. A collective.

        ``experience`` holds the rows of all ranks.
        """
        mine = experience.select(
            torch.arange(len(experience)).chunk(self.world.size)[self.world.rank]
        ).trimmed()
        with self.timer("old_logprobs"):
            logprobs = self.guard(lambda: self._logprobs(self.actor, mine, self.plan(mine)))()
        sums = MetricSums()
        sums.add_mean("kl/before_update", mine.logprobs - mine.ref_logprobs, mine.response_mask)
        sums.add_mean("kl/after_update", logprobs - mine.ref_logprobs, mine.response_mask)
        return sums.reduced(self.world)

    def _logprobs(
        self, model: TrainedModel | FrozenModel, sequences: Sequences, plan: list[Tensor]
    ) -> Tensor:
        """Computes log-probs [B,R] of the responses."""
        outputs = forward_rows(model, sequences, plan)
        return scatter_tokens([out.logprobs for out in outputs], sequences, plan)


def mask_stops(rollout: Rollout, stop_token_ids: tuple[int, ...]) -> Rollout:
    """Removes end tokens from the response mask; models still attend to them.

    zysNLP's code always does this. DeepSpeed-Chat does it if the pad token is an end token.
    """
    ids = rollout.response_ids
    stops = torch.isin(ids, torch.tensor(stop_token_ids, dtype=ids.dtype))
    last = torch.arange(rollout.response_width) == rollout.response_lengths[:, None] - 1
    ended = stops & last & rollout.finished[:, None]
    if rollout.feedback_mask is not None:  # each turn may have an end token
        before_feedback = pad(rollout.feedback_mask[:, 1:], (0, 1)) & rollout.response_mask
        ended = stops & (last | before_feedback)
    return replace(rollout, response_mask=rollout.response_mask & ~ended)
