"""Draws the scores of held-out preference pairs as an image."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from ppo_ds.storage.drafts import draft_file
from ppo_ds.tracking.curves import COLOURS, set_labels

POINTS = 2000  # most points of the scatter plot


def plot_pair_scores(
    png: str | os.PathLike,
    *,
    differences: Sequence[float],
    scores: Sequence[Sequence[float]],
    lengths: Sequence[Sequence[int]],
    calibration: Sequence[tuple[float, float, int]],
    accuracies: Mapping[str, float],
) -> None:
    """Draws the distribution of margins, calibration, score against length, and accuracy of each subset.

    Args:
        png: The file to write.
        differences: Score of the preferred minus score of the rejected text of each pair.
        scores: Scores of the preferred and the rejected text of each pair.
        lengths: Their numbers of tokens.
        calibration: Mean confidence, accuracy and number of pairs of each bin of confidence.
        accuracies: Accuracy of each subset; may be empty.
    """
    columns = 4 if accuracies else 3
    figure = Figure(figsize=(4.6 * columns, 3.7), dpi=130, layout="constrained")
    panels = figure.subplots(1, columns)
    _draw_margins(panels[0], differences)
    _draw_calibration(panels[1], calibration, f"{len(differences)} held-out pairs")
    _draw_lengths(panels[2], scores[:POINTS], lengths[:POINTS])
    if accuracies:
        _draw_accuracies(panels[3], accuracies)
    with draft_file(Path(png)) as file:
        figure.savefig(file, format="png")


def _draw_margins(axes: Axes, differences: Sequence[float]) -> None:
    set_labels(axes, "Margins", "score of preferred - score of rejected", "pairs")
    axes.hist([d for d in differences if d == d], bins=40, color=COLOURS[0])
    axes.axvline(0, color="black", linewidth=0.8)


def _draw_calibration(axes: Axes, calibration: Sequence[tuple[float, float, int]], label: str) -> None:
    set_labels(axes, "Calibration", "confidence of the model", "share of correct pairs")
    axes.plot([0.5, 1], [0.5, 1], color="black", linewidth=0.8, linestyle="--", label="calibrated")
    axes.plot(
        [confidence for confidence, _, _ in calibration],
        [share for _, share, _ in calibration],
        color=COLOURS[0],
        marker="o",
        markersize=3,
        label=label,
    )
    axes.set_ylim(-0.02, 1.02)
    axes.legend(fontsize=8, frameon=False)


def _draw_lengths(axes: Axes, scores: Sequence[Sequence[float]], lengths: Sequence[Sequence[int]]) -> None:
    set_labels(axes, "Score against length", "tokens", "score")
    for side, (label, colour) in enumerate(zip(("preferred", "rejected"), COLOURS, strict=True)):
        x, y = [pair[side] for pair in lengths], [pair[side] for pair in scores]
        axes.scatter(x, y, s=5, alpha=0.5, color=colour, label=label)
    axes.legend(fontsize=8, frameon=False)


def _draw_accuracies(axes: Axes, accuracies: Mapping[str, float]) -> None:
    set_labels(axes, "Accuracy by subset", "share of correct pairs", "")
    names = list(accuracies)
    axes.barh(range(len(names)), list(accuracies.values()), color=COLOURS[0])
    axes.set_yticks(range(len(names)), [name[:30] for name in names], fontsize=7)
    axes.axvline(0.5, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
