"""Recognizes the usual failures of a run from its logged metrics. Alarms never stop a run.

tracking/metrics.toml has each alarm's condition, limit, text and number of steps. An alarm is raised once its
condition has held for this number of steps in a row, and again only after it was false for as many. Steps
without a finite value do not count. A resumed run first reads metrics.jsonl, so that it raises the same
alarms as an uninterrupted run.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ppo_ds.tracking.catalogue import METRICS, Alarm

WINDOW = 5  # steps of a mean
# standard errors; over 1,000 steps of pure noise, the highest and the lowest mean differ by about 6.5
NOISE = 8.0


@dataclass
class Series:
    """Summarizes the values of one metric so far, for the conditions of alarms."""

    first: list[float] = field(default_factory=list)  # at most WINDOW values
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lowest: float = math.inf
    highest_mean: float = -math.inf  # of WINDOW consecutive values
    changes: int = 0  # from one value to the next
    sum_of_changes: float = 0.0  # of their absolute values

    def add(self, value: float) -> None:
        if self.recent:
            self.changes += 1
            self.sum_of_changes += abs(value - self.recent[-1])
        if len(self.first) < WINDOW:
            self.first.append(value)
        self.recent.append(value)
        self.lowest = min(self.lowest, value)
        if (mean := self.mean) is not None:
            self.highest_mean = max(self.highest_mean, mean)

    @property
    def mean(self) -> float | None:
        """The mean of the last WINDOW values; None while there are fewer."""
        return sum(self.recent) / WINDOW if len(self.recent) == WINDOW else None

    @property
    def mean_error(self) -> float:
        """The standard error of ``mean``, estimated from the changes between consecutive values.

        For normal values, the mean absolute change is 2/sqrt(pi) times the standard deviation. A trend or a
        single jump hardly affects it.
        """
        return math.sqrt(math.pi) / 2 * self.sum_of_changes / max(self.changes, 1) / math.sqrt(WINDOW)

    @property
    def start(self) -> float | None:
        """The mean of the first WINDOW values; None while there are fewer."""
        return sum(self.first) / WINDOW if len(self.first) == WINDOW else None


# the finite values of each metric, including the current step and the evaluation before the first step
Past = Mapping[str, Series]


# kind of condition -> whether a value meets it, given the limit and earlier values; and its description
CONDITIONS: dict[str, tuple[Callable[[float, Any, Series], bool], str]] = {
    "above": (lambda value, limit, series: value > limit, "above {:g}"),
    "below": (lambda value, limit, series: value < limit, "below {:g}"),
    "equals": (lambda value, limit, series: value == limit, "{:g}"),
    "outside": (
        lambda value, limit, series: not limit[0] <= value <= limit[1],
        "outside {0[0]:g} to {0[1]:g}",
    ),
    "above_start": (
        lambda value, limit, series: series.start is not None and value > limit * series.start,
        "above {:g} times the start",
    ),
    "above_lowest": (
        lambda value, limit, series: value > limit * series.lowest,
        "above {:g} times its lowest value",
    ),
}


def most_groups_equal(share: float, past: Past) -> bool:
    spread = past["reward/score_std"].recent
    return share >= 0.9 and not (spread and spread[-1] == 0)  # all scores are equal: another alarm


def entropy_collapsed(entropy: float, past: Past) -> bool:
    """Returns whether the entropy is far below that at the start while the scores still differ.

    Low entropy is normal for a solved task, whose scores hardly differ.
    """
    start, spread = past["policy/entropy"].start, past["reward/score_std"]
    if start is None or spread.start is None:
        return False
    return entropy < min(0.05, 0.1 * start) and spread.recent[-1] > 0.5 * spread.start


def longer_but_not_better(length: float, past: Past) -> bool:
    start, scores = past["rollout/resp_len_mean"].start, past["reward/score_mean"]
    spread = past["reward/score_std"]
    if start is None or scores.start is None or spread.start is None:
        return False
    return length > 2 * start and scores.recent[-1] < scores.start + 0.25 * spread.start


def score_fell(score: float, past: Past) -> bool:
    """Returns whether the mean score of the last WINDOW steps is far below the best such mean.

    The fall must exceed both the spread of scores at the start and NOISE standard errors of a mean.
    """
    scores, spread = past["reward/score_mean"], past["reward/score_std"].start
    if scores.mean is None or spread is None:
        return False
    return scores.highest_mean - scores.mean > max(spread, NOISE * scores.mean_error)


def another_reward_fell(score: float, past: Past) -> bool:
    """Returns whether, since the start, a policy's score rose and another reward fell (Gao et al. 2023)."""
    is_policy = len(past["reward/score_mean"].recent) > 0
    return is_policy and score > past["eval/score_mean"].first[0] and bool(fallen_rewards(past))


