"""Builds the algorithm from the `algo` section: experience maker, learner, KL controller."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from torch import Tensor

from ppo_ds.algorithm.credit.keys import AdvantageConfig
from ppo_ds.algorithm.credit.positions import ScorePosition
from ppo_ds.algorithm.credit.responses import CreditOptions, Estimate, Responses
from ppo_ds.algorithm.credit.whitening import Whitening
from ppo_ds.algorithm.kl.controllers import FixedKLController
from ppo_ds.algorithm.kl.keys import KL_ESTIMATORS, KLConfig
from ppo_ds.algorithm.loss.aggregation import seq_mean_token_mean, seq_mean_token_sum, token_mean
from ppo_ds.algorithm.loss.keys import TokenSumNorm
from ppo_ds.algorithm.policy.keys import PolicyConfig
from ppo_ds.algorithm.policy.surrogate import PolicyTerms, TokenLoss
from ppo_ds.algorithm.shaping.scores import ScoreShaper
from ppo_ds.assemble.shared import all_packed, training_steps
from ppo_ds.config.registry import import_target
from ppo_ds.config.schema import PPOConfig, learns_values, reward_weights, rollout_size, value_position
from ppo_ds.config.sections.algo import AlgoConfig
from ppo_ds.distributed.world import World
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.engine.hybrid import HybridActor
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.engine.weight_copy import WeightCopy
from ppo_ds.errors import RunError, UserError
from ppo_ds.ops.masked import Reduce
from ppo_ds.planning.forwards import kept_roles, old_logprobs_source
from ppo_ds.ppo.experience import ExperienceMaker
from ppo_ds.ppo.health import BOUNDS, ParityMonitor
from ppo_ds.ppo.kept_forwards import KeptForwards
from ppo_ds.ppo.learner import Learner, RatioCounts, Schedule
from ppo_ds.ppo.losses import (
    EntropyTerm,
    LoadBalancingTerm,
    PolicyTerm,
    PositiveNLLTerm,
    PtxObjective,
    ReferenceKLTerm,
    Term,
    ValueObjective,
    forward_options,
)
from ppo_ds.ppo.minibatches import Transform, whitened, with_selected, with_top_entropy, without_truncated
from ppo_ds.ppo.model_outputs import ModelForwards
from ppo_ds.run.stage import RunContext, StepContext
from ppo_ds.types import Sequences


def experience_maker(
    config: PPOConfig,
    context: RunContext,
    *,
    actor: TrainedModel,
    reference: FrozenModel | None,
    critic: TrainedModel | None,
    lagged: WeightCopy | None,
    masked_stop_ids: tuple[int, ...],
    kept: KeptForwards | None = None,
) -> ExperienceMaker:
    algo, world, budgets = config.algo, context.world, context.budgets
    # Some forwards cannot be repeated if memory runs out: ZeRO-3 gathers weights in a forward, ranks that
    # divide tokens exchange data, and lagged weights are swapped in between two forwards.
    sections = (config.actor, config.critic, config.reference)
    collective = lagged is not None or any(section.zero.stage == 3 for section in sections)
    collective |= world.sequence is not None
    forwards = ModelForwards(
        actor=actor,
        lagged=lagged,
        reference=reference,
        critic=critic,
        share_trunk=critic is None and learns_values(config),
        old_logprobs=old_logprobs_source(config),
        actor_options={"with_entropy": algo.policy.top_entropy is not None},
        token_budget=budgets.score,
        guard=partial(
            budgets.guard,
            budgets.score,
            what="log-probs and values",
            repeatable=not collective,
            economize=(lambda: None) if kept is None else kept.switch_off,
        ),
        packed=all_packed(actor, reference, critic),
        world=world,
        timer=context.timer,
        kept=kept,
    )
    return ExperienceMaker(
        forwards=forwards,
        masked_stop_ids=masked_stop_ids,
        shaper=ScoreShaper(algo.reward_shaping, world.sum),
        charged_kl=_kl_estimator(algo.kl) if algo.kl.place == "reward" else None,
        score_position=ScorePosition(algo.reward_shaping.score_position, algo.value.next_state),
        estimate_advantages=_checked(algo.advantage, Estimate, "advantages"),
        credit=credit_options(config, world.sum),
        whitening=_whitening(algo),
        group_size=config.rollout.samples_per_prompt,
        rollout_is=algo.rollout_is,
        world=world,
        timer=context.timer,
        check=context.stop.raise_if_stopped,
    )


def kept_forwards(
    config: PPOConfig, *, world: World, actor: TrainedModel, critic: TrainedModel | None
) -> KeptForwards | None:
    """Builds the store of the forwards that the update reuses; None if ``kept_roles`` names no model."""
    options = {"actor": forward_options(policy_terms(config, actor)), "critic": {}}
    roles = kept_roles(config)
    if not roles:
        return None
    return KeptForwards(
        options={name: options[name] for name in roles},
        token_budget=int(config.memory.train_tokens),
        packed=all_packed(actor, critic),
        trained=1 if critic is None else 2,
        world=world,
    )


def credit_options(config: PPOConfig, reduce: Reduce) -> CreditOptions:
    """Returns the settings of the advantage estimators; ``reduce`` sums a tensor over all ranks."""
    algo, weights = config.algo, {}
    if algo.advantage.needs_parts:
        weights = {name: float(weight) for name, weight in reward_weights(config).items()}
    return CreditOptions(
        gae=algo.gae,
        action_level=algo.action_level,
        value_position=value_position(algo),
        part_weights=weights,
        reduce=reduce,
    )


def masked_stop_ids(
    train_on_eos: bool | None, stop_token_ids: tuple[int, ...], pad_id: int
) -> tuple[int, ...]:
    """Returns the end tokens that are not actions.

    ``train_on_eos`` True: none. False: all end tokens. None: only the pad token, if it is an end token.
    """
    if train_on_eos is None:
        return tuple(stop for stop in stop_token_ids if stop == pad_id)
    return () if train_on_eos else stop_token_ids


def _kl_estimator(kl: KLConfig) -> Callable[[Tensor, Tensor], Tensor]:
    """Returns the estimator of algo.kl, a function of the log-probs of the policy and of the reference."""
    estimator = import_target(KL_ESTIMATORS[kl.estimator].target)
    return estimator if kl.clamp is None else partial(estimator, clamp=kl.clamp)


def _whitening(algo: AlgoConfig) -> Whitening:
    return Whitening(algo.advantage.whiten, algo.advantage.unbiased, algo.action_level)


def _checked(section: PolicyConfig | AdvantageConfig, result: type, field: str) -> Callable[..., Any]:
    """Returns the function that a section names, with a check of its results, as it may be the user's.

    The check raises RunError unless the function returns a ``result`` whose ``field`` has the mask's shape.
    """
    function, name = import_target(section.function), getattr(section, section.tag)

    @wraps(function)
    def checked(given: PolicyTerms | Responses, options: Any) -> Any:
        found = function(given, options)
        if not isinstance(found, result):
            raise RunError(f"{name} returned {type(found).__name__}; it must return {result.__name__}")
        shape, wanted = tuple(getattr(found, field).shape), tuple(given.mask.shape)
        if shape != wanted:
            raise RunError(f"{name} returned {field} of shape {shape}; it must be that of mask, {wanted}")
        return found

    return checked


@dataclass(frozen=True)
class Horizon:
    """Length of a run, in PPO steps and in optimizer steps."""

    steps: int  # PPO steps
    # maximum number of optimizer steps per model; algo.target_kl may end the epochs of a PPO step early
    actor: int
    critic: int


def horizon(config: PPOConfig, n_prompts: int) -> Horizon:
    """Computes the run's length; raises UserError if algo.value.warmup_steps leaves the actor no step."""
    value, rollout = config.algo.value, rollout_size(config)
    steps = training_steps(config.run, n_prompts, config.rollout.prompts_per_step)
    if value.warmup_steps >= steps:
        raise UserError(
            f"algo.value.warmup_steps={value.warmup_steps}: leaves the actor none of the {steps} steps"
        )
    each = config.algo.epochs * (rollout // (config.algo.minibatch_size or rollout))
    return Horizon(steps, (steps - value.warmup_steps) * each, (steps + value.pretrain_rollouts) * each)


def learner(
    config: PPOConfig,
    context: StepContext,
    *,
    actor: HybridActor,
    critic: TrainedModel | None,
    parity: ParityMonitor,
    ptx_texts: Iterator[Sequences] | None = None,
    ema: WeightCopy | None = None,
    kept: KeptForwards | None = None,
) -> Learner:
    algo = config.algo
    aggregation = import_target(algo.loss.function)
    norm = algo.loss.norm if isinstance(algo.loss, TokenSumNorm) else None
    return Learner(
        actor=actor,
        critic=critic,
        average=None if ema is None else partial(ema.ema_update, config.actor.ema.decay),
        transforms=transforms(algo),
        terms=policy_terms(config, actor),
        # At action level sequence there is one value per response, so the value loss is the mean over the
        # responses, whatever algo.loss.agg is.
        value=ValueObjective(algo.value, token_mean if algo.action_level == "sequence" else aggregation),
        ptx=None if ptx_texts is None else PtxObjective(algo.ptx.coef, ptx_texts),
        norm=norm or config.sampling.max_new_tokens,
        schedule=Schedule(algo.epochs, algo.minibatch_size or rollout_size(config), algo.target_kl),
        token_budget=int(config.memory.train_tokens),
        packed=all_packed(actor, critic),
        kept=kept,
        context=context,
        parity=parity,
        ratios=RatioCounts(context.world) if config.tracker.logs_histograms else None,
    )


def transforms(algo: AlgoConfig) -> tuple[Transform, ...]:
    policy, chosen = algo.policy, list[Transform]()
    if algo.advantage.whiten == "minibatch":
        chosen.append(partial(whitened, whitening=_whitening(algo)))
    if algo.loss.mask_truncated:
        chosen.append(without_truncated)
    if policy.top_entropy is not None:
        chosen.append(partial(with_top_entropy, share=policy.top_entropy))
    if policy.selection is not None:
        selection = partial(import_target(policy.selection), policy=policy)
        chosen.append(partial(with_selected, selection=selection))
    return tuple(chosen)


def policy_terms(config: PPOConfig, actor: TrainedModel) -> tuple[Term, ...]:
    """Returns the terms of the actor's loss.

    With algo.action_level=sequence, the KL and the entropy of a response are sums over its tokens. Its policy
    loss is a sum too, or the mean if each token already has the loss of the whole response.
    """
    algo, policy = config.algo, config.algo.policy
    agg = policy_agg = import_target(algo.loss.function)
    if algo.action_level == "sequence":
        agg = seq_mean_token_sum
        policy_agg = seq_mean_token_sum if policy.sums_over_tokens else seq_mean_token_mean
    ratio = policy.ratio or algo.action_level
    terms: list[Term] = [
        PolicyTerm(_checked(policy, TokenLoss, "loss"), policy, ratio, policy_agg),
        EntropyTerm(algo.entropy, agg),
    ]
    if algo.kl.place == "loss":
        terms.append(ReferenceKLTerm(_kl_estimator(algo.kl), agg))
    aux_coef = (actor.module.balance_coef or 0.0) if algo.aux_coef is None else algo.aux_coef
    if aux_coef:
        terms.append(LoadBalancingTerm(aux_coef))
    if algo.positive_nll.coef:
        terms.append(PositiveNLLTerm(algo.positive_nll.coef, algo.positive_nll.above))
    return tuple(terms)


def parity_monitor(config: PPOConfig) -> ParityMonitor:
    """Builds the monitor of the gap between the log-probs of generation and training."""
    highest, health = config.health.max_parity, config.health
    if highest == "auto":
        highest = BOUNDS[config.actor.model.dtype]
    return ParityMonitor(
        highest,
        stops=health.parity_action == "stop",
        old_from_rollout=config.algo.old_logprobs == "rollout",
        own_weights=config.rollout.own_weights,
    )


def kl_controller(config: PPOConfig) -> FixedKLController:
    kl = config.algo.kl
    made: FixedKLController = import_target(kl.function)(
        kl.coef, **{name: getattr(kl, name) for name in kl.takes}
    )
    return made
