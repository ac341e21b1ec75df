"""Tests what the report reads from run directories, also from damaged and old ones, and its size."""

import json
import random

import pytest

from ppo_ds.errors import UserError
from ppo_ds.tracking.catalogue import METRICS
from ppo_ds.tracking.html.report import render_report, sections_of
from ppo_ds.tracking.html.result import common_results, how_it_ended, result_of
from ppo_ds.tracking.html.run_data import evenly, flattened, read_run, step_sizes, thinned
from tests.tracking.html.runs import lines, make_ppo_run, ppo_metrics, sample


def test_a_thinned_curve_keeps_its_ends_and_every_peak():
    chance = random.Random(0)
    values = [chance.random() for _ in range(50_000)]
    values[31_234], values[7] = 9.0, -9.0
    kept = thinned(values, 1000)
    assert len(kept) <= 1000 and list(kept) == sorted(set(kept))
    assert {0, 49_999, 31_234, 7} <= set(kept)
    assert min(values[:100]) == min(values[i] for i in kept if i < 100)
    assert list(thinned(values[:1000], 1000)) == list(range(1000))


def test_evenly_spaced_steps():
    assert evenly(3, 5) == [0, 1, 2]
    assert evenly(100, 5) == [0, 25, 50, 74, 99]
    assert all(len(set(evenly(count, 48))) == min(count, 48) for count in range(300))


def test_a_complete_run(tmp_path):
    run = read_run(make_ppo_run(tmp_path / "run"))
    assert (run["name"], run["stage"], run["plannedSteps"], run["lastStep"]) == ("demo", "ppo", 20, 20)
    # the evaluation before training is in the summary only
    assert run["series"]["eval/accuracy"] == {"steps": [0, 10, 20], "values": [0.2, 0.6, 0.8]}
    assert not {"step", "time", "episodes", "tokens"} & set(run["series"])
    assert run["settings"]["actor.optim.lr"] == 1e-6 and run["settings"]["data.mix"] == []
    rows = run["samples"]["rows"]
    assert [row["step"] for row in rows if row["split"] == "train"] == [
        s for s in (5, 10, 15, 20) for _ in range(4)
    ]
    assert len(run["samples"]["prompts"]) == 4  # each prompt once
    assert run["samples"]["prompts"][rows[0]["prompt"]] == "What is 2 + 3?"  # asked, not the whole prompt


@pytest.mark.parametrize("lost", ["summary.json", "config.yaml", "events.jsonl", "metrics.jsonl", "samples"])
def test_a_run_without_one_of_its_files_is_shown(tmp_path, lost):
    run_dir = make_ppo_run(tmp_path / "run")
    if lost == "samples":
        for file in (run_dir / "samples").iterdir():
            file.unlink()
    else:
        (run_dir / lost).unlink()
    run = read_run(run_dir)
    page = render_report([run])
    assert "</html>" in page and run["ending"]
    if lost == "summary.json":
        assert "or was killed; its last record is step 20 of 20" in run["ending"]
    if lost == "config.yaml":
        assert (run["name"], run["stage"]) == ("run", "ppo")


def test_a_killed_run_with_files_that_were_cut_off(tmp_path):
    run_dir = make_ppo_run(tmp_path / "run", summary=False)
    for name in ("metrics.jsonl", "events.jsonl", "samples/step_000020.jsonl"):
        data = (run_dir / name).read_bytes()
        (run_dir / name).write_bytes(data[:-20])
    (run_dir / "summary.json").write_text('{"exit_re')
    (run_dir / "config.yaml").write_text("run: {name: demo")
    (run_dir / "samples" / "step_000021.jsonl").write_bytes(b'\xff\xfe{"prompt": "\xf0\x9f')
    run = read_run(run_dir)
    assert run["lastStep"] == 19 and len(run["events"]) == 3 and run["settings"] == {}
    assert len([row for row in run["samples"]["rows"] if row["step"] == 20]) == 3
    render_report([run])


def test_the_evaluation_before_training_of_a_run_that_was_killed_is_in_its_newest_checkpoint(tmp_path):
    run_dir = make_ppo_run(tmp_path / "run", summary=False)
    for step, accuracy in ((10, 0.125), (20, 0.375)):
        state = {"state": {"progress": {"first_eval": {"eval/accuracy": accuracy, "eval/score_mean": None}}}}
        lines(run_dir / "checkpoints" / f"step_{step:06d}" / "state.json", [state])
    series = read_run(run_dir)["series"]
    assert series["eval/accuracy"]["values"][0] == 0.375 and series["eval/score_mean"]["steps"] == [10, 20]
    (run_dir / "checkpoints" / "step_000020" / "state.json").write_text('{"state": [')
    assert read_run(run_dir)["series"]["eval/accuracy"]["steps"] == [10, 20]


