"""Computes the statistics of an evaluation of several models: mean scores, win rates, pass@k, intervals.

All intervals are percentile bootstrap intervals over prompts. The values of each prompt, such as the scores
of several responses, are averaged before the prompts are resampled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ppo_ds.ops.outcomes import WORTH, outcome_shares
from ppo_ds.tracking.formatting import format_number

RESAMPLES = 10_000
LEVEL = 0.95
CHUNK = 2**20  # numbers that are resampled at a time

Values = Sequence[Sequence[float]]  # prompt -> response -> value
Texts = Sequence[Sequence[str]]  # prompt -> response
Estimate = dict[str, float]  # "mean", "low" and "high": an estimate and its confidence interval


def estimate(values: Sequence[float]) -> Estimate:
    """Returns the mean and the interval of ``values``, one per prompt. The random seed is always the same."""
    given = np.asarray(values, dtype=np.float64)
    random = np.random.default_rng(0)
    rows = max(1, CHUNK // len(given))
    means: list[float] = []
    while len(means) < RESAMPLES:
        shape = (min(rows, RESAMPLES - len(means)), len(given))
        means += given[random.integers(len(given), size=shape)].mean(axis=1).tolist()
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return {"mean": float(given.mean()), "low": float(low), "high": float(high)}


def outcomes(scores: Values, others: Values, texts: Texts, other_texts: Texts) -> np.ndarray:
    """Returns the fractions of pairs that the model of ``scores`` wins, ties and loses: [prompts, 3].

    The pairs of a prompt are each response of this model with each response of the model of ``others``.
    """
    groups = zip(scores, others, texts, other_texts, strict=True)
    return np.array([outcome_shares(*group) for group in groups])


def compare(scores: Mapping[str, Values], texts: Mapping[str, Texts]) -> dict[str, Any]:
    """Compares models by the scores of their responses to the same prompts.

    Returns the mean score of each model ("score"), the win rate of each model against each model before it
    ("win_rate"), all with intervals, and the fractions of won, tied and lost pairs against the first model
    ("against_first"). A tie counts as half a win. Equal responses are ties.
    """
    names = list(scores)

    def pairs(name: str, other: str) -> np.ndarray:
        return outcomes(scores[name], scores[other], texts[name], texts[other])

    return {
        "score": {name: estimate(prompt_means(values)) for name, values in scores.items()},
        "win_rate": {
            name: {other: estimate((pairs(name, other) @ WORTH).tolist()) for other in names[:i]}
            for i, name in enumerate(names)
            if i
        },
        "against_first": {
            name: dict(zip(("won", "tied", "lost"), pairs(name, names[0]).mean(0).tolist(), strict=True))
            for name in names[1:]
        },
    }


def prompt_means(values: Values) -> list[float]:
    return np.asarray(values, dtype=np.float64).mean(1).tolist()


def pass_at_k(count: int, correct: int, k: int) -> float:
    """Estimates the probability that at least one of ``k`` responses is correct.

    This is the unbiased estimator of Chen et al. (2021), "Evaluating Large Language Models Trained on Code",
    from ``count`` responses of which ``correct`` are correct: 1 - C(count - correct, k) / C(count, k). The
    quotient is computed as a product, since the binomial coefficients overflow.
    """
    assert 0 <= correct <= count and 1 <= k <= count, (count, correct, k)
    if count - correct < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(count - correct + 1, count + 1)))


def pass_rates(correct: Sequence[Sequence[bool]]) -> dict[str, Estimate]:
    """Returns pass@k over prompts for k = 1, 2, 4, ..., and for k = the number of responses per prompt."""
    count = len(correct[0])
    powers = [2**i for i in range(count.bit_length()) if 2**i < count]
    return {str(k): estimate([pass_at_k(len(row), sum(row), k) for row in correct]) for k in [*powers, count]}


# ---- console


def table(result: Mapping[str, Any]) -> str:
    """Formats the content of evaluation.json for the console, with one block for each reward."""
    decoding = result.get("decoding") or {"samples": 1, "greedy": True}
    how = "greedy responses" if decoding["greedy"] else f"{decoding['samples']} sampled response(s) each"
    lines = [
        f"held-out evaluation: {how} to {result['prompts']} prompts of {result['data']}; "
        f"in brackets {LEVEL:.0%} intervals by bootstrap over prompts"
    ]
    for reward, found in result["rewards"].items():
        names = list(found["score"])
        rows = [["model", f"score ({reward})", *(f"win rate against {name}" for name in names[:-1])]]
        for name in names:
            rates = found["win_rate"].get(name, {})
            cells = [as_percent(rates[other]) if other in rates else "-" for other in names[:-1]]
            rows.append([name, as_number(found["score"][name]), *cells])
        lines += aligned(rows)
    by = result.get("by", {"values": {}})
    for reward in result["rewards"] if by["values"] else ():
        names = list(result["responses"])
        rows = [[by["column"], "prompts", *(f"{name} ({reward})" for name in names)]]
        for value, found in by["values"].items():
            scores = found["score"][reward]
            rows.append([value, str(found["prompts"]), *(as_number(scores[name]) for name in names)])
        lines += aligned(rows)
    for reward, found in result.get("pass_at_k", {}).items():
        ks = list(next(iter(found["models"].values())))
        rows = [["model", *(f"pass@{k} ({reward})" for k in ks)]]
        rows += [[name, *(as_percent(rates[k]) for k in ks)] for name, rates in found["models"].items()]
        lines += aligned(rows)
    if judge := result.get("judge"):
        rows = [["model", f"win rate against {judge['first']} ({judge['function']})", "orders disagree"]]
        for name, found in judge["models"].items():
            rows.append([name, as_percent(found["win_rate"]), f"{percent(found['disagreement'])} %"])
        lines += aligned(rows)
    if "responses" in result:
        lines += aligned(response_rows(result))
    return "\n".join(lines + [f"  {line}" for line in result.get("remarks", ())])


def response_rows(result: Mapping[str, Any]) -> list[list[str]]:
    """Returns the rows of a table with each model's mean response length, stop rate, KL and speed."""
    found = result["responses"]
    columns = [
        ["model", *found],
        ["tokens", *(format_number(one["tokens_mean"], ".1f") for one in found.values())],
        ["stopped", *(f"{percent(one['finished_frac'])} %" for one in found.values())],
    ]
    if kl := result.get("kl"):
        cells = (as_number(kl["models"][name]) if name in kl["models"] else "-" for name in found)
        columns.append([f"{kl['name']} to {kl['first']}", *cells])
    if speed := result.get("tokens_per_second"):
        columns.append(["tokens/s", *(f"{speed[name]:,.0f}" for name in found)])
    return list(map(list, zip(*columns, strict=True)))


def aligned(rows: list[list[str]]) -> list[str]:
    """Returns an empty line, and then one line for each of ``rows``, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [""]
    for row in rows:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        lines.append("  " + "   ".join(padded).rstrip())
    return lines


def as_number(found: Estimate) -> str:
    mean, low, high = (format_number(found[name], ".3f") for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def as_percent(found: Estimate) -> str:
    mean, low, high = (percent(found[name]) for name in ("mean", "low", "high"))
    return f"{mean} % [{low}, {high}]"


def percent(share: float) -> str:
    return format_number(100 * share, ".1f")
