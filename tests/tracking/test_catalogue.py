"""Tests the catalogue of metrics: lookups, panels and ranges, and that it has every metric of every stage."""

import ast
import re
from pathlib import Path

import pytest

import ppo_ds
from ppo_ds.tracking.catalogue import (
    HELDOUT_TABLE,
    METRICS,
    PANELS,
    SECTIONS,
    STEP_LINE,
    find,
    matches,
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
                assert metric.reason, f"{metric.name} has a range without a reason or remedy"
                assert metric.remedy, f"{metric.name} has a range without a reason or remedy"
    assert len(METRICS) == sum(len(section.metrics) for section in SECTIONS)


def test_panels_show_metrics_of_the_catalogue():
    for panel in PANELS:
        shown = [*panel.metrics, *(panel.band_limits or ()), *([panel.band] if panel.band else [])]
        assert [name for name in shown if find(name) is None] == [], panel.title
        units = {find(name).percent for name in panel.metrics}
        assert not panel.percent or units == {True}, panel.title
    titles = [panel.title for panel in PANELS]
    assert len(set(titles)) == len(titles)


def test_the_console_shows_metrics_of_the_catalogue():
    shown = STEP_LINE
    assert [entry for entry in shown if find(entry.metric) is None or not format(0.5, entry.format)] == []
    assert [name for name in HELDOUT_TABLE if find(f"eval/{name}") is None] == []


def test_a_panel_lists_the_members_of_a_family():
    names = ["reward/component/a/b_mean", "reward/score_mean", "reward/component/c_mean"]
    panel = next(panel for panel in PANELS if panel.title == "Reward components")
    assert panel_metrics(panel, names) == {names[0]: "a/b", names[2]: "c"}
    others = next(panel for panel in PANELS if panel.title == "Other held-out scores")
    assert panel_metrics(others, ["eval/score_mean", "eval/help_mean", "eval/margin_mean"]) == {
        "eval/help_mean": "help"
    }


def test_dots_in_a_pattern_are_no_wildcards():
    assert matches("a/<x>_b", "a/c.d_b") and not matches("a.b", "acb")


def test_plain_removes_the_marks_of_markdown():
    assert plain("see [TRL](https://a.b/c) and `algo.kl.coef`") == "see TRL and algo.kl.coef"


# -- completeness --------------------------------------------------------------------------------------------

SOURCES = Path(ppo_ds.__file__).parent
PREFIXES = "|".join(section.prefix for section in SECTIONS if section.prefix)
NAME = re.compile(rf"(?:{PREFIXES})/[\w<>/]+")
NOT_LOGGING = ("tools/doctor/",)  # texts about other systems' metrics
HISTOGRAM = re.compile(r".*hist$")  # histograms are no metrics; see docs/dashboards.md
MEAN_AND_STD = {"eval/score"}  # the argument of MetricSums.add_mean_and_std


def names_in(tree):
    """Yields the texts of a module that look like metric names, with ``<x>`` for the variable parts."""
    inner = {part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if node not in inner and NAME.fullmatch(text := text_of(node)):
            yield text


def text_of(node):
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "<x>" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def modules():
    for file in sorted(SOURCES.rglob("*.py")):
        place = str(file.relative_to(SOURCES))
        if not place.startswith(NOT_LOGGING):
            yield place, ast.parse(file.read_text(encoding="utf-8"))


def phases():
    """Returns the phases of the timer: the arguments of ``timer("...")``."""
    calls = [node for _, tree in modules() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call.args[:1]) for call in calls]
    return {text_of(arg) for name, args in named if name in ("timer", "_timer") for arg in args} - {""}


def test_every_name_in_the_code_is_in_the_catalogue():
    missing = [
        (place, name)
        for place, tree in modules()
        for name in names_in(tree)
        if not HISTOGRAM.match(name)
        and not (
            all(find(f"{name}_{what}") for what in ("mean", "std"))
            if name in MEAN_AND_STD
            else find(name) or any(matches(name, known) for known in METRICS)
        )
    ]
    assert missing == []


def test_every_phase_of_the_timer_is_in_the_catalogue():
    found = phases()
    assert {"generate", "reward", "eval", "checkpoint", "data", "switch", "update_<x>"} <= found
    missing = [phase for phase in found if not any(matches(f"time/{phase}", known) for known in METRICS)]
    assert missing == []


def test_the_catalogue_has_no_metric_that_nothing_logs():
    """Names that the code puts together are listed here by their parts."""
    written = {name for _, tree in modules() for name in names_in(tree)}
    made = {f"{role}/{what}" for role in ("policy", "value", "sft", "rm") for what in ("grad_norm", "lr")}
    made |= {f"eval/score_{what}" for what in ("mean", "std")} | {"adv/mean", "adv/std"}
    made |= {f"time/{phase}" for phase in phases()}
    made |= {f"time/update_{name}" for name in ("actor", "critic", "scorer")}
    made |= {"step", "episodes", "tokens", "time"}
    patterns = [name for name in written | made if "<" in name]

    def is_logged(name):
        plain_name = re.sub(r"<\w+>", "x", name)
        return name in written | made or any(matches(pattern, plain_name) for pattern in patterns)

    assert [name for name in METRICS if not is_logged(name)] == []
