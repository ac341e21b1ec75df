"""The `algo` section to the objects that do what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from torch import Tensor

from ppo_ds.config.schema import Config, rollout_size, value_position
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import UserError
from ppo_ds.ops.kl import AdaptiveKLController, FixedKLController, ThresholdKLController
from ppo_ds.ppo.advantages import CriticEstimator, Estimator, ScorePosition, Whitening
from ppo_ds.ppo.experience import Correction, ExperienceMaker, KLCharge, shared_values_of, values_of
from ppo_ds.ppo.learner import Learner
from ppo_ds.ppo.losses import PolicyObjective, PtxObjective, ValueObjective
from ppo_ds.ppo.reward_shaping import Penalties, ScoreShaper
from ppo_ds.training.health import Health
from ppo_ds.training.timing import PhaseTimer
from ppo_ds.types import Sequences


def uses_critic(config: Config) -> bool:
    """Whether values are learned at all, by a critic or by a head on the actor."""
    return config.algo.advantage.estimator == "gae"


def reads_once(config: Config) -> bool:
    """Whether the update's own forward is the only one that the actor makes over its answers: one optimizer step, and nothing that is due before it
    needs the log-probs (a KL in the reward, weights of the decode backend, values from the same trunk, steps in which the critic alone learns).
    """
    algo, size = config.algo, rollout_size(config)
    one_step = algo.epochs == 1 and (algo.minibatch_size or size) == size
    asked_before = (
        algo.kl.place == "reward"
        or algo.rollout_is.kind != "none"
        or config.critic.share_trunk
        or algo.value.warmup_steps > 0
    )
    return one_step and algo.old_policy == "rollout" and not asked_before


def experience_maker(
    config: Config,
    *,
    world: World,
    actor: TrainedModel,
    reference: FrozenModel | None,
    critic: TrainedModel | None,
    lagged: WeightCopy | None,
    stop_token_ids: tuple[int, ...],
    pad_id: int,
    timer: PhaseTimer,
) -> ExperienceMaker:
    algo, n = config.algo, config.rollout.samples_per_prompt
    return ExperienceMaker(
        actor=actor,
        early=not reads_once(config),
        reference=reference,
        values=_values(config, actor, critic),
        one_trunk=critic is None and uses_critic(config),
        world=world,
        token_budget=config.memory.score_tokens,
        packed=_all_packed(actor, reference, critic),
        hidden_stops=hidden_stops(algo.train_on_eos, stop_token_ids, pad_id),
        old_policy=None if lagged is None else lagged.swapped,
        shaper=score_shaper(config, world),
        kl=KLCharge(algo.kl.place == "reward", algo.kl.estimator),
        place=_score_place(config),
        estimator=_critic_estimator(config)
        if uses_critic(config)
        else Estimator(algo.advantage.estimator, algo.gae.gamma, n),
        whitening=_whitening(config),
        group_size=n,
        correction=Correction(algo.rollout_is.kind, algo.rollout_is.low, algo.rollout_is.high),
        timer=timer,
    )


def _all_packed(*models: TrainedModel | FrozenModel | None) -> bool:
    """Whether forwards can be planned for rows without padding."""
    return all(model.module.packed for model in models if model is not None)


def pretraining(maker: ExperienceMaker) -> ExperienceMaker:
    """The same with returns that are the rewards to come: no bootstrap from a critic that knows nothing yet."""
    estimator = replace(maker.estimator, lam=1.0, lam_critic=None, bootstrap_truncated=False)
    if maker.kl.in_reward:
        return replace(maker, estimator=estimator)
    return replace(
        maker,
        estimator=estimator,
        early=False,
        reference=None,
        correction=replace(maker.correction, kind="none"),
    )


def hidden_stops(include_eos: bool | None, stop_token_ids: tuple[int, ...], pad_id: int) -> tuple[int, ...]:
    """The end tokens that are no actions."""
    if include_eos is None:
        return tuple(stop for stop in stop_token_ids if stop == pad_id)
    return () if include_eos else stop_token_ids


def _values(
    config: Config, actor: TrainedModel, critic: TrainedModel | None
) -> Callable[[Sequences], Tensor] | None:
    if critic is not None:
        return values_of(critic)
    return shared_values_of(actor) if uses_critic(config) else None


def score_shaper(config: Config, world: World) -> ScoreShaper:
    shaping = config.algo.reward_shaping
    return ScoreShaper(
        penalties=Penalties(
            shaping.missing_eos,
            shaping.missing_eos_value,
            shaping.overlong_buffer,
            shaping.overlong_factor,
            shaping.length_penalty,
        ),
        normalize=shaping.normalize,
        with_std=shaping.normalize_std,
        clip=shaping.clip,
        world=world,
    )


def _score_place(config: Config) -> ScorePosition:
    return ScorePosition(config.algo.reward_shaping.score_position, config.algo.value.next_state)


def _critic_estimator(config: Config) -> CriticEstimator:
    algo = config.algo
    return CriticEstimator(
        level=algo.action_level,
        gamma=algo.gae.gamma,
        lam=algo.gae.lam,
        lam_critic=algo.gae.lam_critic,
        bootstrap_truncated=algo.gae.bootstrap_truncated,
        position=value_position(algo),
        place=_score_place(config),
    )


def _whitening(config: Config) -> Whitening:
    return Whitening(config.algo.advantage.whiten, config.algo.advantage.unbiased, config.algo.action_level)


@dataclass(frozen=True)
class Horizon:
    """How long a run is: PPO steps, and optimizer steps at most (algo.target_kl may end the passes of a step early)."""

    steps: int
    actor: int
    critic: int


def horizon(config: Config, n_prompts: int) -> Horizon:
    value, rollout = config.algo.value, rollout_size(config)
    steps = config.run.steps or math.ceil(
        (config.run.epochs or 0) * n_prompts / config.rollout.prompts_per_step
    )
    if value.warmup_steps >= steps:
        raise UserError(
            f"algo.value.warmup_steps={value.warmup_steps}: leaves the actor none of the {steps} steps"
        )
    each = config.algo.epochs * (rollout // (config.algo.minibatch_size or rollout))
    return Horizon(steps, (steps - value.warmup_steps) * each, (steps + value.pretrain_rollouts) * each)


def learner(
    config: Config,
    *,
    world: World,
    actor: TrainedModel,
    critic: TrainedModel | None,
    ptx_texts: Iterator[Sequences] | None,
    ema: WeightCopy | None,
    timer: PhaseTimer,
    health: Health,
) -> Learner:
    algo = config.algo
    return Learner(
        actor=actor,
        critic=critic,
        world=world,
        epochs=algo.epochs,
        minibatch_size=algo.minibatch_size or rollout_size(config),
        token_budget=config.memory.train_tokens,
        packed=_all_packed(actor, critic),
        norm=algo.loss.norm or config.sampling.max_new_tokens,
        target_kl=algo.target_kl,
        whitening=_whitening(config),
        policy=PolicyObjective(
            level=algo.action_level,
            kind=algo.policy.loss,
            clip_low=algo.policy.clip_low,
            clip_high=algo.policy.clip_high,
            dual_clip=algo.policy.dual_clip,
            agg=algo.loss.agg,
            entropy_coef=algo.entropy.coef,
            entropy_kind=algo.entropy.kind,
            kl_in_loss=algo.kl.place == "loss",
            kl_estimator=algo.kl.estimator,
            aux_coef=(actor.module.balance_coef or 0.0) if algo.aux_coef is None else algo.aux_coef,
        ),
        value=ValueObjective(
            algo.value.clip,
            algo.value.half,
            algo.value.coef,
            "token_mean" if algo.action_level == "sequence" else algo.loss.agg,
        ),
        ptx=PtxObjective(algo.ptx.coef) if ptx_texts is not None else None,
        ptx_texts=ptx_texts,
        ema=ema,
        ema_decay=config.actor.ema.decay or 0.0,
        timer=timer,
        health=health,
    )


def kl_controller(config: Config) -> FixedKLController:
    kl = config.algo.kl
    if kl.controller == "adaptive":
        return AdaptiveKLController(kl.coef, kl.target, kl.horizon, kl.min_coef, kl.max_coef)
    if kl.controller == "threshold":
        return ThresholdKLController(kl.coef, kl.target, min_coef=kl.min_coef, max_coef=kl.max_coef)
    return FixedKLController(kl.coef)


def shadow(model: TrainedModel, wanted: bool) -> WeightCopy | None:
    return WeightCopy(model) if wanted else None


def eval_weights(ema: WeightCopy | None, wanted: bool) -> Callable[[], AbstractContextManager[None]]:
    """What evaluation runs inside: the averaged weights, or nothing."""
    return ema.swapped if ema is not None and wanted else nullcontext
