"""Builds a workspace of Weights & Biases from the catalogue of metrics.

The workspace has a section for each prefix of metrics, with the panels of ``report.html``, all other metrics
and the histograms. Another section has tables of responses. This module needs the extra ``dashboards``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ppo_ds.errors import UserError, not_installed
from ppo_ds.tools.metrics_page import in_words
from ppo_ds.tracking.catalogue import PANELS, SECTIONS, Metric, Panel, find, matches

# prefix -> histograms that PPO logs for dashboards, with the titles of their panels
HISTOGRAMS = {
    "reward": {"reward/score_hist": "Scores of the step"},
    "adv": {"adv/hist": "Advantages of the tokens"},
    "policy": {"policy/ratio_hist": "Ratios of the tokens (2: and above)"},
    "rollout": {"rollout/resp_len_hist": "Lengths of the responses"},
}
TABLES = ("samples/train", "samples/eval", "samples/train_prompts")
OPEN = ("reward", "eval", "kl", "policy")  # prefixes of the sections that are open at first


def save_workspace(entity: str, project: str, name: str, view: str | None = None) -> str:
    """Saves the workspace on the server and returns its address.

    ``view`` is the address of a saved workspace whose sections and name are replaced; with None, a new
    workspace is added to the project. Raises UserError if the extra is missing; does not catch other errors.
    """
    try:
        from wandb_workspaces import workspaces as ws
    except ModuleNotFoundError:
        raise UserError(not_installed("wandb-workspaces", "dashboards")) from None
    if view is None:
        workspace = ws.Workspace(entity=entity, project=project, name=name)
    else:
        workspace = ws.Workspace.from_url(view)
        workspace.name = name
    workspace.sections = build_sections()
    workspace.settings.x_axis = "step"
    return str(workspace.save().url)


def build_sections() -> list[Any]:
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.reports import v2 as wr

    sections = []
    for section in SECTIONS:
        panels = [_line_plot(panel) for panel in (*section.panels, *single_panels(section.metrics))]
        histograms = HISTOGRAMS.get(section.prefix, {})
        panels += [wr.LinePlot(title=title, x="step", y=[name]) for name, title in histograms.items()]
        if panels:
            title = f"{section.title} ({section.prefix}/)" if section.prefix else section.title
            settings = ws.SectionPanelSettings(x_axis="step")
            is_open = section.prefix in OPEN
            sections.append(ws.Section(name=title, panels=panels, is_open=is_open, panel_settings=settings))
    tables = [wr.WeavePanelSummaryTable(table_name=name, layout=wr.Layout(w=24, h=12)) for name in TABLES]
    return [*sections, ws.Section(name="Responses", panels=tables, is_open=True)]


def single_panels(metrics: Iterable[Metric]) -> list[Panel]:
    """Returns a panel for each metric that no panel of the catalogue shows, except for the x axis, step."""
    shown = {"step"}.union(*(panel.metrics for panel in PANELS))
    return [
        Panel(metric.label[:1].upper() + metric.label[1:], metric.unit, {metric.name: ""})
        for metric in metrics
        if not any(matches(metric.name, name) for name in shown)
    ]


def _line_plot(panel: Panel) -> Any:
    """Returns wandb's plot of a panel; a regular expression selects the metrics of a family."""
    from wandb_workspaces.reports import v2 as wr

    names = [name for name in panel.metrics if "<" not in name]
    families = [name for name in panel.metrics if "<" in name]
    metric = find(next(iter(panel.metrics)))
    # wandb draws no bands, so the title contains the healthy range of the first metric
    healthy = f" (healthy: {in_words(metric.healthy)})" if metric and metric.healthy else ""
    return wr.LinePlot(
        title=panel.title + healthy,
        x="step",
        y=names,
        metric_regex="|".join(pattern_of(name) for name in families) or None,
        title_y=panel.unit,
        range_y=(0.0, None) if panel.from_zero else (None, None),
    )


def pattern_of(family: str) -> str:
    """Returns a regular expression for the metrics of a family, such as ``eval/<name>_mean``."""
    return "^" + re.sub(r"<\w+>", ".+", family) + "$"
