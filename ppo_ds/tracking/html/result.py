"""Describes how a run ended, and its result, which is the value of one metric."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ppo_ds.tracking.catalogue import METRICS
from ppo_ds.tracking.formatting import format_change, format_duration, format_number

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
    "reward_error": "The run ended after {step}, because the reward failed",
    "error": "The run ended with an error after {step} and {time}",
}
IN_PROGRESS = "The run is in progress: {step}, {time} after its start"
NO_END = (
    "The run has not recorded its end, so it is still in progress or was killed; its last record is {step}, "
    "{time} after its start"
)
MAX_ERROR = 300  # characters of an error that are shown
# stage -> {metric: label}; the first of the metrics that a run has is its result
RESULTS = {
    "ppo": {
        "eval/accuracy": "held-out accuracy",
        "eval/score_mean": "held-out score",
        "train_prompts/accuracy": "accuracy on {count} training prompts, evaluated after the run",
        "train_prompts/score_mean": "score on {count} training prompts, evaluated after the run",
        "reward/score_mean": "mean score",
    },
    "sft": {"eval/loss": "held-out loss, nats per token", "sft/loss": "training loss, nats per token"},
    "reward_model": {"eval/accuracy": "held-out accuracy", "rm/accuracy": "training accuracy"},
}
ENDS_AVERAGED = 5  # steps at each end over which training metrics are averaged


def common_results(runs: Sequence[dict[str, Any]]) -> list[str | None]:
    """Returns, for each run, the first metric in RESULTS that all runs of its stage have, or None."""
    common = {}
    for stage in {run["stage"] for run in runs}:
        measured = [set(result_values(run)) for run in runs if run["stage"] == stage]
        names = RESULTS.get(stage, RESULTS["ppo"])
        common[stage] = next((name for name in names if all(name in one for one in measured)), None)
    return [common[run["stage"]] for run in runs]


def result_values(run: dict[str, Any]) -> dict[str, list[float]]:
    """Returns the values of all metrics that can be the result of a run."""
    return run["trainPrompts"] | {name: curve["values"] for name, curve in run["series"].items()}


def result_of(run: dict[str, Any], name: str | None) -> dict[str, Any] | None:
    """Returns a metric's first and last value as text; for training metrics, means over several steps."""
    if name is None:
        return None
    values = result_values(run)[name]
    averaged = not name.startswith(("eval/", "train_prompts/"))
    count = max(1, min(ENDS_AVERAGED, len(values) // 4)) if averaged else 1
    before, after = sum(values[:count]) / count, sum(values[-count:]) / count
    percent = name.endswith("accuracy")
    form = ".1%" if percent else ".3f"
    texts = (format_number(before, form), format_number(after, form), format_change(before, after, percent))
    start, end, change = (text.replace("-", "\u2212").replace("%", "\u202f%") for text in texts)
    label = RESULTS.get(run["stage"], RESULTS["ppo"])[name]
    label = label.format(count=run["settings"].get("eval.train_prompts", "some"))
    return {
        "label": f"{label}, last {count} steps" if count > 1 else label,
        "before": start,
        "after": end,
        "change": change,
    }


def how_it_ended(run: dict[str, Any], running: bool) -> str:
    """Returns progress, duration and the reason for the end as a sentence."""
    reason, error = run["endedBy"], run["summary"].get("error")
    sentence = IN_PROGRESS if running else NO_END if reason is None else ENDS.get(reason, ENDS["error"])
    planned = f" of {run['plannedSteps']}" if run["plannedSteps"] else ""
    end = sentence.format(
        steps=run["lastStep"],
        step=f"step {run['lastStep']}{planned}",
        time=format_duration(run["seconds"], whole=True),
    )
    if error and reason and not running:
        end += f": {str(error)[:MAX_ERROR]}"
    return f"{end}.{fallen_rewards(run)}"


def fallen_rewards(run: dict[str, Any]) -> str:
    """Returns a sentence on the rewards of eval.rewards that fell while the trained reward rose, or ""."""
    alarm = METRICS["eval/score_mean"].alarm
    assert alarm is not None
    texts = [event["text"] for event in run["events"] if alarm.problem in event["text"]]
    named = re.findall(r"eval/\S+_mean", texts[-1]) if texts else []
    curves = {name: run["series"][name]["values"] for name in named if name in run["series"]}
    risen = [name for name, values in curves.items() if values[-1] > values[0]]
    fell = [
        "{} fell from {} to {}".format(name, *(format_number(values[i], ".3f") for i in (0, -1)))
        for name, values in curves.items()
        if values[-1] < values[0]
    ]
    if not fell or "eval/score_mean" not in risen:
        return ""
    return f" The policy exploits the reward: while its held-out score rose, {' and '.join(fell)}."
