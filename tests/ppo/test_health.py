"""Tests the handling of non-finite numbers.

They are located and counted, and the optimizer step is skipped on all ranks and for both models.
"""

import math
from dataclasses import replace

import pytest
import torch

from ppo_ds.algorithm.kl.controllers import AdaptiveKLController, ThresholdKLController
from ppo_ds.ops.moments import RunningMoments
from ppo_ds.ppo.failure_dump import locate_nonfinite
from ppo_ds.ppo.health import LABELS, KLMonitor, first_nonfinite
from ppo_ds.ppo.learner import Learner
from ppo_ds.run import failure_dump
from ppo_ds.run.health import Health, SkippedStep, TooManySkips
from ppo_ds.run.metrics import MetricSums
from ppo_ds.run.nan_debug import ReplayedRow
from tests.faults.injection import injected
from tests.ppo.algo_cases import NAN, answers, shaper
from tests.ppo.learner_cases import (
    ANSWERS,
    PROMPTS,
    Engine,
    TinyCritic,
    TinyPolicy,
    V,
    by_hand,
    learned,
    learner,
    old_around,
    same,
)

INF = math.inf
LOSSES = {name: getattr(Learner, name) for name in ("policy_loss", "value_loss")}


@pytest.fixture
def rows(experience):
    return old_around(experience(PROMPTS, ANSWERS))


@pytest.fixture
def inject(monkeypatch):
    """Returns a function that makes losses or gradients NaN; a second call undoes the first."""

    def inject(spec):
        for name, method in LOSSES.items():
            monkeypatch.setattr(Learner, name, method)
        monkeypatch.setattr(*injected(spec))

    return inject


# -- in an experience ----------------------------------------------------------------------------------------


def spoiled(rows, number, places, *names):
    """Returns the same rows with ``number`` at one place of these columns."""
    columns = {}
    for name in names:
        columns[name] = getattr(rows, name).clone()
        columns[name][places[:1] if name == "scores" else places] = number
    return replace(rows, **columns)


@pytest.mark.parametrize("number", [NAN, INF, -INF])
@pytest.mark.parametrize("name", LABELS)
def test_each_column_is_checked_under_its_mask(rows, name, number):
    assert first_nonfinite(rows) is None
    # row 6 is a response of five tokens
    assert first_nonfinite(spoiled(rows, number, (6, 1), name)) == (LABELS[name].format(1), 6)
    if name != "scores":
        # row 2 is a response of one token: later positions are not checked
        assert first_nonfinite(spoiled(rows, number, (2, 3), name)) is None


# -- in a rollout --------------------------------------------------------------------------------------------


def test_a_nonfinite_rollout_is_skipped(world, rows):
    bad = spoiled(rows, NAN, (4, 0), "scores")
    seen, actor, critic = learned(world, bad, minibatch_size=2)
    same((actor, critic), (TinyPolicy(V, 1), TinyCritic(1, 2)))
    assert actor.read == critic.read == [] and actor.steps == critic.steps == 0
    assert seen["health/skipped_steps"] == 8.0 and seen["policy/epochs_run"] == 0.0
    assert all(
        math.isnan(seen[name])
        for name in ("policy/loss", "value/loss", "policy/grad_norm", "value/grad_norm")
    )


def test_a_nonfinite_rollout_counts_as_one_skip(on_ranks, rows):
    """Eight rows are on four ranks, two consecutive rows on each."""

    def work(world):
        health = Health(2)
        learn = learner(
            world,
            Engine(TinyPolicy(V, 1), world),
            Engine(TinyCritic(1, 2), world),
            minibatch_size=2,
            health=health,
        )
        bad = spoiled(rows, NAN, (6, 1), "old_logprobs")
        learn(bad, 0.0, 3)
        assert health.skips == 1
        with pytest.raises(TooManySkips, match="log-prob of token 1 under the old policy") as raised:
            learn(bad, 0.0, 3)
        skipped = raised.value.last_skip
        assert skipped.row == 6 and len(skipped.minibatch) == 2
        return skipped.rank

    assert on_ranks(4, work) == [3] * 4


def test_running_states_are_not_affected(world):
    """NaN and inf change neither the moments of the scores nor KL controllers; metrics with them are NaN."""
    moments, shape = RunningMoments(), shaper(world, normalize="running")
    moments.update(torch.tensor([1.0, 3.0]))
    before = moments.state_dict()
    for number in (NAN, INF):
        moments.update(torch.tensor([2.0, number]))
        assert moments.state_dict() == before
    shape(answers([1, 1], [1.0, 3.0]))
    shape(answers([1, 1], [NAN, 7.0]))
    assert (shape.moments.count, shape.moments.mean) == (2, 2.0)
    for controller in (AdaptiveKLController(0.1, target=1.0, horizon=2), ThresholdKLController(0.1)):
        for number in (NAN, INF):
            controller.update(number, 8)
        assert controller.value == 0.1
    sums = MetricSums()
    sums.add_mean_and_std("x", torch.tensor([1.0, NAN]))
    sums.add_parts({"explained": torch.tensor([2.0, NAN, 1.0, 1.0, 1.0])})
    assert all(math.isnan(value) for value in sums.reduced(world).values())


