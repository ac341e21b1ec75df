"""Tests that every option has its effect, from the command line to the numbers of one PPO step.

The step runs without weights, on models that return given numbers; see tests/ppo/preset_runs.py.
"""

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ppo_ds.algorithm.policy.keys import POLICY_LOSSES
from ppo_ds.assemble.algorithm import experience_maker, kl_controller, masked_stop_ids
from ppo_ds.assemble.evaluation import build_evaluator
from ppo_ds.assemble.ppo import build_sampling
from ppo_ds.assemble.shared import eval_weights
from ppo_ds.background.pending import Pending
from ppo_ds.ppo.collector import scores_of
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import Sequences
from tests.ppo.preset_runs import (
    EOS,
    WIDTH,
    Numbers,
    Told,
    ToldActor,
    ToldCritic,
    ToldReference,
    close,
    composed,
    make_and_learn,
    run_context,
)
from tests.support.budgets import fixed_budgets


@dataclass(frozen=True, kw_only=True)
class Drifted(Numbers):
    """Adds log-probs of a decode backend that differ from the training engine's log-probs."""

    decoded: torch.Tensor

    def rollout(self):
        return replace(super().rollout(), logprobs=self.decoded.masked_fill(~self.mask.bool(), 0.0))


@dataclass(frozen=True, kw_only=True)
class InParts(Drifted):
    """Adds the parts of the score of each response."""

    parts: tuple[dict[str, float], ...]

    def rollout(self):
        return replace(super().rollout(), components=self.parts)


def numbers(**changes):
    """Makes six responses. Two are truncated, and some scores, ratios and values exceed every clip range."""
    draw = torch.Generator().manual_seed(5)
    mask = torch.arange(WIDTH) < torch.tensor([10, 7, 4, 10, 5, 8])[:, None]
    old = -1 - torch.rand(6, WIDTH, generator=draw)
    old_values = torch.randn(6, WIDTH + 1, generator=draw)
    given = dict(
        mask=mask,
        scores=torch.tensor([9.0, -1.0, 0.5, 2.0, -9.0, 1.0]),
        old=old,
        ref=old + 0.5 * torch.randn(6, WIDTH, generator=draw),
        now=old + 0.8 * torch.randn(6, WIDTH, generator=draw),
        old_values=old_values,
        values=old_values + 0.6 * torch.randn(6, WIDTH + 1, generator=draw),
        finished=torch.tensor([False, True, True, False, True, True]),
        decoded=old + 0.6 * torch.randn(6, WIDTH, generator=draw),
        aux=0.5,
    )
    return Drifted(**given | changes)


def outcome(world, *overrides, **changes):
    """Returns the numbers of one step, in the order in which they are computed."""
    run = make_and_learn(composed("standard", "algo.minibatch_size=3", *overrides), world, numbers(**changes))
    columns = ("response_mask", "weights", "rewards", "advantages", "returns")
    return {name: getattr(run.experience, name).float() for name in columns} | {
        "actor": updates(run.actor),
        "critic": updates(run.critic),
        "scored": torch.tensor(run.actor.forwards[False] + run.critic.forwards[False]).float(),
        "trained": torch.tensor(run.actor.forwards[True] + run.critic.forwards[True]).float(),
    }


def updates(model):
    """Returns the loss and the gradient of each optimizer step, [steps, 1 + parameters]."""
    return torch.stack(
        [torch.cat([torch.tensor([loss]), gradient.flatten()]) for loss, gradient in model.steps]
    )


def equal(one, other):
    """Compares two results, with a tolerance for the rounding of sums over different micro-batches."""
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-5, atol=1e-7)


PLAIN = {}  # outcomes without the switch, by the other settings; many tests have the same


def changed(world, before, after):
    if tuple(before) not in PLAIN:
        PLAIN[tuple(before)] = outcome(world, *before)
    plain, other = PLAIN[tuple(before)], outcome(world, *before, *after)
    return {name for name in plain if not equal(plain[name], other[name])}


