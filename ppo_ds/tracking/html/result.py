"""Describes the result of a run in three sentences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

ENDS = {
    "done": "The run finished all {steps} steps in {time}",
    "early_stop": "The run stopped early at {step} after {time}, when evaluations no longer improved",
    "stop_at_step": "The run stopped at {step} after {time}, as run.stop_at_step asks",
    "time_limit": "The run stopped at {step} after {time}, at its limit run.max_minutes",
    "signal": "The run was stopped by a signal at {step}, after {time}",
    "nonfinite": "The run ended after {step}, because numbers were not finite",
    "max_kl": "The run ended after {step}, because the KL exceeded health.max_kl",
    "max_parity": "The run ended after {step}, because generation and training differed by more than "
    "health.max_parity",
    "error": "The run ended with an error after {step} and {time}",
}
IN_PROGRESS = "The run is in progress: {step}, {time} after its start"
NO_END = (
    "The run has not recorded its end, so it is still in progress or was killed; its last record is {step}, "
    "{time} after its start"
)
MAX_ERROR = 300  # characters of an error that are shown
# the first metric that a run has is its result: name, short label, what it is, whether it is a share, unit
RESULTS = {
    "ppo": (
        (
            "eval/accuracy",
            "held-out accuracy",
            "the share of correct responses to held-out prompts",
            True,
            "",
        ),
        ("eval/score_mean", "held-out score", "the mean score on held-out prompts", False, ""),
        (
            "train_prompts/accuracy",
            "accuracy on training prompts",
            "the share of correct responses to training prompts",
            True,
            "",
        ),
        (
            "train_prompts/score_mean",
            "score on training prompts",
            "the mean score on training prompts",
            False,
            "",
        ),
        ("reward/score_mean", "mean score", "the mean score of the responses", False, ""),
    ),
    "sft": (
        ("eval/loss", "held-out loss", "the held-out loss", False, " nats per token"),
        ("sft/loss", "training loss", "the training loss", False, " nats per token"),
    ),
    "reward_model": (
        ("eval/accuracy", "held-out accuracy", "the share of held-out pairs in the right order", True, ""),
        ("rm/accuracy", "training accuracy", "the share of training pairs in the right order", True, ""),
    ),
}
SMALL_CHANGE = 0.01  # relative changes below it are described as no change
SMALL_KL = 5e-4  # nats, below which three decimals show 0
ENDS_AVERAGED = 5  # steps at each end over which training metrics are averaged


def describe_result(run: dict[str, Any], *, running: bool, metric: str | None = None) -> list[str]:
    """Returns how a run of ``read_run`` ended, what it reached, and what deserves attention."""
    return [how_it_ended(run, running), what_it_reached(run, metric), what_needs_attention(run)]


def common_results(runs: Sequence[dict[str, Any]]) -> list[str | None]:
    """Returns the metric that is the result of each run: the first one that all runs of its stage have."""
    common = {}
    for stage in {run["stage"] for run in runs}:
        measured = [set(result_values(run)) for run in runs if run["stage"] == stage]
        names = [name for name, *_ in RESULTS.get(stage, RESULTS["ppo"])]
        common[stage] = next((name for name in names if all(name in one for one in measured)), None)
    return [common[run["stage"]] for run in runs]


def result_values(run: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the values of all metrics that can be the result of a run."""
    return run["trainPrompts"] | {name: curve["values"] for name, curve in run["series"].items()}


def result_of(run: dict[str, Any], metric: str | None = None) -> dict[str, Any] | None:
    """Returns ``metric`` or else the main metric of a run, with its values at both ends, or None."""
    values = result_values(run)
    for name, label, what, share, unit in RESULTS.get(run["stage"], RESULTS["ppo"]):
        if name in values and metric in (None, name):
            averaged = not name.startswith(("eval/", "train_prompts/"))
            before, after = first_and_last(values[name], averaged=averaged)
            return {
                "name": name,
                "label": label,
                "what": what,
                "share": share,
                "unit": unit,
                "before": before,
                "after": after,
            }
    return None


def first_and_last(values: list[float], *, averaged: bool) -> tuple[float, float]:
    """Returns the first and the last value; ``averaged`` takes the mean of some values at both ends."""
    count = max(1, min(ENDS_AVERAGED, len(values) // 4)) if averaged else 1
    return sum(values[:count]) / count, sum(values[-count:]) / count


def how_it_ended(run: dict[str, Any], running: bool) -> str:
    """Returns the first sentence: progress, duration and the reason of the end."""
    reason, error = run["endedBy"], run["summary"].get("error")
    sentence = IN_PROGRESS if running else NO_END if reason is None else ENDS.get(reason, ENDS["error"])
    planned = f" of {run['plannedSteps']}" if run["plannedSteps"] else ""
    end = sentence.format(
        steps=run["lastStep"], step=f"step {run['lastStep']}{planned}", time=duration(run["seconds"])
    )
    return f"{end}: {str(error)[:MAX_ERROR]}." if error and reason and not running else f"{end}."


def what_it_reached(run: dict[str, Any], metric: str | None = None) -> str:
    result = result_of(run, metric)
    if result is None:
        return "It has no result to show, because it has logged no score and no loss."
    shown: Callable[[float], str] = percent if result["share"] else number
    what, before, after = result["what"], result["before"], result["after"]
    what = what[0].upper() + what[1:]
    if len(result_values(run)[result["name"]]) == 1:
        return f"{what} is {shown(after)}{result['unit']}; it was measured once."
    if abs(after - before) <= SMALL_CHANGE * max(abs(before), abs(after)):
        return f"{what} stayed at {shown(after)}{result['unit']}."
    verb = "rose" if after > before else "fell"
    return f"{what} {verb} from {shown(before)} to {shown(after)}{result['unit']}."


def what_needs_attention(run: dict[str, Any]) -> str:
    """Returns the distance from the reference, if there is one, and the number of alarms."""
    alarms = [event for event in run["events"] if event["kind"] == "alarm"]
    if not run["events"]:
        alarm = "events of this run were not recorded"
    elif not alarms:
        alarm = "no alarm fired"
    else:
        alarm = "one alarm fired" if len(alarms) == 1 else f"{len(alarms)} alarms fired"
    series = run["series"]
    if "kl/ref_seq_mean" in series:
        nats = series["kl/ref_seq_mean"]["values"][-1]
        kl = number(nats) if nats >= SMALL_KL else "about 0"  # an estimate from samples can be negative
        length = series.get("rollout/resp_len_mean")
        tokens = f", with responses of {number(length['values'][-1])} tokens" if length else ""
        return f"The policy is {kl} nats per response away from the reference{tokens}; {alarm}."
    return f"{alarm[0].upper()}{alarm[1:]}."


def number(value: float) -> str:
    """Formats a number with three significant digits, and without exponent if it is of usual size."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
        return f"{value:,.{digits}f}"
    return f"{value:.2g}"


def percent(value: float) -> str:
    """Formats a share with one decimal, rounding halves up as the page's own script does."""
    return f"{math.floor(1000 * value + 0.5) / 10:.1f} %"


def duration(seconds: float | None) -> str:
    """Formats seconds as 6.6 s, 42 s, 4 min 12 s, 3 h 5 min or 2 d 4 h."""
    if seconds is None:
        return "an unknown time"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s".removesuffix(" 0 s")
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"
