"""Tests which steps of a run get a checkpoint, with a stand-in that only records the steps."""

import json
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppo_ds.config.sections.run import CheckpointConfig
from ppo_ds.data.fingerprint import Fingerprint
from ppo_ds.errors import UserError
from ppo_ds.run.health import Health
from ppo_ds.run.saver import Saver
from ppo_ds.run.state import Selection, TrainState
from ppo_ds.tracking.banner import Banner

RUN = 6  # number of steps
SELECTION = Selection("eval/score_mean")


class Notes:
    """Stands in for the checkpoints of a run and records their steps."""

    def __init__(self):
        self.steps, self.best = [], []

    def save(self, step, models, state, *, best, copies):
        self.steps.append(step)
        self.best += [step] if best else []
        return Path(f"step_{step}")


def saved(skips=(), scores=(), seconds=1.0, **settings):
    """Runs six steps; ``skips`` are steps whose optimizer step is skipped, ``scores`` are (step, score)."""
    health, notes = Health(max_skips=100), Notes()
    stage = SimpleNamespace(models={}, weight_copies={}, data=[], state_dict=dict)
    context = SimpleNamespace(health=health, timer=lambda phase: nullcontext())
    config = CheckpointConfig(**{"every": 0, "minutes": None, "keep_best": False} | settings)
    saver = Saver(context=context, stage=stage, checkpoints=notes, config=config, selection=SELECTION)
    for step in range(1, RUN + 1):
        health.skips = 1 if step in skips else 0
        saver.state = TrainState(step=step, best_score=saver.state.best_score)
        saver.save_if_due(dict(scores).get(step), step * seconds)
    saver.save_if_due(None, RUN * seconds, last=True)
    return notes


def test_every_second_step_and_the_last():
    assert saved(every=2).steps == [2, 4, 6]
    assert saved(every=4).steps == [4, 6]
    assert saved().steps == []


def test_no_checkpoint_while_steps_are_skipped_but_the_last():
    """No checkpoint is saved while steps are being skipped, since a rollback needs a healthy state."""
    assert saved(skips=[2, 3, 4], every=1).steps == [1, 5, 6]
    assert saved(skips=[2], scores=[(1, 0.1), (2, 0.9)], keep_best=True).steps == [1]
    assert saved(skips=[5, 6], every=6).steps == [6]


@pytest.mark.parametrize(("seconds", "steps"), [(29.0, [3, 6]), (61.0, [1, 2, 3, 4, 5, 6])])
def test_minutes_count_from_the_last_checkpoint(seconds, steps):
    assert saved(seconds=seconds, every=100, minutes=1).steps == steps


def test_each_better_evaluation():
    scores = [(1, 0.3), (2, 0.2), (3, 0.4), (5, 0.4)]
    found = saved(scores=scores, keep_best=True)
    assert found.steps == found.best == [1, 3]
    found = saved(scores=scores, keep_best=True, every=3)
    assert found.steps == [1, 3, 6] and found.best == [1, 3]


class OneCheckpoint:
    """Stands in for checkpoints that are read, and records the state that was saved last."""

    def save(self, step, models, state, *, best, copies):
        self.state = json.loads(json.dumps(state))
        return Path(f"step_{step}")

    def load(self, path, models, copies):
        return self.state


def resumed(checkpoints, data):
    """Returns a saver of a stage that has read ``data``, after a resume, and the lines of its banner."""
    banner = Banner()
    stage = SimpleNamespace(
        models={}, weight_copies={}, data=data, state_dict=dict, load_state_dict=lambda state: None
    )
    context = SimpleNamespace(health=Health(max_skips=3), timer=lambda phase: nullcontext(), banner=banner)
    config = CheckpointConfig(every=1, minutes=None, keep_best=False)
    saver = Saver(context=context, stage=stage, checkpoints=checkpoints, config=config, selection=SELECTION)
    if hasattr(checkpoints, "state"):
        saver.resume(Path("step_1"))
    return saver, banner.render().splitlines()


TRAIN = Fingerprint("data.path", "prompts.jsonl", 100, "one")


def test_a_resume_warns_if_the_rows_have_changed():
    checkpoints = OneCheckpoint()
    held_out = Fingerprint("data.eval_path", "eval.jsonl", 8, "held")
    saver, _ = resumed(checkpoints, [TRAIN, held_out])
    saver.state = TrainState(step=1)
    saver.save_if_due(None, 0.0)

    assert resumed(checkpoints, [replace(TRAIN, path="moved.jsonl"), held_out])[1] == []
    longer, other = replace(TRAIN, rows=120, digest="two"), replace(held_out, digest="new")
    effect = (
        "scores before and after cannot be compared, and with another number of rows the current pass "
        "repeats some and leaves out others"
    )
    assert resumed(checkpoints, [longer, other])[1] == [
        f"warning    {key}: its rows have changed since step_1 ({then} rows then, {now} now); {effect}"
        for key, then, now in (("data.path=prompts.jsonl", 100, 120), ("data.eval_path=eval.jsonl", 8, 8))
    ]


@pytest.mark.parametrize(
    "state", [{}, {"progress": 3}, {"progress": {"steps": 1, "skips": 0}}, {"progress": {"step": 1}}]
)
def test_a_resume_from_a_progress_that_no_run_has_written_is_one_line(state):
    checkpoints = OneCheckpoint()
    checkpoints.state = state
    with pytest.raises(UserError, match=r"^run.resume: step_1: invalid state.json: .*; use another$"):
        resumed(checkpoints, [])


def test_a_checkpoint_of_an_earlier_version_has_no_fingerprints():
    checkpoints = OneCheckpoint()
    checkpoints.state = {"progress": asdict(TrainState(step=4)) | {"skips": 0}}
    saver, lines = resumed(checkpoints, [TRAIN])
    assert saver.state.step == 4 and lines == []
