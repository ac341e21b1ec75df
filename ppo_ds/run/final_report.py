"""Final report of a run: learning curves, held-out metrics and sample responses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ppo_ds.commands.entry_points import command
from ppo_ds.run.stage import HELD_OUT, TRAIN_PROMPTS
from ppo_ds.run.state import TrainState
from ppo_ds.tracking.catalogue import HELDOUT_TABLE
from ppo_ds.tracking.curves import before_after, plot_curves
from ppo_ds.tracking.html.report import FILE_NAME


def write_report(
    run_dir: Path,
    title: str,
    state: TrainState,
    *,
    exported: bool,
    checkpoint: str | None = None,
    best: Mapping[str, Any] = MappingProxyType({}),
    lists_files: bool = True,
) -> None:
    """Draws curves.png and prints the results and the saved files of a run. Only rank 0 calls it.

    ``exported`` is False if a signal or a failure ended the run; model/ is then not written. ``checkpoint``
    is a line about the last checkpoint; ``best`` is TrainState.best_metrics. Without ``lists_files``, the
    saved files are not printed.
    """
    before, after = state.first_eval, state.last_eval
    drawn = plot_curves(run_dir / "metrics.jsonl", run_dir / "curves.png", title=title, before=before)
    scores, data = {}, HELD_OUT
    if before and after:
        data = next(iter(before)).partition("/")[0]
        more = [name.removeprefix(f"{data}/") for name in before if name.endswith("_mean")]  # eval.rewards
        measured = [name for name in dict.fromkeys((*HELDOUT_TABLE, *more)) if f"{data}/{name}" in before]
        scores = {name: (before.get(f"{data}/{name}"), after.get(f"{data}/{name}")) for name in measured}
    last_rows = {row["prompt"]: row for row in state.last_rows}
    samples = [
        {"prompt": row["asked"], "before": row["response"], "after": now["response"], "score": now["score"]}
        for row in state.first_rows
        if (now := last_rows.get(row["prompt"]))
    ]
    saved: dict[str, Path | str] = {"model": run_dir / "model"} if exported else {}
    if drawn:
        saved["curves"] = run_dir / "curves.png"
    if (run_dir / FILE_NAME).exists():
        saved["report"] = run_dir / FILE_NAME
    saved["metrics"] = run_dir / "metrics.jsonl"
    if best:
        folder = run_dir / "checkpoints" / f"step_{best['best_step']:06d}"
        saved["best"] = (
            f"{folder}   {best['best_by']} {best['best_value']:.4g}; "
            f"{command('export')} {run_dir} --best writes it as a model folder"
        )
    if checkpoint:
        saved["checkpoint"] = checkpoint
    files = saved if lists_files else {}
    older = state.last_eval_step is not None and state.last_eval_step < state.step
    when = f"after: step {state.last_eval_step}; the model has {state.step} steps" if older else ""
    before_after(scores, samples, files, trained_on=data == TRAIN_PROMPTS, when=when)
