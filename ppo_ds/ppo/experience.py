"""Implements make_experience, which computes the training data of PPO from a rollout and its scores.

Departures from Schulman et al. 2017, each of which the config can switch off: the score is clipped after the
penalty for a missing end token, the KL to the reference is subtracted from the reward of each token, and
advantages are whitened over the rollout of all ranks, not per minibatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppo_ds.algorithm.credit.keys import GAEConfig
from ppo_ds.algorithm.credit.positions import ScorePosition
from ppo_ds.algorithm.credit.responses import AdvantageEstimator, CreditOptions, Responses
from ppo_ds.algorithm.credit.whitening import Whitening
from ppo_ds.algorithm.kl.estimators import k3
from ppo_ds.algorithm.rollout_is.keys import Bounded, NoWeights, RolloutISConfig
from ppo_ds.algorithm.rollout_is.weights import rollout_is_weights
from ppo_ds.algorithm.shaping.scores import ScoreShaper
from ppo_ds.background.pending import Pending
from ppo_ds.distributed.world import World
from ppo_ds.ops.masked import masked_sum
from ppo_ds.ppo.collector import scored, scores_of, wait_for_scores
from ppo_ds.ppo.minibatches import all_gather_rows
from ppo_ds.ppo.model_outputs import ModelForwards
from ppo_ds.run.metrics import MetricSums
from ppo_ds.run.timing import PhaseTimer
from ppo_ds.types import Experience, Metrics, Rollout, ScoredRollout, Scores


@dataclass(kw_only=True)
class ExperienceMaker:
    """Computes log-probs, KL, rewards, values, advantages and returns of a rollout."""

    forwards: ModelForwards
    masked_stop_ids: tuple[int, ...]  # end tokens that are not actions
    shaper: ScoreShaper
    # estimator of the KL to subtract from the reward; None: no KL in the reward
    charged_kl: Callable[[Tensor, Tensor], Tensor] | None
    score_position: ScorePosition
    estimate_advantages: AdvantageEstimator
    credit: CreditOptions
    whitening: Whitening
    group_size: int  # consecutive rows with the same prompt
    rollout_is: RolloutISConfig
    world: World
    timer: PhaseTimer
    check: Callable[[], None]  # a collective that raises Abandoned on all ranks after a stop request

    @torch.no_grad()
    def __call__(
        self, rollout: Rollout, pending_scores: Pending[Scores], kl_coef: float, critic_only: bool = False
    ) -> tuple[Experience, Metrics]:
        """Makes the experience of all ranks from each rank's rollout. All ranks must call this."""
        if self.masked_stop_ids:
            rollout = mask_stops(rollout, self.masked_stop_ids)
        mask = rollout.response_mask
        logprobs, old_logprobs, ref_logprobs, values, entropy = self.forwards(rollout, critic_only)

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
            if isinstance(self.rollout_is, Bounded):
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
            staleness=rollout.staleness,
            scores=rollout.score_sums,
            rewards=rewards,
            advantages=advantages,
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            ref_logprobs=ref_logprobs,
            entropy=entropy,
            values=values,
            returns=estimate.returns,
            value_mask=estimate.value_mask,
            feedback_mask=rollout.feedback_mask,
            notes=response_notes(rollout),
        )
        metrics = self.metrics(rollout, experience, kl_penalty, estimate.advantages, scores != unclipped)
        return all_gather_rows(experience, self.world), metrics

    def baselines(self, greedy: ScoredRollout) -> Tensor:
        """Returns for each row the shaped score of the greedy response to its prompt, [B]."""
        shaped, _ = self.shaper(greedy, update=False)
        return (shaped + greedy.token_scores.sum(1)).repeat_interleave(self.group_size)

    def for_pretraining(self) -> ExperienceMaker:
        """Returns a copy for the critic's pretraining on rollouts of the initial policy.

        The value targets are discounted sums of future rewards (lambda 1), since an untrained critic is
        useless for bootstrapping. Model outputs that do not affect these targets are not computed.
        """
        credit = replace(self.credit, gae=GAEConfig(gamma=self.credit.gae.gamma, lam=1.0))
        maker = replace(self, credit=credit, forwards=replace(self.forwards, kept=None))
        if self.charged_kl is not None:
            return maker
        forwards = replace(maker.forwards, old_logprobs="update", reference=None)
        return replace(maker, forwards=forwards, rollout_is=NoWeights())

    def metrics(
        self,
        rollout: ScoredRollout,
        experience: Experience,
        kl_penalty: Tensor,
        advantages: Tensor,
        clipped: Tensor,
    ) -> Metrics:
        """Computes the metrics of rewards and of unwhitened ``advantages``. All ranks must call this."""
        states, sums = self.score_position.states(rollout), MetricSums()
        sums.add_mean("reward/clipped_frac", clipped)
        # a score at a position without a state has no effect, as in zysNLP's code
        sums.add_mean("reward/total_mean", masked_sum(experience.rewards, states, dim=1))
        sums.add_mean("reward/kl_penalty_mean", -masked_sum(kl_penalty, states[:, :-1], dim=1))
        if rollout.baselines is not None:
            sums.add_mean("reward/baseline_mean", rollout.baselines)
        for name, component in scores_of(rollout).components.items():
            sums.add_mean(f"reward/component/{name}_mean", component)
        if isinstance(self.rollout_is, Bounded):
            add_weight_metrics(sums, experience, self.rollout_is)
        sums.add_mean_and_std("adv", advantages, rollout.response_mask)
        sums.add_max("adv/max_abs", advantages.abs().max())
        return sums.reduced(self.world)

    @torch.no_grad()
    def measure_kl(self, experience: Experience) -> Metrics:
        """Measures the KL to the reference (k1) before and after the update. All ranks must call this."""
        rows = torch.arange(len(experience)).chunk(self.world.size)[self.world.rank]
        mine = experience.select(rows).trimmed()
        assert mine.logprobs is not None, "the update returns them"
        with self.timer("old_logprobs"):
            logprobs = self.forwards.actor_logprobs(mine)
        sums = MetricSums()
        sums.add_mean("kl/before_update", mine.logprobs - mine.ref_logprobs, mine.response_mask)
        sums.add_mean("kl/after_update", logprobs - mine.ref_logprobs, mine.response_mask)
        return sums.reduced(self.world)

    def print_step(self, number: int, rows: Experience, losses: dict[str, Tensor]) -> None:
        """Prints the losses of an optimizer step, and the KL to the reference (k1) before and after it.

        ``rows.logprobs`` are those before the step, or None if the actor was not trained. The KL is left out
        without them or without the reference's log-probs. All ranks must call this.
        """
        means = self.world.sum(torch.stack([*losses.values()])) / self.world.size
        parts = [f"{name} loss {mean:.4f}" for name, mean in zip(losses, means.tolist(), strict=True)]
        if rows.logprobs is not None and rows.ref_logprobs is not None:
            parts.append(f"KL {' -> '.join(f'{kl:.4f}' for kl in self.measure_kl(rows).values())}")
        if self.world.is_main:
            print(f"  optimizer step {number}:", ", ".join(parts), flush=True)