def test_alarms_of_repeated_steps_are_counted_once(tmp_path):
    run_dir = make_ppo_run(tmp_path / "run")
    kinds = [
        (3, "alarm"), (6, "alarm"), (8, "warning"), (9, "alarm"), (5, "resumed"), (6, "alarm"),
        (12, "alarm"), (14, "alarm"), (12, "rolled_back"), (14, "alarm"), (20, "ended"),
    ]  # fmt: skip
    events = [{"step": step, "time": 1.0, "kind": kind, "text": "t"} for step, kind in kinds]
    lines(run_dir / "events.jsonl", events)
    run = read_run(run_dir)
    assert [event["step"] for event in run["events"] if event["kind"] == "alarm"] == [3, 6, 12, 14]
    assert [event["kind"] for event in run["events"] if event["kind"] != "alarm"] == [
        "warning", "resumed", "rolled_back", "ended",
    ]  # fmt: skip


def make_run_without_held_out_prompts(run_dir):
    records = [{"step": i, "reward/score_mean": float(i), "kl/ref_seq_mean": -0.003} for i in range(1, 9)]
    lines(run_dir / "metrics.jsonl", records)
    summary = {"exit_reason": "done", "steps": 8, "wall_s": "x"}
    summary |= {"train_prompts_score_mean_before": 1.5, "train_prompts_score_mean_after": 2.5}
    (run_dir / "summary.json").write_text(json.dumps(summary))
    return run_dir


def test_a_run_without_held_out_prompts_reports_on_training_prompts(tmp_path):
    run = read_run(make_run_without_held_out_prompts(tmp_path / "run"))
    result = result_of(run, *common_results([run]))
    assert result["label"] == "score on some training prompts, evaluated after the run"  # no config.yaml
    assert [result[key] for key in ("before", "after", "change")] == ["1.500", "2.500", "+1.000"]
    label = result_of(run | {"settings": {"eval.train_prompts": 8}}, *common_results([run]))["label"]
    assert label == "score on 8 training prompts, evaluated after the run"


def test_runs_are_compared_by_a_metric_that_all_of_a_stage_have(tmp_path):
    first, second = (read_run(make_ppo_run(tmp_path / name)) for name in ("a", "b"))
    third = read_run(make_run_without_held_out_prompts(tmp_path / "c"))
    assert common_results([first, second]) == ["eval/accuracy"] * 2
    assert common_results([first, third]) == ["reward/score_mean"] * 2
    assert result_of(first, "reward/score_mean")["label"] == "mean score, last 5 steps"
    sft = third | {"stage": "sft", "series": {"sft/loss": {"steps": [1], "values": [2.0]}}}
    assert common_results([first, sft]) == ["eval/accuracy", "sft/loss"]
    assert common_results([first, third | {"series": {}, "trainPrompts": {}}]) == [None, None]


def test_absurd_numbers_are_left_out(tmp_path):
    """Numbers of 5,000 digits cannot be read, those of 400 digits are no float, and a step must be small."""
    parts = ["9" * 5000, "9" * 400, "1e999", "1e300", '"many"', "NaN", "true"]
    records = [f'{{"step": {i + 1}, "time": {part}, "a/b": {part}, "time/step": {part}, "time/eval": {part}}}'
               for i, part in enumerate(parts)]  # fmt: skip
    (tmp_path / "run").mkdir()
    text = "\n".join(['{"step": ' + "9" * 400 + "}", '{"step": 1, "a/b": 2}', *records])
    (tmp_path / "run" / "metrics.jsonl").write_text(text)
    lines(tmp_path / "run" / "samples" / "step_000001.jsonl", [{"score": 10**400}])
    (tmp_path / "run" / "summary.json").write_text('{"exit_reason": "done", "wall_s": 1e999}')
    run = read_run(tmp_path / "run")
    assert run["series"] == {"a/b": {"steps": [1], "values": [2.0]}} and run["seconds"] is None
    assert "</html>" in render_report([run])


def test_each_metric_is_in_one_section():
    names = ["policy/grad_norm", "policy/lr", "value/grad_norm", "value/lr", "value/loss"]
    shown = [
        (section["prefix"], name)
        for section in sections_of(names)
        for card in section["cards"]
        for name in card["metrics"]
    ]
    assert sorted(name for _, name in shown) == sorted(names)
    assert ("policy", "value/lr") in shown
    # without the metric that leads the panel, the learning rate of the critic has a card of its own
    assert [section["prefix"] for section in sections_of(["value/lr"])] == ["value"]


def test_a_page_is_bounded_in_size(tmp_path):
    run_dir = make_ppo_run(tmp_path / "run")
    lines(run_dir / "metrics.jsonl", [ppo_metrics(step, 5000) for step in range(1, 5001)])
    long = sample(1, 0, tokens=True) | {"response": "x" * 100_000, "asked": "y" * 100_000}
    for step in range(1, 61):
        lines(run_dir / "samples" / f"step_{step:06d}.jsonl", [long] * 4)
    run = read_run(run_dir)
    assert run["samples"]["shown"]["train"] == [48, 60]
    rows = [row for row in run["samples"]["rows"] if row["split"] == "train"]
    assert len({row["step"] for row in rows}) == 48 and rows[0]["step"] == 1 and rows[-1]["step"] == 60
    assert rows[0]["response"] == "x" * 20_000 + "… (80,000 more characters)"
    assert len(json.dumps(run["samples"])) < 2_000_000  # half for each split; without bounds it is 48 MB
    assert len(render_report([run]).encode()) < 4_000_000


