"""What an algorithm may add to the loop: a critic that starts earlier, copies that lag behind, averages, more states, more metrics."""

import pytest

from ppo_ds.errors import UserError
from tests.ppo.trainer_cases import Counter, named, stand_ins

FIRST_SEED = 7 * 1_000_003


@pytest.fixture
def loop(world, tokenizer):
    return stand_ins(world, tokenizer)


def learning(events):
    return [event[0] for event in events if isinstance(event, tuple) and event[0].startswith("learn")]


def test_the_critic_alone_learns_in_the_first_steps(loop):
    trainer, events = loop(critic_warmup=2)
    trainer.fit()
    assert learning(events) == ["learn critic", "learn critic", "learn"] and named(events, "log") == [1, 2, 3]


def test_a_resumed_run_is_as_far_in_its_warm_up_as_it_was(loop):
    trainer, _ = loop(critic_warmup=2, stop_at_step=1)
    trainer.fit()
    resumed, events = loop(critic_warmup=2)
    resumed.checkpoints.saved.append(trainer.state_dict())
    resumed.resume("somewhere")
    resumed.fit()
    assert learning(events) == ["learn critic", "learn"]


def test_the_critic_is_pretrained_before_the_first_step(loop):
    """On rollouts of its own, after the evaluation of the start; they count as no step, and the KL coefficient waits."""
    trainer, events = loop(critic_pretraining=2, critic_warmup=1, scores=[0.1, 0.2])
    trainer.fit()
    assert events.index("evaluate") < events.index("prompts 1")
    start = events.index("prompts 1")
    assert [event if isinstance(event, str) else event[:2] for event in events[start : start + 9]] == [
        "prompts 1", ("make for pretraining", "answers 1"), ("learn critic", 0.1),
        "prompts 2", ("make for pretraining", "answers 2"), ("learn critic", 0.1),
        "prompts 3", ("make", "answers 3"), ("learn critic", 0.1),
    ]  # fmt: skip
    assert learning(events) == ["learn critic"] * 3 + ["learn"] * 2
    assert (trainer.progress.step, trainer.progress.episodes) == (3, 6)
    seeds = [event[2] for event in events if isinstance(event, tuple) and event[0].startswith("learn")]
    assert len(set(seeds)) == 5 and seeds[2:] == [FIRST_SEED + i for i in range(3)]


def test_how_the_pretraining_ended_is_in_the_first_line_alone(loop):
    trainer, _ = loop(critic_pretraining=2)
    trainer.fit()
    first, second = trainer.tracker.metrics[1], trainer.tracker.metrics[2]
    assert (first["value/pretrain_loss"], first["value/pretrain_explained_var"]) == (
        2.0,
        0.5,
    )  # of the second rollout
    assert first["value/loss"] == 3.0 and not any("pretrain" in name for name in second)


def test_a_signal_ends_the_pretraining_too(loop):
    trainer, events = loop([None, "signal", "signal"], critic_pretraining=3)
    assert trainer.fit() == "signal"
    assert (
        learning(events) == ["learn critic"] and named(events, "log") == [] and named(events, "save") == []
    )  # it starts afresh


def test_a_resumed_run_has_a_critic_already(loop):
    trainer, _ = loop(critic_pretraining=2, stop_at_step=1)
    trainer.fit()
    resumed, events = loop(critic_pretraining=2)
    resumed.checkpoints.saved.append(trainer.state_dict())
    resumed.resume("somewhere")
    resumed.fit()
    assert (
        "prompts 4" in events
        and not named(events, "make for pretraining")
        and learning(events) == ["learn"] * 2
    )


@pytest.mark.parametrize(("lag", "steps"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4]), (3, [3]), (9, [])])
def test_a_lagging_policy_is_renewed_after_every_few_steps(loop, lag, steps):
    trainer, events = loop(lagged=True, lag=lag, total_steps=5)
    trainer.fit()
    order = [
        event
        for event in events
        if event == "copy to lagged" or (isinstance(event, tuple) and event[0] in ("learn", "log"))
    ]
    found = [order[i + 1][1] for i, event in enumerate(order) if event == "copy to lagged"]
    assert found == steps and all(
        order[i - 1][0] == "learn" for i, event in enumerate(order) if event == "copy to lagged"
    )