# -- in an optimizer step ------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["loss.actor", "grad.actor", "loss.critic", "grad.critic"])
def test_actor_and_critic_skip_together(world, rows, inject, place):
    """With one micro-batch each, the third optimizer step of four has no effect."""
    inject(f"{place}:at=3")
    followed, health = [], Health(2)
    average = lambda: followed.append(None)  # noqa: E731
    seen, actor, critic = learned(world, rows, average=average, health=health)
    same((actor, critic), by_hand(rows, left_out=2))
    # the fourth step was finite, which resets the count of skips
    assert (actor.steps, critic.steps, len(followed)) == (3, 3, 3) and health.skips == 0
    assert (
        seen["health/skipped_steps"] == 1.0
        and math.isnan(seen["policy/grad_norm"])
        and math.isnan(seen["value/grad_norm"])
    )
    own, other = (actor, critic) if "actor" in place else (critic, actor)
    # an overflow lowers the loss scale of its own model only
    assert own.skipped == [True] and other.skipped == [False]
    what, role = place.split(".")
    name = {"loss": "loss", "grad": "gradient"}[what]
    assert f"{name} of the {role}" in health.take_reasons() and health.take_reasons() == []


def test_too_many_consecutive_skips_end_the_update(world, rows, inject):
    inject("loss.critic:at=2:times=2")
    health = Health(2)
    with pytest.raises(TooManySkips, match="loss of the critic") as raised:
        learned(world, rows, health=health)
    assert len(raised.value.last_skip.minibatch) == 4 and raised.value.last_skip.row is None


@pytest.mark.parametrize(
    ("skipped_in", "began"),
    [((4, 4, 6), "; the first of these was in step 4"), ((6, 6, 6), ""), ((None, None, 6), "")],
)
def test_the_error_names_the_step_in_which_skipping_began(skipped_in, began):
    """Skips in the step None are those of an earlier start."""
    health, skip = Health(3, skips=skipped_in.count(None)), SkippedStep(("loss of the actor",))
    health.record_skip(skip, counted=False)  # does not change the count
    *earlier, last = [step for step in skipped_in if step]
    for step in earlier:
        health.set_step(step)
        health.record_skip(skip)
    health.set_step(last)
    with pytest.raises(TooManySkips):
        health.record_skip(skip)
    assert health.limit_reached(6) == (
        f"no optimizer step was made 3 times in a row (health.max_skips){began}"
    )


def test_overflows_are_not_counted_while_the_loss_scale_adapts(world, rows, inject):
    """Overflows of gradients are expected because fp16 starts with a high loss scale; a NaN loss is not."""
    for place, counted in (("grad.actor", 0), ("loss.actor", 1)):
        inject(f"{place}:at=4")
        actor, critic, health = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world), Health(9)
        actor.loss_scale_can_decrease = True
        seen = learner(world, actor, critic, health=health)(rows, 0.0, 3)[1]
        assert seen["health/skipped_steps"] == 1.0 and health.skips == counted


# -- locating the cause --------------------------------------------------------------------------------------


def test_the_row_and_the_first_tensor_are_found(on_ranks, rows):
    """The embedding of one token is NaN; the critic is finite.

    The reported loss of a row is its contribution to the mean over all tokens.
    """
    row = 6
    token = int(rows.ids[row, rows.prompt_width + 2])
    places = (rows.ids == token) & rows.attention_mask
    met = places.any(dim=1).tolist()

    def work(world):
        actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
        with torch.no_grad():
            actor.module.embed[token] = NAN
        learn = learner(world, actor, critic, value=dict(clip=None))
        return locate_nonfinite(learn, rows, 0.0, False), actor.steps, critic.skipped

    for found, steps, skipped in on_ranks(2, work):
        assert [one.position for one in found] == list(range(8)) and steps == 0 and skipped == [False]
        assert [one.first is not None for one in found] == met and not all(met)
        assert found[row].first == "output of actor" and math.isnan(found[row].losses["actor"])
        assert {one.rank for one in found} == {0, 1}
        values = TinyCritic(1, 2)(rows.ids, rows.attention_mask, rows.response_width).detach()
        errors = (values - rows.returns)[rows.value_mask].double()
        assert sum(one.losses["critic"] for one in found) == pytest.approx(
            float(errors.square().mean() / 2), rel=1e-5
        )


def test_a_failure_that_is_not_reproduced_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(failure_dump, "write_dump", lambda *_: None)
    given = dict(rows=[{"prompt": "p"}], place="row", columns={}, models={}, config=tmp_path)
    line = failure_dump.dump_failure(tmp_path, 3, ("gradient of the critic",), [ReplayedRow(0, 0)], **given)
    assert line.startswith("step 3: not finite: gradient of the critic (finite when the step was replayed")


# -- the limit of the KL -------------------------------------------------------------------------------------


def test_the_kl_monitor_reports_the_first_excess():
    ceiling = KLMonitor(0.5, stops=False)
    said = [
        ceiling.warning({"kl/k3_token_mean": kl}) is not None for kl in (0.1, 0.5, 0.6, 0.9, 0.2, 0.7, NAN)
    ]
    assert said == [False, False, True, False, False, True, False]
    assert KLMonitor(0.5, stops=True).warning({"policy/loss": 9.0}) is None
    assert KLMonitor(None, stops=True).warning({"kl/k3_token_mean": 9.0}) is None
    line = KLMonitor(0.5, stops=True).warning({"kl/k3_token_mean": 0.625})
    assert "kl/k3_token_mean=0.625" in line and "health.max_kl=0.5" in line and "\n" not in line
