"""Runs the PPO update and makes experience, with a stub of the training engine.

Each case runs with a number of micro-batches per optimizer step. Waits and blocking uploads must not depend
on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from ppo_ds.algorithm.credit.keys import GAE
from ppo_ds.algorithm.credit.positions import ScorePosition
from ppo_ds.algorithm.credit.responses import CreditOptions
from ppo_ds.algorithm.credit.whitening import Whitening
from ppo_ds.algorithm.kl.keys import KL_ESTIMATORS
from ppo_ds.algorithm.loss.keys import LOSS_AGGREGATIONS
from ppo_ds.algorithm.policy.keys import PPO
from ppo_ds.algorithm.rollout_is.keys import NoWeights
from ppo_ds.algorithm.shaping.scores import ScoreShaper
from ppo_ds.background.pending import Pending
from ppo_ds.config.registry import import_target
from ppo_ds.config.sections.algo import EntropyConfig, GAEConfig, RewardShapingConfig, ValueConfig
from ppo_ds.engine.frozen import FrozenModel
from ppo_ds.models.packed_attention import why_padded
from ppo_ds.models.policy import Policy
from ppo_ds.models.value import ScoreModel
from ppo_ds.ppo.experience import ExperienceMaker
from ppo_ds.ppo.health import ParityMonitor
from ppo_ds.ppo.learner import Learner, Schedule
from ppo_ds.ppo.losses import EntropyTerm, PolicyTerm, PtxObjective, ReferenceKLTerm, Term, ValueObjective
from ppo_ds.ppo.minibatches import whitened
from ppo_ds.ppo.model_outputs import ModelForwards
from ppo_ds.run.health import Health
from ppo_ds.run.stage import StepContext
from ppo_ds.types import Rollout, Scores, Sequences
from tests.gpu_sim.cases import CASES as NAMES
from tests.gpu_sim.drives.parts import Case, Engine, classifier, experience, language_model, one_rank, timer
from tests.gpu_sim.fake_cuda import CUDA, FakeCuda

WIDTH = 12  # tokens of a row, so that a budget of 2 * WIDTH makes micro-batches of two rows


def policy_terms(kl: bool = True) -> tuple[Term, ...]:
    agg = import_target(LOSS_AGGREGATIONS["token_mean"].function)
    policy = PolicyTerm(import_target(PPO.function), PPO(), "token", agg)
    kl_term = (ReferenceKLTerm(import_target(KL_ESTIMATORS["k3"].target), agg),) if kl else ()
    return policy, EntropyTerm(EntropyConfig(), agg), *kl_term


def value_objective() -> ValueObjective:
    return ValueObjective(ValueConfig(), import_target(LOSS_AGGREGATIONS["token_mean"].function))


def texts() -> Iterator[Sequences]:
    """Yields the PTX texts of one optimizer step after the other."""
    rows = experience(4)
    while True:
        yield Sequences(rows.ids, rows.attention_mask, rows.response_mask)


def update(device: FakeCuda, what: str, micros: int) -> None:
    """Runs an update: one optimizer step (for "ppo" two) of ``micros`` micro-batches of two rows."""
    packed, dtype = what.startswith("packed"), "fp32" if what.endswith("fp32") else "bf16"
    with one_rank(device) as world:
        policy = Policy(language_model("qwen2", dtype), 0.7, value_head=what == "shared_trunk")
        if what == "shared_trunk":
            policy.value_head.to(CUDA)
        actor = Engine(policy, world)
        critic = Engine(ScoreModel(classifier("qwen2", dtype)), world)
        if packed:
            assert why_padded(policy.lm, "auto" if dtype == "bf16" else "packed", CUDA) is None
            policy.packed = critic.module.packed = True
        size = 2 * micros
        rows = experience(2 * size if what == "ppo" else size)
        if what == "first_forward":
            rows = replace(rows, logprobs=None, old_logprobs=None)
        if what == "critic_free":
            rows = replace(rows, values=None, returns=None, value_mask=None)
        learner = Learner(
            actor=actor,
            critic=None if what in ("critic_free", "shared_trunk") else critic,
            average=None,
            transforms=(partial(whitened, whitening=Whitening("minibatch", False, "token")),),
            terms=policy_terms(kl=what != "first_forward"),
            value=value_objective(),
            ptx=PtxObjective(0.1, texts()) if what == "ptx" else None,
            norm=7,
            schedule=Schedule(1, size, target_kl=0.1 if what == "target_kl" else None),
            token_budget=2 * WIDTH,
            packed=packed,
            context=StepContext(world=world, timer=timer, health=Health(max_skips=1000)),
            parity=ParityMonitor(None, stops=True),
        )
        with torch.no_grad():  # the first forward of a policy waits
            policy(rows.ids, rows.attention_mask, rows.response_width)
        device.report.clear()
        learner(rows, 0.1, seed=0)
        backwards = len(actor.backwards)
        steps = sum(actor.backwards)
    device.report.facts |= {"steps": steps, "backwards": backwards, "micro_batches": micros * steps}


def make_experience(device: FakeCuda, forwards: int) -> None:
    """Makes the experience of a rollout in ``forwards`` forwards of each model."""
    rows = experience(2 * forwards)
    count, width = len(rows), rows.response_width
    rollout = Rollout(
        rows.ids,
        rows.attention_mask,
        rows.response_mask,
        finished=rows.finished,
        limits=torch.full((count,), width),
        logprobs=rows.decode_logprobs,
        metadata=({},) * count,
    )
    scores = Scores(torch.zeros(count), torch.zeros(count, width), {})
    gae = import_target(GAE.function)
    position = ScorePosition("last_token", "trained")
    with one_rank(device) as world:
        policy = Policy(language_model("qwen2"), 0.7)
        with torch.no_grad():
            policy(rows.ids, rows.attention_mask, rows.response_width)
        forwards_of_models = ModelForwards(
            actor=Engine(policy, world),
            lagged=None,
            reference=FrozenModel(policy, policy, CUDA),
            critic=Engine(ScoreModel(classifier("qwen2")), world),
            share_trunk=False,
            old_logprobs="forward",
            token_budget=2 * WIDTH,
            guard=lambda forwards: forwards,
            packed=False,
            world=world,
            timer=timer,
        )
        maker = ExperienceMaker(
            forwards=forwards_of_models,
            masked_stop_ids=(),
            shaper=ScoreShaper(RewardShapingConfig(), world.sum),
            charged_kl=import_target(KL_ESTIMATORS["k1"].target),
            score_position=position,
            estimate_advantages=gae,
            credit=CreditOptions(gae=GAEConfig()),
            whitening=Whitening(over="batch", unbiased=False, level="token"),
            group_size=1,
            rollout_is=NoWeights(),
            world=world,
            timer=timer,
            check=lambda: None,
        )
        device.report.clear()
        maker(rollout, Pending.of(scores), 0.1)
    device.report.facts |= {"forwards": forwards}


def case(name: str) -> Case:
    what, number, _ = name.rsplit(" ", 2)
    if what == "experience":
        return partial(make_experience, forwards=int(number))
    return partial(update, what=what, micros=int(number))


CASES = {name: case(name) for name in NAMES["learner"]}