@pytest.mark.parametrize("ema", [True, False])
@pytest.mark.parametrize("lagged", [True, False])
def test_a_checkpoint_has_the_second_weights_too(loop, ema, lagged):
    names = ["ema"] * ema + ["lagged"] * lagged
    trainer, _ = loop(ema=ema, lagged=lagged)
    trainer.fit()
    resumed, _ = loop(ema=ema, lagged=lagged)
    resumed.checkpoints.saved.append(trainer.state_dict())
    resumed.resume("somewhere")
    for shadows in (*trainer.checkpoints.kept, *resumed.checkpoints.kept):
        assert {name: shadow.name for name, shadow in shadows.items()} == {name: name for name in names}
    assert len(trainer.checkpoints.kept) == len(resumed.checkpoints.kept) == 1


def test_every_part_with_a_state_is_saved_and_restored(loop):
    trainer, _ = loop(parts={"scores": Counter(5), "ptx": Counter(6)})
    trainer.fit()
    state = trainer.state_dict()
    assert {"progress", "kl", "prompts", "scores", "ptx"} == state.keys() and state["scores"] == {"n": 5}
    parts = {"scores": Counter(), "ptx": Counter()}
    resumed, _ = loop(parts=parts)
    resumed.checkpoints.saved.append(state)
    resumed.resume("somewhere")
    assert (parts["scores"].n, parts["ptx"].n) == (5, 6)
    assert (resumed.kl.value, resumed.prompts.n, resumed.progress.step) == (trainer.kl.value, 3, 3)


def test_evaluation_is_about_the_average(loop):
    trainer, events = loop(ema=True, scores=[0.1, 0.2, 0.3], eval_every=2)
    trainer.fit()
    around = [event for event in events if event in ("to the average", "evaluate", "back")]
    assert around == ["to the average", "evaluate", "back"] * 3
    for i, event in enumerate(events):
        assert event != "evaluate" or (events[i - 1], events[i + 1]) == (
            "to the average",
            "back",
        )  # nothing else in there


@pytest.mark.parametrize("asked", [True, False])
def test_the_kl_after_the_update(loop, asked):
    trainer, events = loop(kl_after_update=asked, total_steps=2)
    trainer.fit()
    assert events.count("kl now") == (2 if asked else 0)
    assert trainer.tracker.metrics[2].get("kl/after_update") == (0.25 if asked else None)
    if asked:
        assert events[events.index("kl now") - 1][0] == "learn"


def test_what_sampling_and_making_saw_is_logged(loop):
    trainer, _ = loop()
    trainer.fit()
    line = trainer.tracker.metrics[2]
    assert (line["rollout/rounds"], line["seen"], line["policy/loss"], line["kl/coef"]) == (
        1.0,
        line["kl/coef"],
        1.0,
        pytest.approx(0.12),
    )
    assert "kl/target" not in line


def test_the_target_is_shown_beside_the_kl(loop):
    trainer, _ = loop(kl_target=6.0)
    trainer.fit()
    assert trainer.tracker.metrics[3]["kl/target"] == 6.0


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_a_checkpoint_with_the_state_of_other_parts_is_refused(loop, change):
    trainer, _ = loop(total_steps=1)
    trainer.fit()
    resumed, _ = loop()
    state = trainer.state_dict() | ({"ptx": {"step": 3}} if change == "more" else {})
    if change == "fewer":
        del state["prompts"]
    resumed.checkpoints.load = lambda path, models, shadows: state
    with pytest.raises(UserError, match="run.resume: somewhere holds the state of .*keep algo.kl.controller"):
        resumed.resume("somewhere")
