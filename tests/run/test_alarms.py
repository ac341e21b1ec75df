"""Tests the alarms: each rule on a run that fails in its way, and all of them on runs that learn."""

import json
import math
import random
import re
from pathlib import Path

import pytest

from ppo_ds.config.reference import keys_of, sections_of
from ppo_ds.config.schema import Config
from ppo_ds.run.alarms import ALARMS, CONDITIONS, RULES, Alarms, Series, text
from ppo_ds.tracking.catalogue import METRICS

HEALTHY = {
    "reward/score_mean": 0.5,
    "reward/score_std": 0.5,
    "rollout/zero_std_group_frac": 0.2,
    "kl/ref_token_mean": 0.01,
    "policy/entropy": 1.0,
    "policy/clipfrac": 0.1,
    "policy/approx_kl": 0.02,
    "policy/ratio_mean": 1.0,
    "value/explained_var": 0.4,
    "rollout/truncated_frac": 0.1,
    "rollout/empty_frac": 0.0,
    "rollout/resp_len_mean": 100.0,
    "parity/logp_abs_diff_mean": 0.01,
    "health/skipped_steps": 0.0,
    "sft/loss": 1.0,
    "rm/accuracy": 0.7,
    "eval/accuracy": 0.7,
    "eval/loss": 1.0,
    "eval/score_mean": 0.5,
}
# metric -> the values of a run that fails; other metrics stay healthy
FAILURES = {
    "reward/score_std": [0.0] * 3,
    "rollout/zero_std_group_frac": [0.95, 1.0, 0.9],
    "reward/score_mean": [0.2, 0.0, -0.5, -1.0, -1.0, -1.0],
    "kl/ref_token_mean": [1.5, 2.0, 4.0],
    "policy/entropy": [0.04, 0.03, 0.02, 0.01, 0.01],
    "policy/clipfrac": [0.5] * 5,
    "policy/approx_kl": [2.0] * 3,
    "policy/ratio_mean": [3.0, 0.1, 1000.0],
    "value/explained_var": [-0.3] * 20,
    "rollout/truncated_frac": [0.6, 0.8, 1.0],
    "rollout/empty_frac": [0.9] * 3,
    "rollout/resp_len_mean": [210.0, 250.0, 300.0, 400.0, 500.0],
    "parity/logp_abs_diff_mean": [0.5] * 3,
    "health/skipped_steps": [1.0, 2.0, 4.0],
    "sft/loss": [1.6, 2.0, 3.0],
    "rm/accuracy": [0.3] * 20,
    "eval/accuracy": [0.3] * 3,
    "eval/loss": [1.1, 1.2],
    "eval/score_mean": [0.6],
}
# what else a failing run logs: before its failure, and then
OTHERS = {"eval/score_mean": ({"eval/exact_mean": 0.4, "eval/exact_std": 0.5}, {"eval/exact_mean": 0.1})}


def raised(records):
    """Returns (step, metric) of every alarm."""
    alarms = Alarms()
    found = [(step, alarms.check(record)) for step, record in enumerate(records, start=1)]
    return [(step, re.search(r": (\w+/\w+)[ =]", text)[1]) for step, texts in found for text in texts]


def failing(name):
    before, then = OTHERS.get(name, ({}, {}))
    return [HEALTHY | before] * 10 + [HEALTHY | then | {name: value} for value in FAILURES[name]]


def test_every_alarm_has_a_condition_and_a_failing_run():
    assert sorted(ALARMS) == sorted(FAILURES) and set(ALARMS) <= set(HEALTHY)
    kinds = {alarm.kind for alarm in ALARMS.values()}
    assert kinds == {*CONDITIONS, "rule"}
    assert {alarm.limit for alarm in ALARMS.values() if alarm.kind == "rule"} == set(RULES)


@pytest.mark.parametrize("name", FAILURES)
def test_each_failure_raises_its_alarm_at_its_last_step(name):
    assert raised(failing(name)) == [(10 + len(FAILURES[name]), name)]
    assert raised(failing(name)[:-1]) == []


@pytest.mark.parametrize("name", FAILURES)
def test_an_alarm_is_raised_once_per_episode(name):
    steps = ALARMS[name].steps
    bad, end = failing(name), [HEALTHY] * (steps - 1)
    still = [bad[-1]] * 30
    assert len(raised(bad + end + still)) == 1
    # the mean of the last scores must recover first
    recovered = [HEALTHY] * (steps + 5)
    assert [metric for _, metric in raised(bad + still + recovered + bad[10:] + still)] == [name, name]


@pytest.mark.parametrize("seed", range(5))
def test_noise_of_single_steps_raises_nothing(seed):
    """Bad values in every third step, in any metric."""
    draw = random.Random(seed)
    records = []
    for step in range(300):
        record = {name: value * draw.uniform(0.7, 1.3) for name, value in HEALTHY.items()}
        if step % 3 == 0:
            name = draw.choice([name for name in FAILURES if name not in ("reward/score_mean", "eval/loss")])
            record[name] = draw.choice(FAILURES[name])
        records.append(record | {"eval/loss": 1.0})
    assert raised(records) == []


