"""Statistics of an evaluation that compares models: mean scores and win rates, with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95

Estimate = dict[str, float]  # "mean", "low" and "high": an estimate and its confidence interval


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean of one value per prompt, with the percentile bootstrap interval of level LEVEL.

    The prompts are resampled, with the same random numbers in each call.
    """
    given = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(0)
    means = [given[random.integers(len(given), size=len(given))].mean() for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"mean": float(given.mean()), "low": float(low), "high": float(high)}


def wins(scores: Sequence[float], others: Sequence[float]) -> list[float]:
    """Returns 1 for each prompt whose response scores higher than the other response, 0.5 for a tie, else 0.

    ``scores`` and ``others`` are the scores of two models' responses to the same prompts.
    """
    return [0.5 * (float(a > b) + float(a >= b)) for a, b in zip(scores, others, strict=True)]


def compare(scores: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Compares models by the scores of their responses to the same prompts.

    Returns the mean score of each model ("score"), and the win rate of each model against each model before
    it ("win_rate"), all with intervals.
    """
    names = list(scores)
    return {
        "score": {name: estimate(values) for name, values in scores.items()},
        "win_rate": {
            name: {other: estimate(wins(scores[name], scores[other])) for other in names[:i]}
            for i, name in enumerate(names)
            if i
        },
    }


def table(result: Mapping[str, Any]) -> str:
    """Formats the content of evaluation.json for the console, with one block for each reward."""
    lines = [
        f"held-out evaluation: greedy responses to {result['prompts']} prompts of {result['data']}; "
        f"in brackets {LEVEL:.0%} intervals by bootstrap over prompts"
    ]
    for reward, found in result["rewards"].items():
        names = list(found["score"])
        header = ["model", f"score ({reward})", *(f"win rate against {name}" for name in names[:-1])]
        rows = [header]
        for name in names:
            rates = found["win_rate"].get(name, {})
            cells = [as_percent(rates[other]) if other in rates else "-" for other in names[:-1]]
            rows.append([name, as_number(found["score"][name]), *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines.append("")
        for row in rows:
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            lines.append("  " + "   ".join(padded).rstrip())
    return "\n".join(lines)


def as_number(found: Estimate) -> str:
    return f"{found['mean']:.3f} [{found['low']:.3f}, {found['high']:.3f}]"


def as_percent(found: Estimate) -> str:
    mean, low, high = (100 * found[name] for name in ("mean", "low", "high"))
    return f"{mean:.1f} % [{low:.1f}, {high:.1f}]"