LEARNED = {"actor", "critic"}
ADVANTAGES = {"advantages", "returns"} | LEARNED
REWARDS = {"rewards"} | ADVANTAGES
IN_LOSS = "algo.kl.place=loss"
NEXT_TOKEN = "algo.reward_shaping.score_position=next_token"
NORMALIZED = "algo.reward_shaping.normalize=first"
SUBTRACTED = "algo.reward_shaping.missing_eos=subtract"
SCALED = "algo.reward_shaping.missing_eos=scale"
BUFFER = "algo.reward_shaping.overlong_buffer=4"
ICEPOP = "algo.rollout_is.kind=icepop"
CLIP_COV = "algo.policy={loss:clip_cov,cov_frac:0.5,cov_low:0,cov_high:50}"
SAMPLE = "algo.entropy.kind=sample"
ENTROPY = "algo.entropy.coef=0.3"
SEQUENCE = "algo.action_level=sequence"
NORM = "algo.loss.agg=token_sum_norm"
OTHER_LOSSES = [name for name in POLICY_LOSSES if name not in ("ppo", "clip_cov")]


@pytest.mark.parametrize(
    ("override", "before", "what"),
    [
        (IN_LOSS, [], REWARDS),
        ("algo.kl.estimator=k2", [], REWARDS),
        ("algo.kl.estimator=k2", [IN_LOSS], {"actor"}),
        ("algo.kl.clamp=0.3", [], REWARDS),
        ("algo.kl.clamp=0.3", [IN_LOSS], {"actor"}),
        ("algo.kl.coef=0.3", [], REWARDS),
        ("algo.kl.coef=0.3", [IN_LOSS], {"actor"}),
        ("algo.train_on_eos=false", [], {"response_mask"} | REWARDS),
        ("algo.gae.gamma=0.5", [], ADVANTAGES),
        ("algo.gae.lam=0.5", [], ADVANTAGES),
        ("algo.gae.lam_critic=0.5", [], {"returns", "critic"}),
        ("algo.gae.length_alpha=0.3", [], ADVANTAGES),
        ("algo.gae.length_alpha=0.3", ["algo.gae.lam_critic=1"], {"advantages", "actor"}),
        ("algo.positive_nll.coef=0.3", [], {"actor"}),
        ("algo.positive_nll.above=1.5", ["algo.positive_nll.coef=0.3"], {"actor"}),
        ("algo.gae.bootstrap_truncated=true", [], ADVANTAGES),
        ("algo.advantage.whiten=minibatch", [], {"advantages", "actor"}),
        ("algo.advantage.unbiased=true", [], {"advantages", "actor"}),
        ("algo.advantage.unbiased=true", ["algo.advantage.whiten=minibatch"], {"actor"}),
        (NEXT_TOKEN, [], REWARDS),
        ("algo.value.next_state=untrained", [NEXT_TOKEN], {"critic"}),
        ("algo.value.next_state=ignored", [NEXT_TOKEN], ADVANTAGES),
        ("algo.reward_shaping.clip=7", [], REWARDS),
        (NORMALIZED, [], REWARDS),
        ("algo.reward_shaping.normalize_std=false", [NORMALIZED], REWARDS),
        (SUBTRACTED, [], REWARDS),
        (SCALED, [SUBTRACTED], REWARDS),
        ("algo.reward_shaping.missing_eos_value=0.3", [SCALED], REWARDS),
        (BUFFER, [], REWARDS),
        ("algo.reward_shaping.overlong_factor=0.3", [BUFFER], REWARDS),
        ("algo.reward_shaping.length_penalty=0.3", [], REWARDS),
        (ICEPOP, [], {"weights", "actor"}),
        ("algo.rollout_is.low=0.3", [ICEPOP], {"weights", "actor"}),
        ("algo.rollout_is.high=3", [ICEPOP], {"weights", "actor"}),
        ("algo.rollout_is.level=sequence_mean", ["algo.rollout_is.kind=mask"], {"weights", "actor"}),
        ("algo.rollout_is.level=sequence", ["algo.rollout_is.kind=truncate"], {"weights", "actor"}),
        ("algo.rollout_is.kind=truncate", ["algo.rollout_is.kind=tis"], set()),
        ("algo.rollout_is.kind=mask", [ICEPOP], set()),
        ("algo.old_logprobs=rollout", [], REWARDS | {"scored"}),
        ("algo.old_logprobs=rollout", [IN_LOSS], {"actor", "scored"}),
        (SEQUENCE, [], ADVANTAGES),
        ("algo.value.position=response_last", [SEQUENCE], ADVANTAGES),
        ("memory.score_tokens=77", [], {"scored"}),
        ("memory.train_tokens=77", [], {"trained"}),
        ("algo.epochs=3", [], LEARNED | {"trained"}),
        ("algo.minibatch_size=2", [], LEARNED | {"trained"}),
        ("algo.target_kl=0.1", [], LEARNED | {"trained"}),
        *(
            (f"algo.policy.loss={name}", [], {"actor"})
            for name in POLICY_LOSSES
            if name not in ("ppo", "clip_cov")
        ),
        ("algo.policy.clip_low=null", ["algo.policy.loss=cispo", "algo.policy.clip_high=4"], {"actor"}),
        ("algo.policy.tau_pos=3", ["algo.policy.loss=sapo"], {"actor"}),
        ("algo.policy.tau_neg=3", ["algo.policy.loss=sapo"], {"actor"}),
        ("algo.policy.delta=0.01", ["algo.policy.loss=dppo_kl"], {"actor"}),
        ("algo.policy.cov_low=-5", [CLIP_COV], {"actor"}),
        ("algo.policy.cov_frac=0.5", ["algo.policy.loss=kl_cov"], {"actor"}),
        ("algo.policy.kl_cov_coef=3", ["algo.policy.loss=kl_cov"], {"actor"}),
        ("algo.policy.off_policy_limit=0.05", [], {"actor"}),
        ("algo.policy.top_entropy=0.3", [], {"actor"}),
        ("algo.policy.clip_low=0.3", [], {"actor"}),
        ("algo.policy.clip_high=0.3", [], {"actor"}),
        ("algo.policy.dual_clip=3", [], {"actor"}),
        ("algo.loss.agg=seq_mean_token_sum", [], LEARNED),
        ("algo.loss.mask_truncated=true", [], LEARNED),
        ("algo.loss.norm=33", [NORM], LEARNED),
        ("algo.loss.norm=10", [NORM], set()),  # the default: sampling.max_new_tokens
        (ENTROPY, [SAMPLE], {"actor"}),
        (SAMPLE, [ENTROPY], {"actor"}),
        ("algo.aux_coef=0.3", [], {"actor"}),
        ("algo.value.clip=0.3", [], {"critic"}),
        ("algo.value.half=false", [], {"critic"}),
        ("algo.value.coef=0.3", [], {"critic"}),
    ],
)
def test_a_switch_changes_what_it_should_and_nothing_else(world, override, before, what):
    assert changed(world, before, [override]) == what


