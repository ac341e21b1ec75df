"""Logs to Trackio."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ppo_ds.config.sections.run import TrackioConfig
from ppo_ds.storage.drafts import write_file
from ppo_ds.tracking.background import Dashboard, run_id
from ppo_ds.tracking.tracker import EventKind, Record
from ppo_ds.types import Histogram


class TrackioTracker(Dashboard):
    """Logs to Trackio's local database, to a Hugging Face Space or to a Trackio server.

    Trackio identifies runs by name, so an id is added to the name; ``run_dir/trackio.id`` stores the id.
    """

    name = "trackio"

    def __init__(self, run_dir: Path, config: TrackioConfig, run_name: str):
        self._run_dir, self._config, self._run_name = run_dir, config, run_name
        self._run: Any = None

    def start(self, config: dict[str, Any]) -> None:
        import trackio

        file = self._run_dir / "trackio.id"
        own_id = run_id(file)
        space = self._config.space or os.environ.get("TRACKIO_SPACE_ID")
        if not space and not os.environ.get("TRACKIO_SERVER_URL"):
            # a local run uses no network; Trackio would request the name of the token's user from the Hub
            trackio.Run._get_username = lambda run: None
        self._run = trackio.init(
            project=self._config.project,
            name=f"{self._run_name}-{own_id}",
            config=config,
            space_id=space,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        write_file(file, own_id + "\n")

    def log(self, step: int, metrics: Record) -> None:
        # Trackio has its own column "time", with the date
        self._run.log({name if name != "time" else "run_s": value for name, value in metrics.items()}, step)

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        import trackio

        table = trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({f"samples/{split}": table}, step)

    def histograms(self, step: int, histograms: dict[str, Histogram]) -> None:
        import trackio

        shown = {name: trackio.Histogram(np_histogram=(h.counts, h.edges)) for name, h in histograms.items()}
        self._run.log(shown, step)

    def event(self, step: int, kind: EventKind, text: str) -> None:
        """Sends alarms as alerts; other events are not sent."""
        import trackio

        if kind == "alarm":
            self._run.alert(title="alarm", text=text, level=trackio.AlertLevel.WARN, step=step)

    def finish(self, summary: dict[str, Any]) -> None:
        self._run.finish()
