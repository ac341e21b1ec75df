"""Tests the comparison of the log-probs of generation with those of training in each PPO step."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.assemble.algorithm import parity_monitor
from ppo_ds.ppo.experience_metrics import describe
from ppo_ds.ppo.health import ParityMonitor
from ppo_ds.run.state import EXIT_CODES, RESUME_HINTS
from ppo_ds.run.stopping import Abandoned, StepRefused
from tests.ppo.algo_cases import Stub, answers, maker, rounded, without
from tests.ppo.learner_cases import (
    ANSWERS,
    PROMPTS,
    Engine,
    TinyCritic,
    TinyPolicy,
    V,
    learner,
    on_policy,
    shuffled,
)
from tests.ppo.preset_runs import composed
from tests.ppo.trainer_cases import named, replace_learn, stand_ins

MEAN = "parity/logp_abs_diff_mean"


# -- the monitor ---------------------------------------------------------------------------------------------


def test_a_warning_is_given_each_time_the_gap_rises_above_the_limit():
    monitor = ParityMonitor(0.5, stops=False)
    gaps = (0.1, 0.5, 0.6, 0.9, 0.2, 0.7, math.nan, math.inf, 0.6)
    warned = [monitor.warning({MEAN: gap}) is not None for gap in gaps]
    assert warned == [False, False, True, False, False, True, False, False, True]
    assert monitor.warning({"policy/loss": 9.0}) is None
    monitor.stop_if_exceeded(9.0)  # does not raise


@pytest.mark.parametrize(
    ("highest", "gap", "stops"),
    [(0.5, 0.6, True), (0.5, 0.5, False), (0.5, math.nan, False), (0.5, math.inf, False), (None, 9, False)],
)
def test_a_gap_above_the_limit_refuses_the_step(highest, gap, stops):
    """Non-finite gaps are left to the checks of non-finite numbers, which name their cause."""
    monitor = ParityMonitor(highest, stops=True)
    if not stops:
        monitor.stop_if_exceeded(gap)
        return
    with pytest.raises(StepRefused, match="health.max_parity=0.5") as raised:
        monitor.stop_if_exceeded(gap)
    assert raised.value.reason == "max_parity" and isinstance(raised.value, Abandoned)
    line = str(raised.value)
    assert f"{MEAN}=0.6" in line and "stale weights" in line and "rollout.backend" in line
    assert "\n" not in line


def test_an_engine_with_its_own_weights_suspects_the_sync():
    with pytest.raises(StepRefused, match="the sync did not send some names or vLLM ignored them") as raised:
        ParityMonitor(0.5, stops=True, own_weights=True).stop_if_exceeded(0.6)
    assert "use another" not in str(raised.value) and "rollout.backend=vllm" in str(raised.value)


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-3), ("fp16", 2e-2), ("bf16", 1e-1)])
def test_the_limit_is_by_default_that_of_the_start(dtype, bound):
    precision = f"actor.model.dtype={dtype}"
    assert parity_monitor(composed("standard", precision)) == ParityMonitor(bound, stops=True)
    assert parity_monitor(composed("standard", precision, "rollout.backend=vllm")).own_weights
    given = composed("standard", precision, "health.max_parity=0.25", "health.parity_action=warn")
    assert parity_monitor(given) == ParityMonitor(0.25, stops=False)
    assert parity_monitor(composed("standard", precision, "health.max_parity=null")).highest is None
    bypass = parity_monitor(composed("standard", precision, "algo.old_logprobs=rollout"))
    assert "set algo.old_logprobs=recompute and algo.rollout_is.kind and raise" in bypass.message(0.5)
    assert "recompute" not in parity_monitor(composed("standard", precision)).message(0.5)


# -- in a run ------------------------------------------------------------------------------------------------


@pytest.fixture
def loop(world, tokenizer, monkeypatch):
    return stand_ins(world, tokenizer, monkeypatch)


def drifting(run, step, gap=0.5):
    """Makes the log-probs of generation differ by ``gap`` nats from a step on."""
    make = run.stage.make_experience

    def made(rollout, scores, kl_coef, critic_only):
        rows, seen = make(rollout, scores, kl_coef, critic_only)
        drifted = int(rollout.split()[-1]) >= step  # "answers 2" is the rollout of step 2
        return (replace(rows, decode_logprobs=rows.logprobs - gap) if drifted else rows), seen

    run.stage.make_experience = made


def test_a_gap_above_the_limit_ends_the_run_before_the_update(loop, caplog):
    run, events = loop(parity_monitor=ParityMonitor(0.4, stops=True))
    drifting(run, 2)
    assert run.fit() == "max_parity" and EXIT_CODES["max_parity"] == 1
    # The second rollout was generated but not trained on, and the checkpoint is that of the first step.
    assert len(named(events, "learn")) == 1 and named(events, "log") == [1] and named(events, "save") == [1]
    (state,) = run.saver.checkpoints.saved
    assert state["progress"]["step"] == 1 and state["prompts"] == {"step": 1}
    ((_, kind, text),) = [event for event in run.tracker.told if event[1] == "ended"]
    assert text.startswith(f"max_parity: step 2: {MEAN}=0.5 nats per token is above health.max_parity=0.4: ")
    (summary,) = named(events, "finish")
    assert summary["exit_reason"] == "max_parity" and summary["error"].startswith("step 2: ")
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("error: step 2: ") and "stale weights" in line
    assert not named(events, "export") and "repeats the step" in RESUME_HINTS["max_parity"]


# -- in an update that computes the old log-probs itself -----------------------------------------------------


@pytest.mark.parametrize(("ranks", "budget"), [(1, 10_000), (2, 10_000), (2, 1)])
@pytest.mark.parametrize("highest", [0.24, 0.26])
def test_the_first_forward_of_an_update_is_checked(on_ranks, experience, ranks, budget, highest):
    """Half of the tokens are off by 0.5; with two ranks, both compare the mean over all ranks, 0.25."""
    rows, _ = on_policy(experience(PROMPTS, ANSWERS))
    tokens = torch.arange(int(rows.response_mask.sum()))
    decoded = rows.logprobs.clone()
    decoded[rows.response_mask] += 0.5 * (tokens % 2)
    rows = without(replace(rows, decode_logprobs=decoded), "logprobs", "old_logprobs")

    def work(world):
        actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
        settings = dict(minibatch_size=8, epochs=1, budget=budget)
        monitor = ParityMonitor(highest, stops=True)
        learn = learner(world, actor, critic, **settings, parity=monitor)
        error = None
        try:
            learn(rows, 0.0, 3)
        except StepRefused as refused:
            error = str(refused)
        engines = (actor, critic)
        return SimpleNamespace(
            error=error,
            steps=[engine.steps for engine in engines],
            skips=[engine.skipped for engine in engines],
            head=actor.module.head.detach(),
        )

    for seen in on_ranks(ranks, work):
        if highest > 0.25:
            assert seen.error is None and seen.steps == [1, 1] and seen.skips == [[], []]
        else:
            assert f"{MEAN}=0.25 nats" in seen.error and seen.steps == [0, 0]
            assert seen.skips == [[False], [False]]  # gradients dropped, the loss scale unchanged
            assert torch.equal(seen.head, TinyPolicy(V, 1).head)


# -- the decode backend's log-probs as old log-probs ---------------------------------------------------------


def around(rows, scale):
    """Returns rows whose old log-probs are those of the decode backend, and the gaps of the tokens.

    The gaps to the actor before the update are noise; column values outside the mask are arbitrary.
    """
    rows, _ = on_policy(rows)
    noise = scale * torch.randn(rows.logprobs.shape, generator=torch.Generator().manual_seed(6))
    decoded = torch.where(rows.response_mask, (rows.logprobs + noise).float(), rows.logprobs)
    return replace(rows, decode_logprobs=decoded, old_logprobs=decoded, logprobs=decoded), noise.abs()


@pytest.mark.parametrize("target_kl", [None, 1e9])
@pytest.mark.parametrize(("ranks", "budget"), [(1, 10_000), (2, 10_000), (2, 1)])
def test_an_update_measures_the_gap_of_its_first_minibatch(on_ranks, experience, ranks, budget, target_kl):
    """Later minibatches are not measured: the actor has changed. The weights are those without the check."""
    rows, gaps = around(experience(PROMPTS, ANSWERS), 0.3)
    first = shuffled(8, 2, 4, 3)[0]
    measured = gaps[first][rows.response_mask[first]]

    def work(world, decoded):
        actor, critic = Engine(TinyPolicy(V, 1), world), Engine(TinyCritic(1, 2), world)
        monitor = ParityMonitor(float(measured.mean()) + 1e-3, stops=True)
        settings = dict(budget=budget, target_kl=target_kl, parity=monitor)
        learn = learner(world, actor, critic, **settings, decoded_old_logprobs=decoded)
        after, seen = learn(rows, 0.0, 3)
        assert after is rows
        return seen, actor.module.head.detach()

    for seen, head in on_ranks(ranks, lambda world: work(world, True)):
        assert seen[MEAN] == pytest.approx(float(measured.mean()), abs=1e-6)
        assert seen["parity/logp_abs_diff_max"] == pytest.approx(float(measured.max()), abs=1e-6)
        assert seen["parity/ratio_first_minibatch_max"] > 1.1
        plain, expected = on_ranks(ranks, lambda world: work(world, False))[0]
        assert MEAN not in plain and torch.equal(head, expected)


def test_an_experience_takes_the_log_probs_of_the_decode_backend(world):
    """The decoded log-probs are 0.05 above -token / 10, and the reference is 0.2 below -token / 10.

    The KL in the reward, 0.5 * 0.25 per token, is that of the decode backend. The actor runs no forward.
    """
    actor = Stub()
    rollout = answers([2, 1], [1.0, 2.0], tokens=[[1, 2], [3]])
    decoded = torch.tensor([[-0.05, -0.15], [-0.25, 0.0]])
    rollout = replace(rollout, logprobs=decoded)
    made, _ = maker(world, actor=actor, old_logprobs="rollout")(rollout, 0.5)
    assert actor.forwards == 0
    for name in ("logprobs", "old_logprobs", "decode_logprobs"):
        assert torch.equal(getattr(made, name), decoded), name
    assert rounded(made.rewards) == [[-0.125, 0.875, 0], [1.875, 0, 0]]
    seen = describe(made, kl_coef=0.5, samples_per_prompt=1, decoded_logprobs=True)
    assert MEAN not in seen and seen["kl/ref_token_mean"] == pytest.approx(0.25)
    assert MEAN in describe(made, kl_coef=0.5, samples_per_prompt=1)


def test_the_trainer_leaves_decoded_log_probs_to_the_update(loop):
    """Compared with themselves, they have no gap; the metric is that of the update."""
    run, _ = loop(algo=("algo.old_logprobs=rollout",), parity_monitor=ParityMonitor(0.4, stops=False))
    drifting(run, 1)
    learn = run.stage.learn

    def learned(rows, *args, **kwargs):
        rows, seen = learn(rows, *args, **kwargs)
        return rows, seen | {MEAN: 0.45}

    replace_learn(run, learned)
    assert run.fit() == "done"
    assert [metrics[MEAN] for metrics in run.tracker.metrics.values()] == [0.45] * 3
    assert [step for step, kind, _ in run.tracker.told if kind == "warning"] == [1]