def test_end_tokens_that_are_padding_are_masked_on_request(world):
    assert masked_stop_ids(True, (2, 3), 3) == () and masked_stop_ids(None, (2, 3), 7) == ()
    everything, none = "algo.train_on_eos=true", "algo.train_on_eos=false"
    if_padding = "algo.train_on_eos=null"
    for same_as, changes in ((everything, {}), (none, {"pad_id": EOS})):
        found, expected = outcome(world, if_padding, **changes), outcome(world, same_as, **changes)
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_balance_loss_has_its_coefficient_or_the_models(world):
    def losses(*overrides):
        return outcome(world, *overrides)["actor"][:, 0]

    # The balance loss is 0.5 and the model's own coefficient is 1. A step has three micro-batches of one row.
    plain = losses("memory.train_tokens=13")
    for override, coef in (("algo.aux_coef=0.3", 0.3), ("algo.aux_coef=null", 1.0)):
        close(losses(override, "memory.train_tokens=13") - plain, torch.full((len(plain),), coef * 0.5))


def test_the_average_follows_each_step_with_its_decay(world):
    decays = []
    average = SimpleNamespace(ema_update=decays.append)
    config = composed("standard", "actor.ema.decay=0.7", "algo.minibatch_size=3", "algo.epochs=1")
    make_and_learn(config, world, numbers(), ema=average)
    assert decays == [0.7, 0.7]


