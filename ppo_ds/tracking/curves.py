"""The final report of a run: its curves as an image, and tables of scores and samples before and after."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ppo_ds.storage.drafts import draft_file
from ppo_ds.tracking.catalogue import PANELS, Panel, overview_panels
from ppo_ds.tracking.jsonl import read_metrics
from ppo_ds.tracking.screen import open_console

Points = tuple[list[int], list[float]]  # steps, values
COLOURS = ("#2f6fb0", "#d9792b")
LOWER_IS_BETTER = ("loss", "perplexity", "calibration_error")
MAX_CELL = 240  # maximum number of characters in a cell of the table of samples


OVERVIEW = tuple(panel for panel in PANELS if panel.overview)


def plot_curves(
    metrics_jsonl: str | os.PathLike,
    png: str | os.PathLike,
    *,
    title: str = "",
    before: Mapping[str, float] | None = None,
) -> bool:
    """Draws every panel of the overview that has data in ``metrics_jsonl``.

    The metrics ``before`` training are drawn as step 0. Returns False and writes no file if there is no data
    at all.
    """
    records = [{**(before or {}), "step": 0}, *read_metrics(metrics_jsonl)]
    curves: dict[str, Points] = {}
    drawn = [name for panel in OVERVIEW for name in (*panel.metrics, panel.band, *(panel.band_limits or ()))]
    for name in drawn:
        having = [record for record in records if isinstance(record.get(name), int | float)]
        if having:
            curves[name] = [record["step"] for record in having], [record[name] for record in having]
    panels = overview_panels(curves)
    if not panels:
        return False
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(
        figsize=(4.6 * columns, 3.2 * rows + (0.5 if title else 0)),
        dpi=130,
        layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12),
    )
    FigureCanvasAgg(figure)  # draws into memory, without a display
    last = max(steps[-1] for steps, _ in curves.values())
    first = min(steps[0] for steps, _ in curves.values())
    margin = max(0.03 * (last - first), 0.5)
    for index, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, index + 1)
        _draw(axes, panel, curves)
        axes.set_xlim(first - margin, last + margin)  # the same limits in all panels
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold")
    with draft_file(Path(png)) as file:
        figure.savefig(file, format="png")
    return True


def _draw(axes: Axes, panel: Panel, curves: Mapping[str, Points]) -> None:
    drawn = [name for name in panel.metrics if name in curves]
    for name, colour in zip(drawn, COLOURS, strict=False):
        _curve(axes, curves[name], colour, panel.metrics[name], dashed=name == "kl/target")
    if panel.band in curves:
        spread, middle = (dict(zip(*curves[name], strict=True)) for name in (panel.band, drawn[0]))
        steps = [step for step in middle if step in spread]
        low, high = (
            [middle[step] - spread[step] for step in steps],
            [middle[step] + spread[step] for step in steps],
        )
        if panel.band_limits is not None and all(name in curves for name in panel.band_limits):
            lowest, highest = (curves[name][1] for name in panel.band_limits)
            # as far as the scores go; the mean of held-out scores may be beyond those of training
            low = [max(value, min(*lowest, middle[step])) for step, value in zip(steps, low, strict=True)]
            high = [min(value, max(*highest, middle[step])) for step, value in zip(steps, high, strict=True)]
        axes.fill_between(steps, low, high, color=COLOURS[0], alpha=0.13, linewidth=0)
    axes.set_title(panel.title, fontsize=11, fontweight="bold", loc="left")
    axes.set_xlabel("step", fontsize=9)
    axes.set_ylabel(panel.unit, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.percent:
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.from_zero and axes.get_ylim()[0] > 0:
        axes.set_ylim(bottom=0)
    if len(drawn) > 1 or panel.band in curves:
        axes.legend(fontsize=8, frameon=False)


def _curve(axes: Axes, points: Points, colour: str, label: str, *, dashed: bool) -> None:
    """Draws the values; 60 values or more are drawn pale, with their moving mean on top."""
    steps, values = points
    if dashed:
        axes.plot(steps, values, color=colour, linewidth=1.2, linestyle="--", label=label)
    elif len(values) < 60:
        axes.plot(steps, values, color=colour, linewidth=1.6, marker="o", markersize=2.5, label=label)
    else:
        reach = len(values) // 30  # values on each side in a moving mean, fewer at the ends
        windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
        means = [sum(window) / len(window) for window in windows]
        axes.plot(steps, values, color=colour, linewidth=0.8, alpha=0.3)
        axes.plot(steps, means, color=colour, linewidth=1.8, label=label)


def before_after(
    scores: Mapping[str, tuple[float | None, float | None]],
    samples: Sequence[Mapping[str, Any]],
    saved: Mapping[str, str | os.PathLike],
    *,
    trained_on: bool = False,
    when: str = "",
    stream: TextIO | None = None,
) -> None:
    """Prints tables that compare scores and responses before and after the run.

    Args:
        scores: Name -> (before, after) on held-out data; names that contain "accuracy" are shown in percent.
        samples: Rows with prompt, before, after and score.
        saved: Name -> path of the run's outputs (model, curves, metrics).
        trained_on: Whether the data are prompts of the training instead of held-out data.
        when: Added to the titles in parentheses: the step of "after", if it is not the last one.
        stream: The output; None: stdout.
    """
    console = open_console(stream)
    note = f" ({when})" if when else ""
    console.print()
    if scores:
        title = "Training prompts (not held out)" if trained_on else "Held-out data"
        console.print(_score_table(scores, title + note))
    if samples:
        title = "Responses to training prompts" if trained_on else "Sample responses"
        console.print(_sample_table(samples, title + note))
    for what, where in saved.items():
        console.print(Text.assemble((f"{what:>10}  ", "dim"), str(where)), soft_wrap=True)


def _score_table(scores: Mapping[str, tuple[float | None, float | None]], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.add_column("")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name, (before, after) in scores.items():
        percent = "accuracy" in name
        cells = [_score(before, percent), _score(after, percent), "-"]
        if before is not None and after is not None:
            cells[2] = f"{100 * (after - before):+.1f} points" if percent else f"{after - before:+.3f}"
        better = cells[2].startswith("-" if name in LOWER_IS_BETTER else "+") and len(cells[2]) > 1
        table.add_row(name, *cells[:2], Text(cells[2], style="green" if better else ""))
    return table


def _sample_table(samples: Sequence[Mapping[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("prompt", "before", "after"):
        table.add_column(column, overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    for sample in samples:
        cells = []
        for key in ("prompt", "before", "after"):
            text = str(sample.get(key, "")).strip()
            text = "".join(c if c.isprintable() or c == "\n" else " " for c in text)  # no control characters
            cells.append(Text(text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"))
        table.add_row(*cells, _score(sample.get("score"), percent=False))
    return table


def _score(value: float | None, percent: bool) -> str:
    return "-" if value is None else f"{value:.1%}" if percent else f"{value:.3f}"
