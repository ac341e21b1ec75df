"""Reads metrics.toml, which alone defines the meaning of each metric, and the panels that show metrics.

A healthy range is where a run usually stays if it learns; ``reason`` states the source of the range, or that
it is a rule of thumb. Texts are Markdown with only ``code`` and links.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Container, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

Range = tuple[float | None, float | None]  # lowest and highest healthy value; None: no limit
ALARM_KINDS = ("above", "below", "equals", "outside", "above_start", "above_lowest", "rule")


@dataclass(frozen=True)
class Alarm:
    """A condition on a metric that raises an alarm once it holds for ``steps`` steps in a row."""

    steps: int  # of an eval/ metric: evaluations
    kind: str  # a key of CONDITIONS in run/alarms.py, or "rule"
    limit: Any  # a number; for "outside" two; for "rule" the name of a function in run/alarms.py
    problem: str
    advice: str  # which key to change
    condition: str = ""  # of a rule, in words
    # values in the text: the "last" one; the "means" of the last and of the best steps; or the "changes" of
    # this metric, and of the rewards that fell, since the first evaluation
    shows: str = "last"


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, or a family of metrics whose name has a variable part, such as ``<name>``."""

    name: str
    label: str  # short name in a legend
    unit: str
    meaning: str
    percent: bool = False  # a share between 0 and 1
    low: float | None = None  # lowest healthy value
    high: float | None = None  # highest healthy value
    reason: str = ""  # source of the range
    remedy: str = ""  # what to do, and which key to change
    alarm: Alarm | None = None

    @property
    def healthy(self) -> Range | None:
        return None if self.low is None and self.high is None else (self.low, self.high)


@dataclass(frozen=True)
class Panel:
    """One plot. It is drawn if its first metric has data."""

    title: str
    unit: str
    metrics: dict[str, str]  # maps names or patterns of metrics to labels in the legend
    band: str = ""  # the metric drawn as +- around the first curve
    # two metrics: the band is cut at the lowest value of the first and at the highest value of the second
    band_limits: tuple[str, str] | None = None
    percent: bool = False
    from_zero: bool = False
    overview: bool = False  # also in curves.png


@dataclass(frozen=True)
class Section:
    """The metrics and panels of one prefix."""

    title: str
    prefix: str  # of its metrics; "" for those without a prefix
    metrics: tuple[Metric, ...]
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Shown:
    """Specifies how the console shows a metric."""

    metric: str
    label: str
    format: str
    rank: int = 0  # of importance; parts with a higher rank are omitted first


def _section(table: dict[str, Any]) -> Section:
    metrics = []
    for row in table["metrics"]:
        if alarm := row.pop("alarm", None):
            (kind,) = [kind for kind in ALARM_KINDS if kind in alarm]
            alarm = Alarm(kind=kind, limit=alarm.pop(kind), **alarm)
        metrics.append(Metric(**row, alarm=alarm))
    panels = [Panel(**row) for row in table.get("panels", ())]
    return Section(table["title"], table["prefix"], tuple(metrics), tuple(panels))


_SOURCE = tomllib.loads(files(__package__).joinpath("metrics.toml").read_text("utf-8"))
# in the order of importance in a report
SECTIONS: tuple[Section, ...] = tuple(map(_section, _SOURCE["section"]))
PANELS: tuple[Panel, ...] = tuple(panel for section in SECTIONS for panel in section.panels)
METRICS: dict[str, Metric] = {metric.name: metric for section in SECTIONS for metric in section.metrics}
STEP_LINE: tuple[Shown, ...] = tuple(Shown(**row) for row in _SOURCE["step_line"])
HELDOUT_TABLE: tuple[str, ...] = tuple(_SOURCE["heldout_table"])


def find(name: str) -> Metric | None:
    """Returns the metric or the family of metrics called ``name``, or None."""
    if name in METRICS:
        return METRICS[name]
    return next((metric for metric in METRICS.values() if matches(metric.name, name)), None)


def matches(pattern: str, name: str) -> bool:
    """Returns whether ``name`` is ``pattern`` or a metric of the family ``pattern``."""
    return re.fullmatch(re.sub(r"<\w+>", ".+", re.escape(pattern)), name) is not None


def panel_metrics(panel: Panel, names: Iterable[str]) -> dict[str, str]:
    """Returns the metrics of a panel that are among ``names``, with their labels, in the panel's order.

    The label of a metric in a family is the variable part of the metric's name.
    """
    found: dict[str, str] = {}
    for pattern, label in panel.metrics.items():
        before, _, after = pattern.partition("<")
        after = after.partition(">")[2]
        for name in names:
            if name == pattern:
                found[name] = label
            elif "<" in pattern and name not in METRICS and matches(pattern, name):
                found[name] = name.removeprefix(before).removesuffix(after)
    return found


def overview_panels(names: Container[str]) -> list[Panel]:
    """Returns the overview panels that have data. If accuracy is recorded, its panel replaces another one."""
    # accuracy has a better scale than the score; the panel of rm/accuracy also shows held-out accuracy
    replaced = {"eval/accuracy": "Held-out score", "rm/accuracy": "Held-out accuracy"}
    hidden = [title for name, title in replaced.items() if name in names]
    panels = [panel for panel in PANELS if panel.overview and next(iter(panel.metrics)) in names]
    return [panel for panel in panels if panel.title not in hidden]


def plain(text: str) -> str:
    """Returns a text of the catalogue without Markdown marks."""
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", text).replace("`", "")