def test_texts_add_their_loss_with_its_coefficient(world):
    """The only text has the ids of row 1, so its loss is the mean of -log p over the tokens of that row."""
    given = numbers()
    rollout = given.rollout()
    text = Sequences(rollout.ids[1:2], rollout.attention_mask[1:2], rollout.response_mask[1:2])
    expected = -given.now[1][given.mask[1]].mean()

    def first_loss(*overrides, **parts):
        config = composed("standard", "algo.epochs=1", *overrides)
        return make_and_learn(config, world, given, **parts).actor.steps[0][0]

    plain = first_loss()
    for coef in (0.3, 0.6):
        switches = (f"algo.ptx.coef={coef}", "data.ptx_path=org/texts")
        close(first_loss(*switches, ptx_texts=iter([text])) - plain, coef * expected)


def test_critic_pretraining_uses_rewards_to_go(world):
    switches = ("algo.gae.gamma=0.5", "algo.gae.lam_critic=0.5", "algo.gae.bootstrap_truncated=true")
    config, given = composed("standard", *switches), numbers()
    actor, critic = ToldActor(given, False), ToldCritic(given.old_values, given.values)
    reference = ToldReference(given.ref, given.ref)
    context = run_context(world, fixed_budgets(world, score_tokens=config.memory.score_tokens))
    models = dict(actor=actor, reference=reference, critic=critic, lagged=None)
    maker = experience_maker(config, context, **models, masked_stop_ids=())
    rollout = given.rollout()
    found, _ = maker.for_pretraining()(rollout, Pending.of(scores_of(rollout)), 0.05)
    for row, length in enumerate(given.mask.sum(1).tolist()):
        rewards = found.rewards[row].tolist()
        to_go = [sum(0.5 ** (t - s) * rewards[t] for t in range(s, length)) for s in range(length)]
        close(found.returns[row, :length], to_go)


def test_gdpo_normalizes_the_parts_of_the_reward(world):
    """The parts are worked out in numpy; the third part has the weight 0, and the total score is not used."""
    parts = {
        "right": [1.0, 0.0, 0.0, 1.0, 1.0, 0.0],
        "form": [2.0, 1.0, 0.0, 5.0, 5.0, 5.0],
        "logged": [9.0] * 6,
    }
    rows = tuple(dict(zip(parts, row, strict=True)) for row in zip(*parts.values(), strict=True))
    given = InParts(**vars(numbers()), parts=rows)
    found = make_and_learn(composed("gdpo", prompts=2, samples=3), world, given).experience.advantages
    sums = np.zeros(6)
    for name, weight in (("right", 1.0), ("form", 0.2)):
        groups = np.array(parts[name]).reshape(2, 3)
        deviations = groups.std(1, ddof=1, keepdims=True)
        sums += weight * ((groups - groups.mean(1, keepdims=True)) / (deviations + 1e-6)).flatten()
    expected = torch.tensor((sums - sums.mean()) / sums.std(ddof=1))
    close(found, expected[:, None] * given.mask)


BOUNDS = ("algo.kl.target=3", "algo.kl.min_coef=0.01", "algo.kl.max_coef=0.9")


