"""The loop on stand-ins: what is done when, when it ends, and what a checkpoint remembers."""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from ppo_ds.algo.evaluation import Evaluation
from ppo_ds.algo.timing import PhaseTimer
from ppo_ds.algo.trainer import EXIT_CODES, Plan, Trainer
from ppo_ds.ops.kl import AdaptiveKLController

PLAN = dict(
    total_steps=3, stop_at_step=None, eval_every=None, checkpoint_every=None, keep_best=False, samples_per_prompt=1, sample_rows=2, seed=7,
    kl_metric="kl/ref_seq_mean", kl_target=None,
)  # fmt: skip


class Stream:
    def __init__(self):
        self.n = 0

    def __next__(self):
        self.n += 1
        return f"prompts {self.n}"

    def state_dict(self):
        return {"step": self.n}

    def load_state_dict(self, state):
        self.n = state["step"]


class Notes:
    """Records every call of any method as (name, first argument)."""

    def __init__(self, events):
        self.events = events

    def __getattr__(self, name):
        return lambda *args, **kwargs: self.events.append((name, args[0] if args else None))


@pytest.fixture
def loop(world, experience, tokenizer):
    """A trainer of stand-ins, and the list of what it did. ``scores``: of each held-out evaluation, the one before the training first."""

    def make(stop=(), scores=None, **plan):
        events, saved, reasons, results = [], [], iter(stop), iter(scores or ())

        rows = experience([1, 2], [2, 1])
        rows = replace(rows, ref_logprobs=rows.logprobs - 0.5)  # a KL above 0

        @contextmanager
        def generation_mode():
            events.append("generation mode")
            yield
            events.append("training mode")

        def evaluate():
            events.append("evaluate")
            score = next(results)
            return Evaluation({"eval/score_mean": score, "eval/accuracy": score / 2}, [{"prompt": "x", "response": "y", "score": score}] * 20)

        def learn(rows, kl_coef, seed):
            events.append(("learn", kl_coef, seed))
            return {"policy/loss": 1.0}

        def save(step, models, state, best):
            events.append(("save", step, best))
            saved.append(state)

        trainer = Trainer(
            world=world,
            actor=SimpleNamespace(generation_mode=generation_mode),
            critic=None,
            prompts=Stream(),
            generator=lambda prompts, sampling: events.append(prompts),
            sampling=None,
            make_experience=lambda rollout, kl_coef: (rows, {"seen": kl_coef}),
            learn=learn,
            kl=AdaptiveKLController(0.1, target=1e-9, horizon=2),  # times 1.2 whenever the KL is above 0
            evaluator=evaluate if scores is not None else None,
            tokenizer=tokenizer,
            tracker=Notes(events),
            checkpoints=SimpleNamespace(save=save, load=lambda path, models: saved[-1]),
            stop=SimpleNamespace(agreed=lambda: next(reasons, None)),
            timer=PhaseTimer(torch.device("cpu")),
            plan=Plan(**PLAN | plan),
            folder=Notes(events),
        )
        return trainer, events

    return make


def named(events, name):
    return [event[1] for event in events if isinstance(event, tuple) and event[0] == name]


def test_a_step_is_generate_then_learn_then_log(loop):
    trainer, events = loop()
    assert trainer.fit() == "done" and EXIT_CODES["done"] == 0
    assert events[:5] == ["generation mode", "prompts 1", "training mode", ("learn", 0.1, 7 * 1_000_003), ("log", 1)]
    assert named(events, "log") == [1, 2, 3] and trainer.prompts.n == 3
    assert [event[2] for event in events if event[0] == "learn"] == [7 * 1_000_003 + i for i in range(3)]  # every step orders the rows anew
    assert (trainer.progress.step, trainer.progress.episodes, trainer.progress.tokens) == (3, 6, 9)


def test_the_coefficient_of_a_step_is_the_one_before_its_update(loop):
    trainer, events = loop(total_steps=2)
    trainer.fit()
    assert named(events, "learn") == pytest.approx([0.1, 0.12])


@pytest.mark.parametrize(
    ("stop", "plan", "reason", "steps"),
    [
        ((), {}, "done", 3),
        ((), dict(stop_at_step=2), "stop_at_step", 2),
        ((None, "signal"), {}, "signal", 1),
        ((None, None, "time_limit"), {}, "time_limit", 2),
        (("signal",), {}, "signal", 0),
        ((None, None, None, "signal"), {}, "signal", 3),
    ],
)
def test_why_it_ends(loop, stop, plan, reason, steps):
    trainer, events = loop(stop, **plan)
    assert trainer.fit() == reason and trainer.progress.step == steps
    assert ("save", steps, False) in events  # always at the end
    assert named(events, "finish") == [{"exit_reason": reason}]
    assert bool(named(events, "export")) == (reason != "signal")


@pytest.mark.parametrize(("every", "steps"), [(None, [3]), (0, []), (1, [1, 2, 3]), (2, [2, 3]), (3, [3])])
def test_checkpoints_are_saved_when_due_and_once(loop, every, steps):
    trainer, events = loop(checkpoint_every=every)
    trainer.fit()
    assert named(events, "save") == steps


def test_evaluation_before_on_the_way_and_after_the_last(loop):
    trainer, events = loop(scores=[0.2, 0.4, 0.6], eval_every=2)
    trainer.fit()
    order = [event for event in events if event == "evaluate" or event[0] == "learn"]
    assert [event if event == "evaluate" else "learn" for event in order] == ["evaluate", "learn", "learn", "evaluate", "learn", "evaluate"]
    (summary,) = named(events, "finish")
    assert summary == {
        "exit_reason": "done",
        "heldout_accuracy_before": 0.1,
        "heldout_accuracy_after": 0.3,
        "heldout_score_mean_before": 0.2,
        "heldout_score_mean_after": 0.6,
    }
    assert len(trainer.progress.first_rows) == len(trainer.progress.last_rows) == 8


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([9.0, 0.0, -1.0, 0.5], [1, 3]),  # 0 is a score like any other
        ([9.0, -3.0, -2.0, -2.0], [1, 2]),
        ([9.0, 1.0, float("nan"), 0.5], [1]),
        ([9.0, float("nan"), 0.1, 0.2], [2, 3]),
    ],
)
def test_the_best_is_what_scored_above_all_before(loop, scores, best):
    trainer, events = loop(scores=scores, eval_every=1, keep_best=True, checkpoint_every=0)
    trainer.fit()
    assert [event[1:] for event in events if event[0] == "save"] == [(step, True) for step in best]


def test_a_resumed_run_goes_on_where_the_checkpoint_was(loop):
    trainer, _ = loop(scores=[0.1, 0.2], stop_at_step=2)
    trainer.fit()
    state = trainer.state_dict()
    resumed, events = loop(scores=[0.9])
    resumed.checkpoints.load = lambda path, models: state
    resumed.resume("somewhere")
    assert resumed.kl.value == trainer.kl.value != 0.1
    assert resumed.fit() == "done" and named(events, "log") == [3] and "prompts 3" in events
    (summary,) = named(events, "finish")
    assert (summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]) == (0.05, 0.45)
    assert resumed.progress.episodes == 6


def test_a_run_resumed_at_its_end_does_nothing_more(loop):
    trainer, _ = loop(scores=[0.1, 0.2])
    trainer.fit()
    resumed, events = loop(scores=[])
    resumed.checkpoints.load = lambda path, models: trainer.state_dict()
    resumed.resume("somewhere")
    assert resumed.fit() == "done" and not named(events, "log") and not named(events, "save")
    assert named(events, "finish")[0]["heldout_accuracy_after"] == 0.1
