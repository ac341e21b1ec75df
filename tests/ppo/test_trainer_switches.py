"""Tests what an algorithm may add to the loop.

Additions are pretraining of the critic, lagging copies, weight averages, further states and metrics.
"""

from types import SimpleNamespace

import pytest

from ppo_ds.errors import UserError
from tests.ppo.trainer_cases import Counter, named, stand_ins

FIRST_SEED = 7 * 1_000_003
WARMUP = ("algo.value.warmup_steps=2",)
PRETRAINING = ("algo.value.pretrain_rollouts=2",)


@pytest.fixture
def loop(world, tokenizer, monkeypatch):
    return stand_ins(world, tokenizer, monkeypatch)


def learning(events):
    return [event[0] for event in events if isinstance(event, tuple) and event[0].startswith("learn")]


def test_the_critic_alone_learns_in_the_first_steps(loop):
    run, events = loop(algo=WARMUP)
    run.fit()
    assert learning(events) == ["learn critic", "learn critic", "learn"] and named(events, "log") == [1, 2, 3]
    assert run.stage.make_experience.critic_only == [True, True, False]


def test_the_critic_is_pretrained_before_the_first_step(loop):
    """Pretraining uses its own rollouts, after the first evaluation.

    It does not count as a step, and the KL coefficient does not change.
    """
    run, events = loop(algo=(*PRETRAINING, "algo.value.warmup_steps=1"), scores=[0.1, 0.2])
    run.fit()
    assert events.index("evaluate") < events.index("prompts 1")
    start = events.index("prompts 1")
    assert [event if isinstance(event, str) else event[:2] for event in events[start : start + 9]] == [
        "prompts 1", ("make for pretraining", "answers 1"), ("learn critic", 0.1),
        "prompts 2", ("make for pretraining", "answers 2"), ("learn critic", 0.1),
        "prompts 3", ("make", "answers 3"), ("learn critic", 0.1),
    ]  # fmt: skip
    assert learning(events) == ["learn critic"] * 3 + ["learn"] * 2
    assert (run.state.step, run.state.episodes) == (3, 6)
    seeds = [event[2] for event in events if isinstance(event, tuple) and event[0].startswith("learn")]
    assert len(set(seeds)) == 5 and seeds[2:] == [FIRST_SEED + i for i in range(3)]


def test_pretraining_metrics_are_in_the_first_line_only(loop):
    run, _ = loop(algo=PRETRAINING)
    run.fit()
    first, second = run.tracker.metrics[1], run.tracker.metrics[2]
    # the metrics of the second pretraining rollout
    assert (first["value/pretrain_loss"], first["value/pretrain_explained_var"]) == (2.0, 0.5)
    assert first["value/loss"] == 3.0 and not any("pretrain" in name for name in second)


def test_a_signal_ends_the_pretraining_too(loop):
    run, events = loop([None, "signal", "signal"], algo=("algo.value.pretrain_rollouts=3",))
    assert run.fit() == "signal"
    # nothing is saved, so the next start pretrains from the beginning
    assert learning(events) == ["learn critic"] and named(events, "log") == [] and named(events, "save") == []


def test_a_resumed_run_does_not_pretrain_the_critic_again(loop):
    run, _ = loop(algo=PRETRAINING, stop_at_step=1)
    run.fit()
    resumed, events = loop(algo=PRETRAINING)
    resumed.saver.checkpoints.saved.append(run.saver.state_dict())
    resumed.saver.resume("somewhere")
    resumed.fit()
    assert (
        "prompts 4" in events
        and not named(events, "make for pretraining")
        and learning(events) == ["learn"] * 2
    )


