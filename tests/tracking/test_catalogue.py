"""Tests the catalogue of metrics: lookups, panels and ranges."""

import pytest

from ppo_ds.tracking.catalogue import (
    METRICS,
    PANELS,
    SECTIONS,
    find,
    matches,
    outside,
    panel_metrics,
    plain,
)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("policy/loss", "policy/loss"),
        ("reward/component/format_mean", "reward/component/<name>_mean"),
        ("reward/component/rules/length_raw_mean", "reward/component/<name>_mean"),
        ("eval/score_mean", "eval/score_mean"),
        ("eval/helpful_mean", "eval/<name>_mean"),
        ("eval/margin_p90", "eval/margin_p<percent>"),
        ("eval/accuracy/chat", "eval/accuracy/<subset>"),
        ("policy/lossy", None),
        ("reward/component/_mean", None),
    ],
)
def test_a_metric_is_found_by_its_name_or_its_family(name, found):
    assert getattr(find(name), "name", None) == found


def test_names_and_sections_agree():
    for section in SECTIONS:
        for metric in section.metrics:
            assert metric.name.rpartition("/")[0].partition("/")[0] == section.prefix, metric.name
            assert metric.label and metric.meaning.endswith("."), metric.name
            assert metric.remedy == "" or metric.remedy.endswith("."), metric.name
            if metric.healthy is not None:
                low, high = metric.healthy
                assert low is None or high is None or low <= high
                assert metric.reason and metric.remedy, (
                    f"{metric.name} has a range without a reason or remedy"
                )
    assert len(METRICS) == sum(len(section.metrics) for section in SECTIONS)


def test_panels_show_metrics_of_the_catalogue():
    for panel in PANELS:
        shown = [*panel.metrics, *(panel.band_limits or ()), *([panel.band] if panel.band else [])]
        assert [name for name in shown if find(name) is None] == [], panel.title
        units = {find(name).percent for name in panel.metrics}
        assert not panel.percent or units == {True}, panel.title
    titles = [panel.title for panel in PANELS]
    assert len(set(titles)) == len(titles)


def test_a_panel_lists_the_members_of_a_family():
    names = ["reward/component/a/b_mean", "reward/score_mean", "reward/component/c_mean"]
    panel = next(panel for panel in PANELS if panel.title == "Reward components")
    assert panel_metrics(panel, names) == {names[0]: "a/b", names[2]: "c"}
    others = next(panel for panel in PANELS if panel.title == "Other held-out scores")
    assert panel_metrics(others, ["eval/score_mean", "eval/help_mean", "eval/margin_mean"]) == {
        "eval/help_mean": "help"
    }


def test_ranges_include_their_ends():
    metric = METRICS["policy/clipfrac"]
    assert [outside(metric, value) for value in (-0.1, 0.0, 0.3, 0.31)] == [True, False, False, True]
    assert not outside(METRICS["policy/loss"], 1e9)
    assert matches("a/<x>_b", "a/c.d_b") and not matches("a.b", "acb")


def test_plain_removes_the_marks_of_markdown():
    assert plain("see [TRL](https://a.b/c) and `algo.kl.coef`") == "see TRL and algo.kl.coef"