@pytest.mark.parametrize("seed", range(5))
def test_means_of_few_responses_raise_nothing(seed):
    """Means of 4 responses with a standard deviation of 0.5 vary by 0.25."""
    draw = random.Random(seed)
    means = [draw.gauss(0.5, 0.25) for _ in range(1000)]
    windows = [sum(means[i : i + 5]) / 5 for i in range(996)]
    assert max(windows) - min(windows) > 0.5  # more than the spread of the scores
    assert raised([{"reward/score_mean": mean, "reward/score_std": 0.5} for mean in means]) == []


def test_a_fall_of_the_score_is_seen_in_the_noise_of_few_responses():
    draw = random.Random(0)
    levels = [1.5] * 50 + [0.0] * 10
    records = [{"reward/score_mean": draw.gauss(mean, 0.25), "reward/score_std": 0.5} for mean in levels]
    ((step, metric),) = raised(records)
    assert metric == "reward/score_mean" and 52 < step < 60


def test_the_alarm_of_a_fallen_score_names_both_means():
    alarms = Alarms()
    texts = [text for record in failing("reward/score_mean") for text in alarms.check(record)]
    # the last five scores are 0, -0.5 and three times -1
    assert len(texts) == 1 and ": reward/score_mean=-0.7 as the mean of 5 steps, 0.5 at best (" in texts[0]


def test_a_low_share_of_correct_answers_of_ppo_raises_nothing():
    records = [HEALTHY | {"eval/accuracy": 0.1} for _ in range(10)]
    assert [metric for _, metric in raised(records)] == ["eval/accuracy"]
    for record in records:
        del record["rm/accuracy"]
    assert raised(records) == []


def test_a_quickstart_that_was_measured_raises_nothing():
    """The run has three times the quickstart's learning rate, so that its KL and its ratios are large."""
    columns = json.loads((Path(__file__).parent / "quickstart_metrics.json").read_text())
    records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    assert len(records) == 100 and records[-1]["reward/score_mean"] > 0.8
    assert raised(records) == []


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "0.5", [1.0]])
def test_values_that_are_no_numbers_neither_raise_nor_end_an_alarm(value):
    broken = dict.fromkeys(HEALTHY, value)
    for name in FAILURES:
        records = failing(name)
        with_gaps = [record for pair in zip(records, [broken, {}] * 20, strict=False) for record in pair]
        assert [metric for _, metric in raised(with_gaps)] == [name]
    assert raised([broken] * 50) == []


def test_a_resumed_run_raises_the_same_alarms():
    records = [record for name in FAILURES for record in failing(name)]
    texts = [Alarms.after(records[:step]).check(record) for step, record in enumerate(records)]
    alarms = Alarms()
    assert texts == [alarms.check(record) for record in records]
    assert sum(map(len, texts)) >= len(FAILURES)


def test_texts_are_one_line_with_the_metric_the_value_and_a_key():
    past = {name: Series() for name in ALARMS}
    for series in past.values():
        for _ in range(5):
            series.add(0.123456)
    for name in ALARMS:
        line = text(name, past)
        state = rf": {name}(=0\.1235( as the mean of 5 steps, 0\.1235 at best)? \(| from 0\.1235 to 0\.1235;)"
        assert re.search(state, line) and "\n" not in line


def test_a_reward_that_falls_while_the_trained_one_rises():
    first = {"eval/score_mean": 0.41, "eval/exact_mean": 0.475, "eval/exact_std": 0.5}
    step = {"reward/score_mean": 0.5}
    fell, both_fell = {"eval/score_mean": 0.69, "eval/exact_mean": 0.05}, {"eval/exact_mean": 0.05}
    (line,) = Alarms.after([first, step]).check(step | fell)
    assert (
        ": eval/score_mean from 0.41 to 0.69, eval/exact_mean from 0.475 to 0.05; raise algo.kl.coef" in line
    )
    assert Alarms.after([first, step]).check(step | both_fell | {"eval/score_mean": 0.4}) == []
    # less than half of the first spread
    assert Alarms.after([first, step]).check(step | fell | {"eval/exact_mean": 0.23}) == []
    assert Alarms.after([first]).check(fell) == []  # the evaluation of a reward model


def test_the_keys_that_alarms_and_the_catalogue_name_exist():
    sections = dict(sections_of(Config))
    keys = {key.name for name, section in [("", Config), *sections.items()] for key in keys_of(section, name)}
    known = keys | set(sections)
    for metric, alarm in ALARMS.items():
        named = re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+", alarm.advice)
        assert named and [name for name in named if name not in known] == [], metric
    for metric in METRICS.values():
        code = re.findall(r"`([^`]+)`", metric.meaning + metric.remedy + metric.reason)
        named = [name.partition("=")[0] for name in code if "." in name and "/" not in name]
        assert [name for name in named if name not in known] == [], metric.name
