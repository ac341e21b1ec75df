"""Runs Trackio in the process that ``trackio.py`` starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))  # ppo_ds need not be installed

from ppo_ds.tracking.child_main import run_client  # noqa: E402


class TrackioClient:
    """A run of Trackio; ``child_main.Client`` documents the methods."""

    def __init__(self, run: Any):
        self.run = run

    def log(self, step: int, metrics: dict[str, float]) -> None:
        # Trackio has its own column "time", with the date
        self.run.log({name if name != "time" else "run_s": value for name, value in metrics.items()}, step)

    def samples(self, step: int, rows: list[dict[str, Any]], split: str) -> None:
        import trackio

        table = trackio.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({f"samples/{split}": table}, step)

    def histograms(self, step: int, histograms: dict[str, dict[str, list[float]]]) -> None:
        import trackio

        shown = {
            name: trackio.Histogram(np_histogram=(one["counts"], one["edges"]))
            for name, one in histograms.items()
        }
        self.run.log(shown, step)

    def alert(self, step: int, text: str) -> None:
        import trackio

        self.run.alert(title="alarm", text=text, level=trackio.AlertLevel.WARN, step=step)

    def artifact(self, path: str, kind: str) -> None:
        raise NotImplementedError(f"no upload of {path}")

    def finish(self, summary: dict[str, Any] | None) -> None:
        self.run.finish()


def start(options: dict[str, Any]) -> tuple[TrackioClient, str]:
    """Starts a run; returns it with its address, or with the command that shows a local run."""
    space = options.pop("space") or os.environ.get("TRACKIO_SPACE_ID")
    server = os.environ.get("TRACKIO_SERVER_URL")
    if not space and not server:
        # Trackio would ask the Hub for the name of the token's user
        os.environ["HF_HUB_OFFLINE"] = "1"
    import trackio

    run = trackio.init(
        **options, space_id=space, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
    )
    if space:
        return TrackioClient(run), f"https://huggingface.co/spaces/{space}"
    if server:
        return TrackioClient(run), server.partition("?")[0]  # the query holds a token
    return TrackioClient(run), f"to show: trackio show --project {options['project']}"


if __name__ == "__main__":
    run_client(start)
