"""Renders ``report.html``: the settings, result, curves, alarms and responses of one run or of several."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_ds.secrets import censored, censored_tree
from ppo_ds.storage.drafts import write_file
from ppo_ds.tracking.catalogue import SECTIONS, Panel, find, matches, overview_panels, panel_metrics
from ppo_ds.tracking.formatting import format_duration
from ppo_ds.tracking.html.page import asset, render_page
from ppo_ds.tracking.html.result import common_results, how_it_ended, result_of
from ppo_ds.tracking.html.run_data import SAMPLE_BYTES, read_run

FILE_NAME = "report.html"
REPORT_SCRIPTS = ("curves.js", "rollouts.js", "report.js")


def write_report(run_dirs: Sequence[Path], target: Path, *, running: bool = False) -> None:
    """Writes the report of the runs to ``target``; ``running`` states that the run is in progress.

    Raises UserError if a directory does not exist or is no run directory.
    """
    runs = [read_run(run_dir, sample_bytes=SAMPLE_BYTES // len(run_dirs)) for run_dir in run_dirs]
    write_file(target, render_report(runs, running=running))


def render_report(runs: Sequence[dict[str, Any]], *, running: bool = False) -> str:
    """Returns the report as an HTML page. Each element of ``runs`` is a result of ``read_run``."""
    names = sorted({name for run in runs for name in run["series"]})
    for run, unique, metric in zip(runs, unique_names(runs), common_results(runs), strict=True):
        run |= {"name": unique, "ending": how_it_ended(run, running), "result": result_of(run, metric)}
        run["duration"] = format_duration(run["seconds"], whole=True)
    data = {
        "runs": runs,
        "running": running,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "metrics": {name: metric_data(name) for name in names if find(name)},
        "overview": [_card(panel, panel_metrics(panel, names)) for panel in overview_panels(names)],
        "sections": sections_of(names),
    }
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    scripts = [asset(name) for name in REPORT_SCRIPTS]
    title, data = censored(title), censored_tree(data)  # the files may hold keys of other programs
    return render_page(title, '<div id="report"></div>', data, scripts=scripts, styles=[asset("report.css")])


def unique_names(runs: Sequence[dict[str, Any]]) -> list[str]:
    """Returns the names of the runs, with the directory added if several runs have the same name."""
    names = [run["name"] for run in runs]
    return [
        f"{name} ({run['directory']})" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def metric_data(name: str) -> dict[str, Any]:
    metric = find(name)
    assert metric is not None
    label = metric.label if metric.name == name else name.split("/", 1)[1].replace("_", " ")
    shown = ("unit", "meaning", "healthy", "reason", "remedy", "percent")
    return {"label": label} | {field: getattr(metric, field) for field in shown}


def sections_of(names: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the sections that have data. Each metric without a panel gets a separate card."""
    panels = {
        section.title: [
            (panel, metrics)
            for panel in section.panels
            if (metrics := panel_metrics(panel, names))
            and matches(next(iter(panel.metrics)), next(iter(metrics)))
        ]
        for section in SECTIONS
    }
    # a panel may show metrics of several sections, such as the learning rates of the actor and the critic
    listed = {name for shown in panels.values() for _, metrics in shown for name in metrics}
    sections = []
    for section in SECTIONS:
        cards = [_card(panel, metrics) for panel, metrics in panels[section.title]]
        own = [name for name in names if (metric := find(name)) and metric in section.metrics]
        cards += [_single(name) for name in own if name not in listed]
        listed |= set(own)
        if cards:
            sections.append({"title": section.title, "prefix": section.prefix, "cards": cards})
    if others := [_single(name) for name in names if name not in listed]:
        sections.append({"title": "Other metrics", "prefix": "other", "cards": others})
    return sections


def _card(panel: Panel, metrics: dict[str, str]) -> dict[str, Any]:
    return vars(panel) | {"metrics": metrics}


def _single(name: str) -> dict[str, Any]:
    metric = find(name)
    label, unit, percent = (metric.label, metric.unit, metric.percent) if metric else (name, "", False)
    return _card(Panel(label[:1].upper() + label[1:], unit, {}, percent=percent), {name: label})