def fallen_rewards(past: Past) -> list[str]:
    """Returns the names eval/<name>_mean of rewards that fell by over half of their std at the start."""
    spreads = {name.replace("_mean", "_std"): name for name in past if re.fullmatch(r"eval/.+_mean", name)}
    return [
        name
        for spread, name in spreads.items()
        if spread in past and past[name].first[0] - past[name].recent[-1] > 0.5 * past[spread].first[0]
    ]


def worse_than_chance_on_pairs(share: float, past: Past) -> bool:
    """Returns whether a reward model's eval/accuracy, ``share``, is clearly below that of guesses, 0.5.

    Only reward models log rm/accuracy. PPO's eval/accuracy is a share of correct answers and does not count.
    """
    return share < 0.45 and len(past["rm/accuracy"].recent) > 0


RULES: dict[str, Callable[[float, Past], bool]] = {
    rule.__name__: rule
    for rule in (
        most_groups_equal,
        entropy_collapsed,
        longer_but_not_better,
        score_fell,
        another_reward_fell,
        worse_than_chance_on_pairs,
    )
}
ALARMS = {name: metric.alarm for name, metric in METRICS.items() if metric.alarm is not None}


def holds(name: str, value: float, past: Past) -> bool:
    """Returns whether the condition of a metric's alarm holds for this step's value."""
    alarm = ALARMS[name]
    if alarm.kind == "rule":
        return RULES[alarm.limit](value, past)
    return CONDITIONS[alarm.kind][0](value, alarm.limit, past[name])


def condition(alarm: Alarm) -> str:
    return alarm.condition if alarm.kind == "rule" else CONDITIONS[alarm.kind][1].format(alarm.limit)


def text(name: str, past: Past) -> str:
    """Returns the line of an alarm, with the values that raised it."""
    alarm, series = ALARMS[name], past[name]
    state = f"{name}={series.recent[-1]:.4g}"
    if alarm.shows == "means":
        state = f"{name}={series.mean:.4g} as the mean of {WINDOW} steps, {series.highest_mean:.4g} at best"
    elif alarm.shows == "changes":
        changed = [(other, past[other]) for other in (name, *fallen_rewards(past))]
        state = ", ".join(f"{one} from {its.first[0]:.4g} to {its.recent[-1]:.4g}" for one, its in changed)
    if alarm.steps > 1:
        state += f" ({alarm.steps} {'evaluations' if name.startswith('eval/') else 'steps'} in a row)"
    return f"{alarm.problem}: {state}; {alarm.advice}"


@dataclass
class Alarms:
    """Applies the conditions to the metrics of each step. Only rank 0 uses it."""

    past: dict[str, Series] = field(default_factory=lambda: defaultdict(Series))
    raised: set[str] = field(default_factory=set)  # the metrics whose alarm was raised and still holds
    # steps in a row in which the condition of a metric's alarm disagreed with ``raised``
    contradicted: Counter[str] = field(default_factory=Counter)

    @classmethod
    def after(cls, records: Iterable[Mapping[str, Any]]) -> Alarms:
        """Returns the alarms in their state after ``records``: the first evaluation and the logged steps."""
        alarms = cls()
        for record in records:
            alarms.check(record)
        return alarms

    def check(self, metrics: Mapping[str, Any]) -> list[str]:
        """Adds the metrics of a step and returns the texts of the alarms that they raise."""
        values = {
            name: float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        for name, value in values.items():
            self.past[name].add(value)
        raised = [name for name in ALARMS if name in values and self.raises(name, values[name])]
        return [text(name, self.past) for name in raised]

    def raises(self, name: str, value: float) -> bool:
        """Returns whether the value raises the metric's alarm. The value may also end the alarm."""
        if holds(name, value, self.past) == (name in self.raised):
            self.contradicted[name] = 0
            return False
        self.contradicted[name] += 1
        if self.contradicted[name] < ALARMS[name].steps:
            return False
        self.contradicted[name] = 0
        self.raised ^= {name}
        return name in self.raised