@pytest.mark.parametrize("content", [None, {}, {"notes.txt": "hello"}])
def test_what_is_no_run_directory(tmp_path, content):
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    with pytest.raises(UserError, match="no such run directory|no run directory"):
        read_run(folder)


AT = "step 7 of 20"


@pytest.mark.parametrize(
    ("summary", "running", "sentence"),
    [
        ({"exit_reason": "signal"}, False, f"was stopped by a signal at {AT}, after 14 s."),
        ({"exit_reason": "stop_at_step"}, False, f"stopped at {AT} after 14 s, as run.stop_at_step asks."),
        ({"exit_reason": "error", "error": "a: b"}, False, f"ended with an error after {AT} and 14 s: a: b."),
        ({"exit_reason": "newer"}, False, f"ended with an error after {AT} and 14 s."),
        ({"exit_reason": "done"}, True, f"is in progress: {AT}, 14 s after its start."),
        ({}, False, f"still in progress or was killed; its last record is {AT}, 14 s after its start."),
    ],
)  # fmt: skip
def test_how_a_run_ended(tmp_path, summary, running, sentence):
    run_dir = make_ppo_run(tmp_path / "run", steps=7, events=False)
    (run_dir / "summary.json").write_text(json.dumps(summary))
    assert how_it_ended(read_run(run_dir), running).endswith(sentence)


def test_the_head_names_a_reward_that_fell_while_the_trained_one_rose(tmp_path):
    run_dir = make_ppo_run(tmp_path / "run", events=False)
    run = read_run(run_dir)
    problem = METRICS["eval/score_mean"].alarm.problem
    text = (
        f"{problem}: eval/score_mean from 0.4 to 0.6, eval/exact_mean from 0.475 to 0.2; raise algo.kl.coef"
    )
    curves = {"eval/score_mean": [0.4, 0.69], "eval/exact_mean": [0.475, 0.05]}
    run["series"] |= {name: {"steps": [0, 20], "values": values} for name, values in curves.items()}
    assert "exploits" not in how_it_ended(run, False)
    run["events"] = [{"step": 10, "time": 1.0, "kind": "alarm", "text": text}]
    end = "exploits the reward: while its held-out score rose, eval/exact_mean fell from 0.475 to 0.050."
    assert how_it_ended(run, False).endswith(end)
    run["series"]["eval/exact_mean"]["values"][-1] = 0.5  # it has recovered
    assert "exploits" not in how_it_ended(run, False)


def test_the_summary_of_an_earlier_process_is_not_the_end(tmp_path):
    """A run that stopped, was resumed and then killed has the summary of its first stop."""
    run_dir = make_ppo_run(tmp_path / "run")
    assert read_run(run_dir)["endedBy"] == "done"
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "time": 260.0, "kind": "resumed", "text": "again"}) + "\n")
    assert read_run(run_dir)["endedBy"] is None
    (run_dir / "events.jsonl").unlink()  # a run of an older version
    assert read_run(run_dir)["endedBy"] == "done"
    (run_dir / "summary.json").write_text('{"exit_reason": "stop_at_step", "steps": 10}')
    assert read_run(run_dir)["endedBy"] is None


@pytest.mark.parametrize(
    ("records", "stage", "label", "ends"),
    [
        ([{"sft/loss": 3.0}, {"sft/loss": 1.5}], "sft", "training loss, nats per token", ["3.000", "1.500"]),
        ([{"rm/accuracy": 0.5}], "reward_model", "training accuracy", ["50.0\u202f%", "50.0\u202f%"]),
        # means over 2 of 8 steps
        ([{"reward/score_mean": i} for i in range(8)], "ppo", "mean score, last 2 steps", ["0.500", "6.500"]),
    ],
)
def test_the_result_of_each_stage(tmp_path, records, stage, label, ends):
    lines(tmp_path / "run" / "metrics.jsonl", [{"step": i + 1, **record} for i, record in enumerate(records)])
    (tmp_path / "run" / "config.yaml").write_text(f"stage: {stage}\n")
    run = read_run(tmp_path / "run")
    result = result_of(run, *common_results([run]))
    assert (result["label"], [result["before"], result["after"]]) == (label, ends)


def test_the_number_of_responses_of_a_step_is_the_growth_of_the_episodes():
    records = [{"step": step, "episodes": count} for step, count in ((1, 8), (2, 20), (4, 40))]
    assert step_sizes([*records, {"step": 5}], {1, 2, 4, 5}) == {1: 8, 2: 12}


def test_nested_settings_are_flattened():
    assert flattened({"a": {"b": 1, "c": {}}, "d": [1]}) == {"a.b": 1, "a.c": {}, "d": [1]}
