"""Draws the curves of a run as an image, and prints tables of scores and samples before and after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ppo_ds.storage.drafts import draft_file
from ppo_ds.tracking.catalogue import Panel, overview_panels
from ppo_ds.tracking.formatting import format_change, format_number
from ppo_ds.tracking.jsonl import Curve, read_curves, read_metrics
from ppo_ds.tracking.screen import open_console

COLOURS = ("#2f6fb0", "#d9792b")
LOWER_IS_BETTER = ("loss", "perplexity", "calibration_error")
MAX_CELL = 240  # maximum number of characters in a cell of the table of samples


def plot_curves(
    metrics_jsonl: Path, png: Path, *, title: str = "", before: Mapping[str, float] | None = None
) -> bool:
    """Draws every panel of the overview that has data; ``before`` holds the metrics of step 0.

    Returns False and writes no file if there is no data.
    """
    curves = read_curves([{**(before or {}), "step": 0}, *read_metrics(metrics_jsonl)])
    panels = overview_panels(curves)
    if not panels:
        return False
    columns = 2 if len(panels) in (2, 4) else min(3, len(panels))
    rows = -(-len(panels) // columns)
    size = (4.6 * columns, 3.2 * rows + (0.5 if title else 0))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    for index, panel in enumerate(panels):
        _draw(figure.add_subplot(rows, columns, index + 1), panel, curves)
    figure.suptitle(title, fontweight="bold")
    with draft_file(png) as file:
        figure.savefig(file, format="png")
    return True


def _draw(axes: Axes, panel: Panel, curves: Mapping[str, Curve]) -> None:
    drawn = [name for name in panel.metrics if name in curves]
    for name, colour in zip(drawn, COLOURS, strict=False):
        line = "--" if name == "kl/target" else "o-" if len(curves[name][0]) < 60 else "-"
        axes.plot(*curves[name], line, color=colour, markersize=2.5, label=panel.metrics[name])
    axes.set(title=panel.title, xlabel="step", ylabel=panel.unit)
    axes.grid(alpha=0.25)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    if panel.percent:
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif panel.from_zero and axes.get_ylim()[0] > 0:
        axes.set_ylim(bottom=0)
    if len(drawn) > 1:
        axes.legend(frameon=False)


def before_after(
    scores: Mapping[str, tuple[float | None, float | None]],
    samples: Sequence[Mapping[str, Any]],
    saved: Mapping[str, str | Path],
    *,
    trained_on: bool = False,
    when: str = "",
    stream: TextIO | None = None,
) -> None:
    """Prints tables that compare scores (before, after) and responses before and after the run.

    ``samples`` have prompt, before, after and score; ``saved`` maps names of outputs to paths. ``trained_on``
    states that the prompts are training prompts; ``when`` is added to the titles.
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
        percent = "accuracy" in name or "win_rate" in name
        form = ".1%" if percent else ".3f"
        cells = [format_number(before, form), format_number(after, form), "-"]
        if before is not None and after is not None:
            cells[2] = format_change(before, after, percent)
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
        table.add_row(*cells, format_number(sample.get("score"), ".3f"))
    return table
