"""Runs wandb in the process that ``wandb.py`` starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # ppo_ds need not be installed

from ppo_ds.tracking.child_main import run_client  # noqa: E402

MAX_TITLE = 63  # characters of an alert's title


class WandbClient:
    """A run of wandb; ``child_main.Client`` documents the methods."""

    def __init__(self, run: Any):
        self.run = run
        self.tables: dict[str, Any] = {}  # by split

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.run.log(metrics | {"step": step})

    def samples(self, step: int, rows: list[dict[str, Any]], split: str) -> None:
        """Appends rows to the table of a split; in INCREMENTAL mode, only the new rows are uploaded."""
        import wandb

        if split not in self.tables:
            columns = ["step", *rows[0]]
            self.tables[split] = wandb.Table(columns, log_mode="INCREMENTAL", allow_mixed_types=True)
        table = self.tables[split]
        for row in rows:
            table.add_data(step, *(_cell(row.get(column)) for column in table.columns[1:]))
        self.run.log({f"samples/{split}": table, "step": step})

    def histograms(self, step: int, histograms: dict[str, dict[str, list[float]]]) -> None:
        import wandb

        shown = {
            name: wandb.Histogram(np_histogram=(one["counts"], one["edges"]))
            for name, one in histograms.items()
        }
        self.run.log(shown | {"step": step})

    def alert(self, step: int, text: str) -> None:
        # The title is taken from the text, because wandb drops a second alert with the same title within a
        # minute.
        self.run.alert(title=text[:MAX_TITLE], text=f"step {step}: {text}", level="WARN")

    def artifact(self, path: str, kind: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"{kind}-{self.run.id}", type=kind)
        # immutable: wandb uploads the files in place instead of copying them first
        if Path(path).is_dir():
            artifact.add_dir(path, policy="immutable", skip_cache=True)
        else:
            artifact.add_file(path, policy="immutable", skip_cache=True)
        self.run.log_artifact(artifact)

    def finish(self, summary: dict[str, Any] | None) -> None:
        known = {name: value for name, value in (summary or {}).items() if value is not None}
        self.run.summary.update(known)
        self.run.finish(exit_code=1 if summary is None else 0)


def _cell(value: Any) -> Any:
    plain = value is None or isinstance(value, str | int | float)
    return value if plain else json.dumps(value, ensure_ascii=False)


def start(options: dict[str, Any]) -> tuple[WandbClient, str]:
    """Starts a run; returns it with its address, or with the command that uploads an offline run."""
    import wandb

    settings = wandb.Settings(init_timeout=options.pop("init_timeout"), console="off", silent=True)
    run = wandb.init(**options, resume="allow", settings=settings)
    # A resumed or rolled-back run repeats steps. wandb's own step counter cannot go back, and wandb drops
    # what is logged below it, so the metric "step" is the axis instead.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    online = options["mode"] == "online"
    return WandbClient(run), run.url if online else f"to upload: wandb sync {run.settings.sync_dir}"


if __name__ == "__main__":
    run_client(start)
