"""Logs to Weights & Biases. A process of wandb uploads, and retries failed uploads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from ppo_ds.config.sections.run import WandbConfig
from ppo_ds.errors import printable
from ppo_ds.storage.drafts import write_file
from ppo_ds.tracking.background import FINISH_TIMEOUT, Dashboard, first_line, run_id, warn
from ppo_ds.tracking.tracker import EventKind, Record
from ppo_ds.types import Histogram

INIT_TIMEOUT = 30.0  # seconds for a server to answer before the run continues offline
UPLOAD_RATE = 10e6  # bytes per second: the slowest upload of a model that finish waits for
MAX_TITLE = 63  # characters of an alert's title
# exit reasons after which model/ is written
SUCCESSFUL = ("done", "early_stop", "stop_at_step", "time_limit")


class WandbTracker(Dashboard):
    """Logs to wandb in online or offline mode.

    A resumed run continues the wandb run whose id is in ``run_dir/wandb.id``; repeated steps appear twice.
    """

    name = "wandb"

    def __init__(self, run_dir: Path, config: WandbConfig, run_name: str):
        self._run_dir, self._config, self._run_name = run_dir.absolute(), config, run_name
        self._tables: dict[str, Any] = {}  # by split
        self._tables_refused = False
        self._run: Any = None

    def start(self, config: dict[str, Any]) -> None:
        """Starts wandb in the configured mode. If this fails in online mode, continues in offline mode."""
        import wandb

        try:
            self._init(self._config.mode, config)
        except Exception as error:
            if self._config.mode == "offline":
                raise
            wandb.teardown()  # its process would not start a run with the same id again
            warn(f"wandb online failed ({first_line(error)}); continuing offline")
            self._init("offline", config)

    def _init(self, mode: Literal["online", "offline", "disabled"], config: dict[str, Any]) -> None:
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # before init: otherwise it may ask for a key
        file = self._run_dir / "wandb.id"
        self._run = wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            tags=list(self._config.tags),
            name=self._run_name,
            config=config,
            dir=str(self._run_dir),
            mode=mode,
            id=run_id(file),
            resume="allow",
            settings=wandb.Settings(init_timeout=INIT_TIMEOUT, console="off", silent=True),
        )
        # A resumed or rolled-back run repeats steps. wandb's step counter cannot go back, and wandb drops
        # metrics that are logged below it, so the metric "step" is the axis instead.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        write_file(file, self._run.id + "\n")
        where = self._run.url if mode == "online" else f"to upload: wandb sync {self._run.settings.sync_dir}"
        print(printable(f"wandb: {mode}; {where}"), flush=True)

    def log(self, step: int, metrics: Record) -> None:
        self._run.log(metrics | {"step": step})

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        """Appends rows to a split's table; only new rows are uploaded. If wandb rejects rows, warns once."""
        import wandb

        if split not in self._tables:
            columns = ["step", *rows[0]]
            self._tables[split] = wandb.Table(columns, log_mode="INCREMENTAL", allow_mixed_types=True)
        table = self._tables[split]
        for row in rows:
            cells = [row.get(column) for column in table.columns[1:]]
            for i, cell in enumerate(cells):
                if cell is not None and not isinstance(cell, str | int | float):
                    cells[i] = json.dumps(cell, ensure_ascii=False)
            table.add_data(step, *cells)
        try:
            self._run.log({f"samples/{split}": table, "step": step})
        except ConnectionError:  # to wandb's process, which has ended
            raise
        except Exception as error:
            if not self._tables_refused:
                warn(f"wandb refused a table of samples ({first_line(error)}); samples/ has its rows")
            self._tables_refused = True

    def histograms(self, step: int, histograms: dict[str, Histogram]) -> None:
        import wandb

        shown = {name: wandb.Histogram(np_histogram=(h.counts, h.edges)) for name, h in histograms.items()}
        self._run.log(shown | {"step": step})

    def event(self, step: int, kind: EventKind, text: str) -> None:
        """Sends alarms as alerts; other events are not sent."""
        if kind == "alarm":
            # wandb drops a second alert with the same title within a minute
            self._run.alert(title=text[:MAX_TITLE], text=f"step {step}: {text}", level="WARN")

    @property
    def finish_timeout(self) -> float:
        model = self._run_dir / "model"
        files = model.rglob("*") if self._config.log_model == "end" else ()
        return FINISH_TIMEOUT + sum(file.stat().st_size for file in files if file.is_file()) / UPLOAD_RATE

    def finish(self, summary: dict[str, Any]) -> None:
        """Ends the run; uploads the report and the exported model if configured."""
        import wandb

        succeeded = summary["exit_reason"] in SUCCESSFUL
        uploads = {"report": (self._config.log_report, self._run_dir / "report.html")}
        if succeeded:  # otherwise the folder is of an earlier end of the run
            uploads["model"] = (self._config.log_model, self._run_dir / "model")
        for kind, (when, path) in uploads.items():
            if when == "end" and path.exists():
                artifact = wandb.Artifact(f"{kind}-{self._run.id}", type=kind)
                add = artifact.add_dir if path.is_dir() else artifact.add_file
                # immutable: wandb uploads the files in place instead of copying them first
                add(str(path), policy="immutable", skip_cache=True)
                self._run.log_artifact(artifact)
        self._run.summary.update({name: value for name, value in summary.items() if value is not None})
        self._run.finish(exit_code=0 if succeeded else 1)
        wandb.teardown()  # waits for its process, which writes the end of the run to the disk