# MiniMind's loop counts steps from 1 and copies at the end of a step if (step + 1) % lag == 0.
@pytest.mark.parametrize(
    ("lag", "steps"), [(1, [1, 2, 3, 4, 5, 6, 7]), (2, [1, 3, 5, 7]), (3, [2, 5]), (4, [3, 7]), (9, [])]
)
def test_a_lagging_policy_is_renewed_at_its_interval(loop, lag, steps):
    assert steps == [step for step in range(1, 8) if (step + 1) % lag == 0]
    run, events = loop(lagged=True, algo=("algo.old_policy=lagged", f"algo.lag={lag}"), total_steps=7)
    run.fit()
    order = [
        event
        for event in events
        if event == "copy to lagged" or (isinstance(event, tuple) and event[0] in ("learn", "log"))
    ]
    found = [order[i + 1][1] for i, event in enumerate(order) if event == "copy to lagged"]
    assert found == steps and all(
        order[i - 1][0] == "learn" for i, event in enumerate(order) if event == "copy to lagged"
    )


def test_every_part_with_a_state_is_saved_and_restored(loop):
    run, _ = loop(parts={"scores": Counter(5), "ptx": Counter(6)})
    run.fit()
    state = run.saver.state_dict()
    assert {"progress", "kl", "prompts", "scores", "ptx"} == state.keys() and state["scores"] == {"n": 5}
    parts = {"scores": Counter(), "ptx": Counter()}
    resumed, _ = loop(parts=parts)
    resumed.saver.checkpoints.saved.append(state)
    resumed.saver.resume("somewhere")
    assert (parts["scores"].n, parts["ptx"].n) == (5, 6)
    assert (resumed.stage.kl.value, resumed.state.step) == (run.stage.kl.value, 3)
    assert resumed.stage.stateful["prompts"].n == 3


def test_evaluation_uses_the_average(loop):
    run, events = loop(ema=True, scores=[0.1, 0.2, 0.3], eval_every=2)
    run.fit()
    around = [event for event in events if event in ("to the average", "evaluate", "back")]
    assert around == ["to the average", "evaluate", "back"] * 3
    for i, event in enumerate(events):
        # only the evaluation uses the average
        assert event != "evaluate" or (events[i - 1], events[i + 1]) == ("to the average", "back")


@pytest.mark.parametrize("unit", ["sequence", "token"])
def test_the_controller_gets_the_kl_of_its_unit(loop, unit):
    run, _ = loop(algo=(f"algo.kl.unit={unit}",), total_steps=1)
    given = []
    run.stage.kl = SimpleNamespace(value=0.1, update=lambda kl, n_steps: given.append((kl, n_steps)))
    run.fit()
    metrics = run.tracker.metrics[1]
    per_sequence, per_token = metrics["kl/ref_seq_mean"], metrics["kl/ref_token_mean"]
    assert per_sequence != per_token and given == [(per_sequence if unit == "sequence" else per_token, 2)]


@pytest.mark.parametrize("asked", [True, False])
def test_the_kl_after_the_update(loop, asked):
    run, events = loop(algo=(f"algo.kl.after_update={str(asked).lower()}",), total_steps=2)
    run.fit()
    assert events.count("kl now") == (2 if asked else 0)
    assert run.tracker.metrics[2].get("kl/after_update") == (0.25 if asked else None)
    if asked:
        assert events[events.index("kl now") - 1][0] == "learn"


def test_the_target_is_shown_beside_the_kl(loop):
    run, _ = loop(algo=("algo.kl.controller=adaptive", "algo.kl.target=6"))
    run.fit()
    assert run.tracker.metrics[3]["kl/target"] == 6.0
    fixed, _ = loop(algo=("algo.kl.controller=fixed",), total_steps=1)
    fixed.fit()
    assert "kl/target" not in fixed.tracker.metrics[1]


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_a_checkpoint_with_the_state_of_other_parts_is_refused(loop, change):
    run, _ = loop(total_steps=1)
    run.fit()
    resumed, _ = loop()
    state = run.saver.state_dict() | ({"ptx": {"step": 3}} if change == "more" else {})
    if change == "fewer":
        del state["prompts"]
    resumed.saver.checkpoints.load = lambda path, models, copies: state
    with pytest.raises(
        UserError, match="run.resume: somewhere holds the state .*stage=ppo: algo.kl.controller"
    ):
        resumed.saver.resume("somewhere")