def add_weight_metrics(sums: MetricSums, experience: Experience, section: Bounded) -> None:
    """Adds the metrics of the importance weights of algo.rollout_is to ``sums``."""
    mask, sampled, trained = experience.response_mask, experience.decode_logprobs, experience.logprobs
    _, bounded = rollout_is_weights(trained, sampled, mask, section)
    sums.add_mean("parity/weight_mean", experience.weights, mask)
    sums.add_mean("parity/weight_outside_frac", (bounded < section.low) | (bounded > section.high), mask)
    # the decode backend sampled the tokens, so d = log-prob of decoding - log-prob of training
    sums.add_mean("parity/k3_token_mean", k3(sampled, trained), mask)


def response_notes(rollout: ScoredRollout) -> tuple[dict[str, Any], ...] | None:
    """Returns Experience.notes: each response's score parts and episode end; None if there are neither."""
    columns = {"components": rollout.components, "episode_end": rollout.episode_ends}
    present = {name: column for name, column in columns.items() if column and column[0]}
    if not present:
        return None
    return tuple({name: column[i] for name, column in present.items()} for i in range(len(rollout)))


def mask_stops(rollout: Rollout, stop_token_ids: tuple[int, ...]) -> Rollout:
    """Removes end tokens from the response mask but not from the attention mask (zysNLP, DeepSpeed-Chat)."""
    ids = rollout.response_ids
    stops = torch.isin(ids, torch.tensor(stop_token_ids, dtype=ids.dtype))
    last = torch.arange(rollout.response_width) == rollout.response_lengths[:, None] - 1
    ended = stops & last & rollout.finished[:, None]
    if rollout.feedback_mask is not None:  # each turn may have an end token
        before_feedback = pad(rollout.feedback_mask[:, 1:], (0, 1)) & rollout.response_mask
        ended = stops & (last | before_feedback)
    return replace(rollout, response_mask=rollout.response_mask & ~ended)
