"""Tests that a step abandoned before its update leaves no trace, and that an interrupted evaluation is
repeated.
"""

import random
from copy import deepcopy

import numpy as np
import pytest
import torch

from ppo_ds.run.stopping import Abandoned
from tests.ppo.trainer_cases import Counter, named, stand_ins


@pytest.fixture
def loop(world, tokenizer, monkeypatch):
    return stand_ins(world, tokenizer, monkeypatch)


class Moments(Counter):
    """A counter whose ``state_dict`` is the state itself, not a copy."""

    def state_dict(self):
        return vars(self)


def draws():
    return torch.rand(()).item(), np.random.rand(), random.random()


def leave_in(run, name, step):
    """Makes the method abandon the run from its ``step``-th call on.

    Before that, the call does its work and draws random numbers.
    """
    owner, calls = run.context.stop if name == "raise_if_stopped" else run.stage, []
    part = getattr(owner, name)

    def left(*args, **kwargs):
        found = part(*args, **kwargs)
        calls.append(1)
        draws()
        run.stage.stateful["counter"].n += 1  # like the update of a running moment
        if len(calls) >= step:
            raise Abandoned
        return found

    setattr(owner, name, left)


@pytest.mark.parametrize("name", ["collect", "make_experience", "raise_if_stopped"])
def test_an_abandoned_step_saves_the_state_before_it(loop, name):
    run, events = loop(checkpoint_every=2, parts={"counter": Moments()})
    leave_in(run, name, step=2)
    after_one, log = [], run.log
    # the last call of each step is run.log
    run.log = lambda *line: (
        log(*line),
        after_one.append((deepcopy(run.saver.state_dict()), draws_and_back())),
    )
    assert run.fit() == "signal"
    assert run.saver.state_dict() == after_one[0][0] and run.stage.stateful["prompts"].n == 1
    assert draws() == after_one[0][1]
    assert len(named(events, "learn")) == 1 and named(events, "log") == [1] and named(events, "save") == [1]
    assert named(events, "finish") == [{"exit_reason": "signal"}] and not named(events, "export")


def draws_and_back():
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    found = draws()
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])
    return found


def cut_short(loop, **plan):
    """Returns a run that was interrupted in the evaluation after step 2, and its actions."""
    run, events = loop(
        stop=(None, None, "signal"),
        scores=[0.1, 0.2],
        eval_every=2,
        total_steps=4,
        parts={"counter": Counter()},
        **plan,
    )
    leave_in(run, "evaluator", step=2)
    assert run.fit() == "signal"
    return run, events


def resumed(loop, run, **how):
    again, events = loop(eval_every=2, total_steps=4, parts={"counter": Counter()}, **how)
    again.saver.checkpoints.load = lambda path, models, copies: run.saver.checkpoints.saved[-1]
    again.saver.resume("somewhere")
    return again, events


def test_the_next_start_first_repeats_the_evaluation(loop):
    run, _ = cut_short(loop, keep_best=True)
    again, events = resumed(loop, run, scores=[0.7, 0.5], keep_best=True)
    assert again.fit() == "done"
    assert [
        event for event in events if event in ("evaluate", "prompts 3", ("log", 2), ("save", 2, True))
    ] == [
        "evaluate",
        ("log", 2),
        ("save", 2, True),  # saves the best checkpoint, and a checkpoint without a pending evaluation
        "prompts 3",
        "evaluate",
    ]
    line = again.tracker.metrics[2]
    assert line["eval/score_mean"] == 0.7 and line["policy/loss"] == 1.0 and line["episodes"] == 4
    assert again.saver.checkpoints.saved[0]["progress"]["unevaluated"] is None
    assert named(events, "log") == [2, 3, 4] and again.state.best_score == 0.7
