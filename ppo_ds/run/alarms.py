"""Alarms: rules that recognize the usual ways in which a run fails, from its logged metrics.

An alarm is one line that names a metric, its value and the key to change. It never stops a run. The rules use
nothing but the metrics of the steps so far, in their order. A resumed run reads them from metrics.jsonl and
therefore raises the same alarms as a run that was not interrupted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

WINDOW = 5  # steps of a mean
# standard errors; over 1,000 steps of pure noise, the highest and the lowest mean differ by about 6.5
NOISE = 8.0


@dataclass
class Series:
    """Summarizes the values of one metric so far, as the rules need them."""

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

        For normal values, the mean absolute change is 2/sqrt(pi) times their standard deviation. Unlike that
        standard deviation, it contains little of a trend or of a single jump.
        """
        return math.sqrt(math.pi) / 2 * self.sum_of_changes / max(self.changes, 1) / math.sqrt(WINDOW)

    @property
    def start(self) -> float | None:
        """The mean of the first WINDOW values; None while there are fewer."""
        return sum(self.first) / WINDOW if len(self.first) == WINDOW else None


Past = Mapping[str, Series]  # the finite values of each metric that the rules read, the current step included


def last_value(name: str, past: Past) -> str:
    return f"{name}={past[name].recent[-1]:.4g}"


def mean_and_best_mean(name: str, past: Past) -> str:
    mean, best = past[name].mean, past[name].highest_mean
    return f"{name}={mean:.4g} as the mean of {WINDOW} steps, {best:.4g} at best"


@dataclass(frozen=True)
class Rule:
    """A condition on one metric that raises an alarm once it holds for ``steps`` steps in a row.

    Steps without a finite value of the metric do not count. The alarm is raised again only after the
    condition was false for ``steps`` steps in a row, so that a value near a limit raises one alarm.
    """

    metric: str
    steps: int
    holds: Callable[[float, Past], bool]  # receives the value of the step
    condition: str  # the same in words
    problem: str
    advice: str
    state: Callable[[str, Past], str] = last_value  # receives the metric; returns it in words

    def text(self, past: Past) -> str:
        times = f"{self.steps} {'evaluations' if self.metric.startswith('eval/') else 'steps'} in a row"
        return f"{self.problem}: {self.state(self.metric, past)} ({times}); {self.advice}"


def above(limit: float) -> Callable[[float, Past], bool]:
    return lambda value, past: value > limit


def most_groups_equal(share: float, past: Past) -> bool:
    spread = past["reward/score_std"].recent
    return share >= 0.9 and not (spread and spread[-1] == 0)  # all scores are equal: another rule


def entropy_collapsed(entropy: float, past: Past) -> bool:
    """Compares with the start of the run.

    A policy that has solved its task has a low entropy too, but then its scores hardly differ.
    """
    start, spread = past["policy/entropy"].start, past["reward/score_std"]
    if start is None or spread.start is None:
        return False
    return entropy < min(0.05, 0.1 * start) and spread.recent[-1] > 0.5 * spread.start


def longer_but_not_better(length: float, past: Past) -> bool:
    start, scores, spread = (
        past["rollout/resp_len_mean"].start,
        past["reward/score_mean"],
        past["reward/score_std"],
    )
    if start is None or scores.start is None or spread.start is None:
        return False
    return length > 2 * start and scores.recent[-1] < scores.start + 0.25 * spread.start


def score_fell(score: float, past: Past) -> bool:
    """Compares the mean of the last steps with that of the best ones.

    The fall must exceed the first spread. With few responses per step, means vary by chance: the fall must
    also exceed NOISE standard errors of such a mean.
    """
    scores, spread = past["reward/score_mean"], past["reward/score_std"].start
    if scores.mean is None or spread is None:
        return False
    return scores.highest_mean - scores.mean > max(spread, NOISE * scores.mean_error)


def worse_than_chance_on_pairs(share: float, past: Past) -> bool:
    """Only a reward model logs rm/accuracy; the eval/accuracy of PPO is the share of correct answers."""
    return share < 0.45 and len(past["rm/accuracy"].recent) > 0


def loss_grew(loss: float, past: Past) -> bool:
    start = past["sft/loss"].start
    return start is not None and loss > 1.5 * start


_SMALLER_UPDATES = "lower actor.optim.lr or algo.epochs"

