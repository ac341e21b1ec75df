"""Reads a run directory into the data that report.html shows, bounded in size."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_ds.config.types import leaves
from ppo_ds.errors import UserError
from ppo_ds.storage.reading import DamagedFile, read_json, read_yaml
from ppo_ds.tracking.formatting import format_duration
from ppo_ds.tracking.jsonl import is_number, read_curves, read_events, read_metrics, read_rows
from ppo_ds.tracking.tracker import censored_row

MAX_POINTS = 1000  # points of a curve
MAX_EVENTS = 500
MAX_STEPS_OF_SAMPLES = 48  # steps whose samples are shown, for each split
MAX_PROMPT = 6_000  # characters
MAX_RESPONSE = 20_000  # characters
SAMPLE_BYTES = 3_000_000  # of all runs of a page
STAGES = {"sft": "Supervised fine-tuning", "reward_model": "Reward model"}
HELD_OUT = "eval"  # the split and the prefix of metrics on held-out data
NOT_METRICS = {"step", "time", "episodes", "tokens"}

Record = dict[str, Any]


def read_run(run_dir: Path, *, sample_bytes: int = SAMPLE_BYTES) -> dict[str, Any]:
    """Returns all data of a run for the report; ``sample_bytes`` bounds the size of the samples.

    Missing and damaged files and lines are left out. Raises UserError if ``run_dir`` is no run directory, has
    links to files outside of it, or has files that are too large.
    """
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such run directory")
    records = read_metrics(run_dir / "metrics.jsonl")
    events = current_events(read_events(run_dir / "events.jsonl"))
    for event in events:
        event["after"] = format_duration(event["time"], whole=True)
    files = sample_files(run_dir)
    if not records and not events and not any(files.values()):
        raise UserError(f"{run_dir}: no run directory: it has no metrics.jsonl, samples/ or events.jsonl")
    settings = read_object(run_dir / "config.yaml", run_dir)
    summary = read_object(run_dir / "summary.json", run_dir)
    ended = ended_by(summary, records, events)
    section = settings.get("run")
    run = section if isinstance(section, dict) else {}
    seconds = [summary.get("wall_s") if ended else None, records[-1].get("time") if records else None]
    first = first_evaluation(run_dir, summary)
    samples = read_samples(files, sample_bytes)
    return {
        "name": str(run.get("name") or run_dir.resolve().name),
        "directory": str(run_dir),
        "stage": str(settings.get("stage", "ppo")),
        "method": method(settings),
        "plannedSteps": run.get("steps"),
        "summary": summary,
        "endedBy": ended,
        "seconds": next((value for value in seconds if is_number(value)), None),
        "lastStep": records[-1]["step"] if records else 0,
        "settings": flattened(settings),
        "series": curves(records, first),
        "trainPrompts": train_prompts(summary) if ended else {},
        "events": events if len(events) <= MAX_EVENTS else [events[0], *events[1 - MAX_EVENTS :]],
        "samples": samples,
        "stepSizes": step_sizes(records, {row["step"] for row in samples["rows"]}),
    }


def method(settings: Record) -> str:
    """Returns the algorithm's name, from advantage estimator and policy loss, or the stage's name."""
    if settings.get("stage", "ppo") != "ppo":
        return STAGES.get(str(settings["stage"]), str(settings["stage"]))
    values = flattened(settings)
    estimator, loss = (values.get(f"algo.{key}") for key in ("advantage.estimator", "policy.loss"))
    name = "PPO" if estimator in (None, "gae") else str(estimator).upper()
    return name if loss in (None, "ppo") else f"{name}, {loss} loss"


def flattened(tree: Record) -> dict[str, Any]:
    """Returns the leaves of nested dicts by their dotted keys; lists and empty dicts are leaves."""
    return {".".join(path): value for path, value in leaves(tree) if path}


# -- events --------------------------------------------------------------------------------------------------


def current_events(events: Sequence[Record]) -> list[Record]:
    """Returns all events except the alarms of steps that were repeated after a resume or a rollback."""
    kept, repeated_after = [], math.inf
    for event in reversed(events):
        if event["kind"] in ("resumed", "rolled_back"):
            repeated_after = min(repeated_after, event["step"])
        if event["kind"] != "alarm" or event["step"] <= repeated_after:
            kept.append(event)
    return kept[::-1]


# -- evaluations ---------------------------------------------------------------------------------------------


def first_evaluation(run_dir: Path, summary: Record) -> dict[str, float]:
    """Returns the held-out metrics before training, from the summary or else the newest checkpoint."""
    first = {
        f"{HELD_OUT}/{found[1].removeprefix('pair_')}": value
        for key, value in summary.items()
        if (found := re.fullmatch(r"heldout_(\w+)_before", key))
    }
    if not first:
        states = sorted((run_dir / "checkpoints").glob("step_*/state.json"))
        content: Any = read_object(states[-1], run_dir) if states else {}
        for key in ("state", "progress", "first_eval"):
            content = content.get(key) if isinstance(content, dict) else None
        first = content if isinstance(content, dict) else {}
    return {name: value for name, value in first.items() if is_number(value)}


def train_prompts(summary: Record) -> dict[str, list[float]]:
    """Returns the metrics on training prompts before and after a run that has no held-out prompts."""
    values = {}
    for key, before in summary.items():
        found = re.fullmatch(r"train_prompts_(\w+)_before", key)
        after = summary.get(f"train_prompts_{found[1]}_after") if found else None
        if found and is_number(before) and is_number(after):
            values[f"train_prompts/{found[1]}"] = [before, after]
    return values


# -- curves --------------------------------------------------------------------------------------------------


def curves(records: Sequence[Record], first: dict[str, float]) -> dict[str, dict[str, list[float]]]:
    """Returns at most MAX_POINTS steps and values of every metric, with ``first`` as step 0."""
    points = {name: curve for name, curve in read_curves(records).items() if name not in NOT_METRICS}
    for name, value in first.items():
        if name in points and points[name][0][0] > 0:
            points[name][0].insert(0, 0)
            points[name][1].insert(0, value)
    return {  # with six significant digits, more than a chart shows
        name: {"steps": [steps[i] for i in kept], "values": [float(f"{values[i]:.6g}") for i in kept]}
        for name, (steps, values) in points.items()
        for kept in [thinned(values, MAX_POINTS)]
    }


def thinned(values: Sequence[float], limit: int) -> Sequence[int]:
    """Returns the indices of at most ``limit`` values: the first, the last, and the extremes of each part."""
    count = len(values)
    if count <= limit:
        return range(count)
    parts = (limit - 2) // 2
    kept = {0, count - 1}
    for part in range(parts):
        inside = range(part * count // parts, (part + 1) * count // parts)
        kept |= {min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)}
    return sorted(kept)


# -- samples -------------------------------------------------------------------------------------------------


def sample_files(run_dir: Path) -> dict[str, list[tuple[int, Path]]]:
    """Returns the steps and files of the samples of each split, in order."""
    files: dict[str, list[tuple[int, Path]]] = {}
    for path in sorted((run_dir / "samples").glob("*step_*.jsonl")):
        if found := re.fullmatch(r"(?:(\w+?)_)?step_(\d+)\.jsonl", path.name):
            files.setdefault(found[1] or "train", []).append((int(found[2]), path))
    return {split: sorted(steps) for split, steps in files.items()}


def read_samples(files: dict[str, list[tuple[int, Path]]], limit: int) -> dict[str, Any]:
    """Reads samples of evenly spaced steps, at most ``limit`` bytes, and at least one row of each step.

    Returns {"prompts": the distinct prompts, "rows": rows with the index of their prompt, "shown": {split:
    [steps shown, steps recorded]}}.
    """
    prompts: dict[str, int] = {}
    rows: list[Record] = []
    shown = {}
    for split, steps in files.items():
        chosen = [steps[i] for i in evenly(len(steps), MAX_STEPS_OF_SAMPLES)]
        shown[split] = [len(chosen), len(steps)]
        allowance = limit // len(files) // max(len(chosen), 1)
        for step, path in chosen:
            spent = 0
            for index, row in enumerate(read_rows(path, path.parent.parent)):
                short = short_row(censored_row(row))
                spent += len(json.dumps(short, ensure_ascii=False, default=str).encode(errors="replace"))
                if index > 0 and spent > allowance:
                    break
                short["prompt"] = prompts.setdefault(short["prompt"], len(prompts))
                rows.append({"split": split, "step": step, **short})
    return {"prompts": list(prompts), "rows": rows, "shown": shown}


def step_sizes(records: Sequence[Record], steps: set[int]) -> dict[int, int]:
    """Returns the number of samples of each step; omits a step if it or the one before has no record."""
    made = {record["step"]: record["episodes"] for record in records if is_number(record.get("episodes"))}
    made.setdefault(0, 0)
    return {step: made[step] - made[step - 1] for step in steps if {step, step - 1} <= made.keys()}


def evenly(count: int, limit: int) -> list[int]:
    """Returns at most ``limit`` indices below ``count``: evenly spaced, with the first and the last."""
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def short_row(row: Record) -> Record:
    """Returns a row with shortened texts; "asked" (a chat's last message), if any, replaces the prompt."""
    short = {key: value for key, value in row.items() if key not in ("asked", "step", "split")}
    prompt, response = str(row.get("asked") or row.get("prompt", "")), str(row.get("response", ""))
    if len(response) > MAX_RESPONSE:  # the shortened response is shown without its turns
        short.pop("turns", None)
    short["prompt"], short["response"] = cut(prompt, MAX_PROMPT), cut(response, MAX_RESPONSE)
    if isinstance(columns := row.get("columns"), dict) and "answer" in columns:
        short["expected"] = str(columns["answer"])
    return {
        key: cut(value, MAX_PROMPT) if isinstance(value, str) and key != "response" else value
        for key, value in short.items()
    }


def cut(text: str, limit: int) -> str:
    """Returns a text of at most ``limit`` characters and a note of how many are missing."""
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit:,} more characters)"


# -- other files ---------------------------------------------------------------------------------------------


def read_object(path: Path, run_dir: Path) -> Record:
    """Returns the object of a JSON or YAML file inside ``run_dir``; {} if the file is missing or damaged."""
    try:
        content = (read_yaml if path.suffix == ".yaml" else read_json)(path, run_dir)
    except (OSError, DamagedFile):
        return {}
    return content if isinstance(content, dict) else {}


def ended_by(summary: Record, records: Sequence[Record], events: Sequence[Record]) -> str | None:
    """Returns why the run ended; None without a summary, or if the run was started again since then."""
    kinds = [event["kind"] for event in events if event["kind"] in ("started", "resumed", "ended")]
    steps = summary.get("steps")
    older = bool(records) and is_number(steps) and steps < records[-1]["step"]
    if not summary or older or kinds[-1:] not in ([], ["ended"]):
        return None
    return str(summary.get("exit_reason"))
