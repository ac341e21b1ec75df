"""Tests the loop with stand-ins: the order of actions, the end, and the contents of a checkpoint."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppo_ds.errors import UserError
from ppo_ds.ppo.health import KLMonitor
from ppo_ds.run.final_report import write_report
from ppo_ds.run.health import TooManySkips
from ppo_ds.run.stage import TRAIN_PROMPTS
from ppo_ds.run.state import EXIT_CODES, Selection, TrainState
from tests.ppo.trainer_cases import named, replace_learn, stand_ins

# fields of TrainState that checkpoints of earlier versions lack
NEW_IN_PROGRESS = ("best_step", "best_rule", "evals_without_improvement", "last_eval_step")


@pytest.fixture
def loop(world, tokenizer, monkeypatch):
    return stand_ins(world, tokenizer, monkeypatch)


def test_a_step_is_sample_then_learn_then_log(loop):
    run, events = loop()
    assert run.fit() == "done" and EXIT_CODES["done"] == 0
    assert events[:4] == ["prompts 1", ("make", "answers 1"), ("learn", 0.1, 7 * 1_000_003), ("log", 1)]
    assert named(events, "log") == [1, 2, 3] and run.stage.stateful["prompts"].n == 3
    # every step has another seed, and so another order of rows
    assert [event[2] for event in events if event[0] == "learn"] == [7 * 1_000_003 + i for i in range(3)]
    assert (run.state.step, run.state.episodes, run.state.tokens) == (3, 6, 9)


def test_the_coefficient_of_a_step_is_the_one_before_its_update(loop):
    run, events = loop(total_steps=2)
    run.fit()
    assert named(events, "learn") == pytest.approx([0.1, 0.12])


@pytest.mark.parametrize(
    ("stop", "plan", "reason", "steps"),
    [
        ((), {}, "done", 3),
        ((), dict(stop_at_step=2), "stop_at_step", 2),
        ((None, None, "signal"), {}, "signal", 1),
        ((None, None, None, "time_limit"), {}, "time_limit", 2),
        ((None, "time_limit", "signal"), {}, "signal", 1),
        (("signal",), {}, "signal", 0),
        ((None,) * 6 + ("signal",), {}, "signal", 3),
    ],
)
def test_reasons_to_end(loop, stop, plan, reason, steps):
    run, events = loop(stop, **plan)
    assert run.fit() == reason and run.state.step == steps
    # a checkpoint is always saved at the end, unless no step was made
    assert (("save", steps, False) in events) == (steps > 0)
    assert named(events, "finish") == [{"exit_reason": reason}]
    assert bool(named(events, "export")) == (reason != "signal")


def test_a_time_limit_ends_with_an_evaluation_that_does_not_count(loop):
    run, _ = loop((None, None, None, "time_limit"), scores=[0.25, 0.75], eval_every=3, keep_best=True)
    assert run.fit() == "time_limit"
    assert (run.state.last_eval_step, run.state.last_eval["eval/score_mean"]) == (2, 0.75)
    assert run.tracker.metrics[2]["eval/score_mean"] == 0.75 and run.state.best_step is None
    told = [(step, text) for step, kind, text in run.tracker.told if kind == "evaluated"]
    assert told == [(0, "before the training: accuracy 12.5%")]
    assert run.context.stop.reserved >= 0


AGAIN = "run/step_1   the same command continues (run.resume=auto)"


@pytest.mark.parametrize(
    ("how", "exported", "checkpoint"),
    [
        (dict(stop=(None, None, "signal")), False, AGAIN),
        (dict(kl_monitor=KLMonitor(1e-9, stops=True)), False, AGAIN),
        (dict(stop=(None, "time_limit")), True, AGAIN),
        (
            dict(stop_at_step=1),
            True,
            "run/step_1   the same command without run.stop_at_step continues (run.resume=auto)",
        ),
        (dict(stop=("signal",)), False, None),  # there is no checkpoint yet
        (dict(stop=(None, None, "signal"), checkpoint_every=0), False, None),
        (dict(total_steps=1), True, None),
    ],
)
def test_an_early_end_reports_how_to_resume(loop, monkeypatch, how, exported, checkpoint):
    run, _ = loop(**how)
    told = []
    run.saver.checkpoints.save = lambda step, *_, **__: Path(f"run/step_{step}")
    monkeypatch.setattr("ppo_ds.run.final_report.write_report", lambda *_, **said: told.append(said))
    run.fit()
    assert told == [{"exported": exported, "checkpoint": checkpoint, "best": {}, "lists_files": True}]


@pytest.mark.parametrize("exported", [True, False])
def test_an_aborted_run_shows_its_last_evaluation(tmp_path, capsys, exported):
    (tmp_path / "metrics.jsonl").touch()
    rows = [{"prompt": "p", "asked": "p", "response": "r", "score": 1.0}]
    state = TrainState(
        step=9,
        first_eval={"eval/accuracy": 0.5},
        last_eval={"eval/accuracy": 0.75},
        last_eval_step=6,
        first_rows=rows,
        last_rows=rows,
    )
    write_report(tmp_path, "a run", state, exported=exported, checkpoint="run/step_1   continues")
    shown = capsys.readouterr().out
    shown = " ".join(shown.split())
    assert "Held-out data (after: step 6; the model has 9 steps)" in shown and "Sample responses" in shown
    assert (f"model {tmp_path}" in shown) == exported
    assert "checkpoint run/step_1 continues" in shown
    write_report(tmp_path, "a dry run", state, exported=exported, checkpoint="c", lists_files=False)
    shown = capsys.readouterr().out
    assert "Held-out data" in shown and str(tmp_path) not in shown and "checkpoint" not in shown


def test_the_lock_is_marked_before_the_last_save_and_after_an_error(loop):
    run, events = loop()
    run.mark_ending = lambda: events.append("ending")
    run.fit()
    assert events.count("ending") == 1 and events.index("ending") < events.index(("save", 3, False))
    run.fail(RuntimeError("later"))
    assert events.count("ending") == 2


def test_the_events_of_a_run(loop):
    run, _ = loop(kl_monitor=KLMonitor(1e-9, stops=False), stop=(None,) * 4 + ("signal",))
    run.context.banner.note("decode     static", "warning    sampling.top_k=5: only a part")
    run.fit()
    run.fail(RuntimeError("later"))
    assert [(step, kind) for step, kind, _ in run.tracker.told] == [
        (0, "started"),
        (0, "warning"),
        (1, "warning"),
        (2, "ended"),
        (2, "ended"),
    ]
    texts = [text for _, _, text in run.tracker.told]
    assert texts[:2] == ["a run: 3 steps", "sampling.top_k=5: only a part"]
    assert texts[2].startswith("kl/k3_token_mean=")
    assert texts[3:] == ["signal", "error: RuntimeError: later"]


def test_an_alarm_is_logged_and_becomes_an_event(loop, caplog):
    run, _ = loop(total_steps=6)
    learn = run.stage.learn

    def clipped(*args, **kwargs):
        rows, metrics = learn(*args, **kwargs)
        return rows, metrics | {"policy/clipfrac": 0.75}

    replace_learn(run, clipped)
    run.fit()
    ((step, text),) = [(step, text) for step, kind, text in run.tracker.told if kind == "alarm"]
    assert step == 5 and "policy/clipfrac=0.75 (5 steps in a row)" in text
    assert [record.getMessage() for record in caplog.records] == [f"alarm: step 5: {text}"]


def test_a_resumed_run_counts_the_steps_of_an_alarm_from_its_record(loop, tmp_path):
    run, _ = loop()
    run.context = replace(run.context, run_dir=tmp_path)
    lines = [{"step": step, "policy/clipfrac": 0.75} for step in (1, 2, 3, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.track(run.tracker)
    run.raise_alarms({"policy/clipfrac": 0.75})
    assert [kind for _, kind, _ in run.tracker.told] == ["alarm"]


def test_evaluation_before_during_and_after_training(loop):
    run, events = loop(scores=[0.2, 0.4, 0.6], eval_every=2)
    run.fit()
    order = [event for event in events if event == "evaluate" or event[0] == "learn"]
    assert [event if event == "evaluate" else "learn" for event in order] == [
        "evaluate",
        "learn",
        "learn",
        "evaluate",
        "learn",
        "evaluate",
    ]
    (summary,) = named(events, "finish")
    assert summary == {
        "exit_reason": "done",
        "heldout_accuracy_before": 0.1,
        "heldout_accuracy_after": 0.3,
        "heldout_score_mean_before": 0.2,
        "heldout_score_mean_after": 0.6,
    }
    assert len(run.state.first_rows) == len(run.state.last_rows) == 8


def test_prompts_of_the_training_are_reported_as_such_and_select_nothing(loop):
    run, events = loop(scores=[0.2, 0.6], data=TRAIN_PROMPTS, keep_best=True, patience=1)
    assert run.fit() == "done" and run.state.best_score is None
    assert [event[2] for event in events if event[0] == "save"] == [False]
    assert not any(
        name.startswith(("eval/", "train_")) for line in run.tracker.metrics.values() for name in line
    )
    (summary,) = named(events, "finish")
    assert summary == {
        "exit_reason": "done",
        "train_prompts_accuracy_before": 0.1,
        "train_prompts_accuracy_after": 0.3,
        "train_prompts_score_mean_before": 0.2,
        "train_prompts_score_mean_after": 0.6,
    }


@pytest.mark.parametrize(
    ("scores", "steps"),
    [
        ([9.0, 0.5, 0.4, 0.3, 9.9], 3),  # the evaluation before the first step does not count
        ([9.0, 0.5, 0.4, 0.6, 0.6, 0.6], 5),  # an equal score is no improvement
        ([9.0, 0.5, float("nan"), 0.4, 9.9], 3),
        ([9.0, 0.5, 0.4, 0.6, 0.5, 0.7, 0.1], 6),
    ],
)
def test_two_evaluations_without_improvement_end_the_run(loop, scores, steps):
    run, events = loop(
        scores=scores, eval_every=1, keep_best=True, patience=2, checkpoint_every=0, total_steps=6
    )
    assert run.fit() == ("early_stop" if steps < 6 else "done") and run.state.step == steps
    best = max((score, -step) for step, score in enumerate(scores[1 : steps + 1], 1) if score == score)
    assert named(events, "save")[-1] == -best[1] and ("export", Path("run")) in events
    (summary,) = named(events, "finish")
    assert (summary["best_step"], summary["best_value"]) == (-best[1], best[0])
    assert EXIT_CODES[run.reason] == 0


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_run_that_is_stopped_and_resumed_ends_early_at_the_same_step(loop, stop):
    """Evaluations are due every two steps; the one of a stop at an odd step does not count."""
    options = {"eval_every": 2, "keep_best": True, "patience": 2, "total_steps": 12}
    due = {0: 0.0, 2: 0.5, 4: 0.4, 6: 0.3, 8: 0.2}
    run, _ = loop(scores=list(due.values()), **options)
    assert run.fit() == "early_stop" and run.state.step == 6
    before = [due[0], *(due[step] for step in due if 0 < step <= stop), *([0.1] if stop % 2 else [])]
    stopped, _ = loop(scores=before, stop_at_step=stop, **options)
    assert stopped.fit() == "stop_at_step"
    again = [due[step] for step in due if step > stop]
    resumed, events = loop(scores=again, **options)
    resumed.saver.checkpoints.load = lambda path, models, copies: stopped.saver.state_dict()
    resumed.saver.resume("somewhere")
    assert resumed.fit() == "early_stop" and resumed.state.step == 6
    # the next start ends at once, and continues with more patience
    for patience, reason in ((2, "early_stop"), (3, "early_stop"), (9, "done")):
        last, _ = loop(scores=[0.2, 0.1, 0.1], **options | {"patience": patience})
        last.saver.checkpoints.load = lambda path, models, copies: resumed.saver.state_dict()
        last.saver.resume("somewhere")
        assert (last.fit(), last.state.step) == (reason, {2: 6, 3: 8, 9: 12}[patience])


def test_an_early_stop_is_explained(loop, caplog):
    for first, best in (
        (0.1, "the best is 0.5 at step 2"),
        (0.6, "no eval/score_mean was better than the 0.6 before the training; the best is 0.5 at step 2"),
        (float("nan"), "the best is 0.5 at step 2"),
    ):
        caplog.clear()
        run, _ = loop(scores=[first, 0.4, 0.5, 0.3], eval_every=1, keep_best=True, patience=1, total_steps=9)
        run.fit()
        why = f"early_stop: no better eval/score_mean in 1 evaluation(s) in a row (eval.patience=1); {best}"
        assert [record.getMessage() for record in caplog.records] == [why]
        assert run.tracker.told[-1] == (3, "ended", why)


def test_another_metric_on_resume_forgets_the_best_checkpoint(loop):
    run, _ = loop(scores=[0.0, 0.9], eval_every=1, keep_best=True, stop_at_step=1)
    run.fit()
    assert (run.state.best_score, run.state.best_step) == (0.9, 1)
    state = run.saver.state_dict()
    for metric, best in (("eval/score_mean", 0.9), ("eval/accuracy", None)):
        resumed, _ = loop(scores=[])
        resumed.saver.selection = Selection(metric)
        resumed.saver.load_state_dict(state)
        assert resumed.state.best_score == best
    old = {**state, "progress": {k: v for k, v in state["progress"].items() if k not in NEW_IN_PROGRESS}}
    resumed.saver.selection = Selection("eval/score_mean")
    resumed.saver.load_state_dict(old)
    assert resumed.state.best_score == 0.9 and resumed.state.evals_without_improvement == 0


def test_the_lowest_value_can_be_the_best():
    assert Selection("eval/loss", lower_is_better=True).score({"eval/loss": 2.0}) == -2.0
    with pytest.raises(UserError, match="^checkpoint.best_by=eval/accuracy/x: .*use one of eval/loss$"):
        Selection("eval/accuracy/x").score({"eval/loss": 2.0})
    state = TrainState(best_score=-2.0, best_step=3)
    found = state.best_metrics(Selection("eval/loss", lower_is_better=True))
    assert found == {"best_step": 3, "best_by": "eval/loss", "best_value": 2.0}


def test_a_resumed_run_continues_from_the_checkpoint(loop):
    run, _ = loop(scores=[0.1, 0.2], stop_at_step=2)
    run.fit()
    state = run.saver.state_dict()
    resumed, events = loop(scores=[0.9])
    resumed.saver.checkpoints.load = lambda path, models, copies: state
    resumed.saver.resume("somewhere")
    assert resumed.stage.kl.value == run.stage.kl.value != 0.1
    assert resumed.fit() == "done" and named(events, "log") == [3] and "prompts 3" in events
    (summary,) = named(events, "finish")
    assert (summary["heldout_accuracy_before"], summary["heldout_accuracy_after"]) == (0.05, 0.45)
    assert resumed.state.episodes == 6


def test_a_run_resumed_at_its_end_does_nothing(loop):
    run, _ = loop(scores=[0.1, 0.2])
    run.fit()
    resumed, events = loop(scores=[])
    resumed.saver.checkpoints.load = lambda path, models, copies: run.saver.state_dict()
    resumed.saver.resume("somewhere")
    assert resumed.fit() == "done" and not named(events, "log") and not named(events, "save")
    assert named(events, "finish")[0]["heldout_accuracy_after"] == 0.1


def test_a_second_failure_after_a_rollback_ends_the_run(loop, monkeypatch):
    """The update of the third step always fails; the rollback loads the checkpoint of the second step."""
    run, events = loop(checkpoint_every=1)
    learn, checkpoints, said = run.stage.learn, run.saver.checkpoints, []

    def gives_up(rows, kl_coef, seed, critic_only):
        if run.state.step == 2:
            run.context.health.skips = 2
            raise TooManySkips(SimpleNamespace(what=("score",)))
        return learn(rows, kl_coef, seed, critic_only)

    def save(step, models, state, best, copies):
        checkpoints.saved.append(deepcopy(state))
        return Path(f"step_{step}")

    checkpoints.save = save
    replace_learn(run, gives_up)
    monkeypatch.setattr(
        "ppo_ds.ppo.trainer.dump_failure",
        lambda folder, step, *rest: said.append((folder.name, step)) or "told",
    )
    assert run.fit() == "nonfinite" and EXIT_CODES["nonfinite"] == 1
    assert [event for event in events if str(event).startswith("prompts")] == [
        f"prompts {n}" for n in (1, 2, 3, 3)
    ]
    assert named(events, "log") == [1, 2] and named(events, "rewind") == [2] and said == [("step_000003", 3)]
    assert len(checkpoints.saved) == 2 and run.state.rollbacks == 1 and not named(events, "export")
    assert "told" in named(events, "finish")[0]["error"]


def test_without_a_valid_checkpoint_there_is_no_rollback(loop, monkeypatch):
    run, events = loop()
    monkeypatch.setattr("ppo_ds.ppo.trainer.dump_failure", lambda *_: "told")

    def gives_up(rows, kl_coef, seed, critic_only):
        raise TooManySkips(SimpleNamespace(what=("score",)))

    def damaged(path, models, copies):
        raise UserError("it is damaged")

    replace_learn(run, gives_up)
    run.saver.checkpoints.load, run.saver.last_checkpoint = damaged, Path("step_7")
    assert run.fit() == "nonfinite"
    assert "the rollback failed: it is damaged" in named(events, "finish")[0]["error"]
    assert named(events, "log") == [] == named(events, "save")