@pytest.mark.parametrize(
    ("switches", "up", "down"),
    [
        # the error, clipped to 0.2, times 100 sequences / the horizon of 999
        (["algo.kl.controller=adaptive", "algo.kl.horizon=999"], 1 + 20 / 999, 1 - 20 / 999),
        (["algo.kl.controller=threshold"], 1.5, 0.5),
    ],
)
def test_controllers_change_the_coefficient_within_its_bounds(switches, up, down):
    """The coefficient starts at 0.05. A KL of 7 exceeds twice the target; a KL of 1 is below half of it."""
    for current, factor, bound in ((7.0, up, 0.9), (1.0, down, 0.01)):
        controller = kl_controller(composed("standard", *switches, *BOUNDS))
        controller.update(current, 100)
        assert controller.value == pytest.approx(0.05 * factor)
        for _ in range(500):
            controller.update(current, 100)
        assert controller.value == bound
    controller = kl_controller(composed("standard", *switches, *BOUNDS))
    controller.update(3.0, 100)
    assert controller.value == 0.05


def test_evaluation_uses_the_average_on_request():
    entered = []

    @contextmanager
    def swapped():
        entered.append("average")
        yield

    ema = SimpleNamespace(swapped=swapped)
    for average, wanted in ((ema, False), (None, True), (ema, True)):
        assert entered == []
        with eval_weights(average, wanted=wanted)():
            pass
    assert entered == ["average"]


@pytest.mark.parametrize(
    ("unpacked", "together"), [(None, True), (ToldCritic, False), (ToldActor, False)], ids=str
)
def test_forwards_are_planned_without_padding_if_all_models_are_packed(
    world, monkeypatch, unpacked, together
):
    """77 tokens are enough for all six rows without padding (63 tokens), but not with padding (6 x 13)."""
    monkeypatch.setattr(Told, "module", SimpleNamespace(packed=True))
    if unpacked:
        monkeypatch.setattr(unpacked, "module", SimpleNamespace(packed=False))
    sizes = ("memory.score_tokens=77", "memory.train_tokens=77", "algo.minibatch_size=6", "algo.epochs=1")
    found = outcome(world, *sizes)
    assert (set(found["scored"].tolist()) == {6}) == together
    assert (set(found["trained"].tolist()) == {6}) == together


def test_the_temperature_of_sampling_is_the_policys():
    config = composed("standard", "sampling.top_p=0.9", "sampling.top_k=6", "sampling.min_new_tokens=2")
    limit = config.sampling.max_new_tokens
    assert build_sampling(config, (2,), 0.7) == SamplingParams(limit, 2, 0.7, 0.9, 6, (2,), ())


@pytest.mark.parametrize("greedy", [True, False])
def test_evaluation_is_greedy_on_request(world, greedy):
    sampling, used = SamplingParams(5, 0, 0.7, 1.0, 0, (2,), ()), []
    config = composed("standard", f"eval.greedy={str(greedy).lower()}")
    stop = SimpleNamespace(raise_if_stopped=lambda: None)
    context = SimpleNamespace(world=world, stop=stop, budgets=fixed_budgets(world), run_dir=Path("run"))
    models = SimpleNamespace(
        reference=None,
        actor=SimpleNamespace(generation_mode=nullcontext),
        reward=None,
        eval_rewards={},
        reward_models=SimpleNamespace(sharded=False),
    )
    evaluator = build_evaluator(
        config,
        context,
        SimpleNamespace(held_out=OnePrompt(), tokenizer=None),
        models,
        lambda _, params: used.append(params),
        sampling,
    )
    evaluator.generate_all()
    assert used == [sampling.as_greedy() if greedy else sampling]


class OnePrompt:
    """Stands in for held-out data with one prompt."""

    def __len__(self):
        return 1

    def batch(self, indices):
        return list(indices)