RULES = (
    Rule(
        "reward/score_std",
        3,
        lambda spread, past: spread == 0,
        "0",
        "all responses of a step have the same score, so the step teaches nothing",
        "check the reward, use prompts of another difficulty or raise sampling.temperature",
    ),
    Rule(
        "rollout/zero_std_group_frac",
        3,
        most_groups_equal,
        "at least 0.9, while the scores of different prompts differ",
        "nearly all prompts have responses with equal scores, which teach nothing",
        "use prompts of another difficulty, raise rollout.samples_per_prompt or sampling.temperature, or set "
        "algo.dynamic_sampling.enabled=true",
    ),
    Rule(
        "reward/score_mean",
        3,
        score_fell,
        "mean of 5 steps below the best mean of 5 steps by more than the start of `reward/score_std` and by "
        "more than 8 standard errors of such a mean",
        "the score has fallen by more than the spread of the first scores",
        f"{_SMALLER_UPDATES}, or raise algo.kl.coef",
        mean_and_best_mean,
    ),
    Rule(
        "kl/ref_token_mean",
        3,
        above(1.0),
        "above 1",
        "the policy has moved far from the reference",
        f"raise algo.kl.coef, {_SMALLER_UPDATES}, or set health.max_kl",
    ),
    Rule(
        "policy/entropy",
        5,
        entropy_collapsed,
        "below 0.05 and below 10 % of the start, while `reward/score_std` is above half of its start",
        "the entropy has collapsed while the scores still differ",
        "raise algo.policy.clip_high or algo.entropy.coef, or lower actor.optim.lr",
    ),
    Rule(
        "policy/clipfrac",
        5,
        above(0.4),
        "above 0.4",
        "the clip removes the gradient of many tokens",
        f"{_SMALLER_UPDATES}, or raise algo.minibatch_size",
    ),
    Rule(
        "policy/approx_kl",
        3,
        above(1.0),
        "above 1",
        "an update changes the policy too much",
        f"{_SMALLER_UPDATES}, or set algo.target_kl",
    ),
    Rule(
        "policy/ratio_mean",
        3,
        lambda ratio, past: not 0.5 <= ratio <= 2,
        "outside 0.5 to 2",
        "an update changes the policy too much",
        f"{_SMALLER_UPDATES}, or set algo.target_kl",
    ),
    Rule(
        "value/explained_var",
        20,
        lambda share, past: share < 0,
        "below 0",
        "the critic predicts the returns worse than their mean does",
        "raise critic.optim.lr, or set algo.value.pretrain_rollouts or algo.value.warmup_steps",
    ),
    Rule(
        "rollout/truncated_frac",
        3,
        above(0.5),
        "above 0.5",
        "most responses are cut at their limit",
        "raise sampling.max_new_tokens, set algo.reward_shaping.missing_eos, or check sampling.stop",
    ),
    Rule(
        "rollout/empty_frac",
        3,
        above(0.5),
        "above 0.5",
        "most responses are empty",
        "set sampling.min_new_tokens, or check data.chat_template",
    ),
    Rule(
        "rollout/resp_len_mean",
        5,
        longer_but_not_better,
        "above twice the start, while the score is less than a quarter of a standard deviation above its "
        "start",
        "responses have become more than twice as long, but not better",
        "set algo.reward_shaping.length_penalty or algo.reward_shaping.overlong_buffer",
    ),
    Rule(
        "parity/logp_abs_diff_mean",
        3,
        above(0.1),
        "above 0.1",
        "generation and training disagree on the log-probs",
        "set algo.rollout_is.kind, or use rollout.backend=hf",
    ),
    Rule(
        "health/skipped_steps",
        3,
        above(0.0),
        "above 0",
        "optimizer steps are skipped",
        "use bf16 instead of fp16, or lower actor.optim.lr",
    ),
    Rule(
        "sft/loss",
        3,
        loss_grew,
        "above 1.5 times the start",
        "the loss has grown far above its start",
        "lower actor.optim.lr, or raise actor.optim.warmup_ratio",
    ),
    Rule(
        "rm/accuracy",
        20,
        lambda share, past: share < 0.5,
        "below 0.5",
        "the reward model is worse than chance",
        "check which text of a pair is preferred, or lower scorer.optim.lr",
    ),
    Rule(
        "eval/accuracy",
        3,  # evaluations
        worse_than_chance_on_pairs,
        "below 0.45, with stage=reward_model",
        "the reward model ranks held-out pairs worse than chance does",
        "check which text of a pair is preferred, or lower scorer.optim.lr",
    ),
    Rule(
        "eval/loss",
        2,  # evaluations
        lambda loss, past: loss > 1.05 * past["eval/loss"].lowest,
        "above 1.05 times its lowest value",
        "the held-out loss is above its best value, so the model overfits",
        "train fewer steps, lower the learning rate, or set checkpoint.keep_best=true",
    ),
)


METRICS_READ = tuple(dict.fromkeys(rule.metric for rule in RULES))


@dataclass
class Alarms:
    """Applies the rules to the metrics of each step. Only rank 0 uses it."""

    past: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in METRICS_READ})
    raised: set[Rule] = field(default_factory=set)  # the rules whose alarm was raised and still holds
    contradicted: dict[Rule, int] = field(default_factory=dict)  # steps in a row in which this was wrong

    @classmethod
    def after(cls, records: Iterable[Mapping[str, Any]]) -> Alarms:
        """Returns the alarms of a run that has logged ``records``."""
        alarms = cls()
        for record in records:
            alarms.check(record)
        return alarms

    def check(self, metrics: Mapping[str, Any]) -> list[str]:
        """Adds the metrics of a step and returns the texts of the alarms that they raise."""
        values = {
            name: float(value)
            for name in METRICS_READ
            if isinstance(value := metrics.get(name), int | float) and math.isfinite(value)
        }
        for name, value in values.items():
            self.past[name].add(value)
        return [
            rule.text(self.past)
            for rule in RULES
            if rule.metric in values and self.raises(rule, values[rule.metric])
        ]

    def raises(self, rule: Rule, value: float) -> bool:
        """Returns whether the value raises the alarm of a rule; it may also end it."""
        if rule.holds(value, self.past) == (rule in self.raised):
            self.contradicted[rule] = 0
            return False
        self.contradicted[rule] = self.contradicted.get(rule, 0) + 1
        if self.contradicted[rule] < rule.steps:
            return False
        self.contradicted[rule] = 0
        self.raised ^= {rule}
        return rule in self.raised
