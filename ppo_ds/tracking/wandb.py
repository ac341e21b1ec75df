"""Logs to Weights & Biases from a child process (child.py).

After a failure, online mode falls back to offline mode, and offline mode to no wandb, with a one-line warning
each time. ``metrics.jsonl`` remains the complete record.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppo_ds.errors import printable
from ppo_ds.storage.drafts import write_file
from ppo_ds.tracking.child import ChildTracker, read_run_id

CHILD = Path(__file__).with_name("wandb_child.py")
DELETED = "created and deleted"  # the server's message for the id of a deleted run, which cannot be reused
START_MARGIN = 15.0  # extra seconds, so that wandb can report its own start timeout with the cause
UPLOAD_RATE = 10e6  # bytes per second: the slowest upload of a model that finish waits for


class WandbTracker(ChildTracker):
    """Logs to wandb in online or offline mode. In disabled mode no tracker is created."""

    label = "wandb"

    def __init__(
        self,
        run_dir: str | os.PathLike,
        *,
        mode: str,
        project: str,
        name: str,
        entity: str | None = None,
        tags: Sequence[str] = (),
        log_report: bool = False,
        log_model: bool = False,
        start_timeout: float = 30.0,
        finish_timeout: float = 60.0,
    ):
        """Initializes the tracker; timeouts are in seconds.

        The run id is stored in ``run_dir/wandb.id``, so that a resumed run continues the same wandb run.
        ``log_report`` and ``log_model`` upload report.html and the exported model when the run ends.
        """
        super().__init__(run_dir, finish_timeout=finish_timeout)
        # when wandb is killed, up to 32 KB that it has buffered are lost
        self.data_hint = (
            f"metrics.jsonl and samples/ have all of it, {self.run_dir / 'wandb'} has most of it, which "
            "wandb sync uploads"
        )
        self._options = {"project": project, "name": name, "entity": entity, "tags": list(tags)}
        self._mode = mode
        self._log_report, self._log_model = log_report, log_model
        self._start_timeout = start_timeout

    def start(self, config: dict[str, Any]) -> None:
        """Starts wandb; falls back from online to offline, and from offline to no wandb."""
        try:
            run_id = read_run_id(self._id_file) or secrets.token_hex(4)
            for mode in ("online", "offline") if self._mode == "online" else ("offline",):
                reply = self._launch(mode, run_id, config)
                if DELETED in reply.get("failed", ""):
                    self.warn(f"run {run_id} was deleted on the server; continuing as a new run")
                    run_id = secrets.token_hex(4)
                    reply = self._launch(mode, run_id, config)
                if "started" in reply:
                    print(printable(f"wandb: {mode}; {reply['started']}"), flush=True)
                    write_file(self._id_file, run_id + "\n")
                    return
                fallback = "offline" if mode == "online" else "without it"
                self.warn(f"{mode} failed ({reply['failed']}); continuing {fallback}")
        except OSError as error:  # the disk is full, or no process can be created
            self.stop()
            self.warn(f"cannot be started ({error}); continuing without it")

    def _launch(self, mode: str, run_id: str, config: dict[str, Any]) -> dict[str, Any]:
        options = {
            **self._options,
            "mode": mode,
            "id": run_id,
            "dir": str(self.run_dir),
            "init_timeout": self._start_timeout,
            "config": config,
        }
        return self.launch(CHILD, options, self._start_timeout + START_MARGIN)

    def finish(self, summary: dict[str, Any]) -> None:
        """Ends the run; uploads the report and the model if the config asks for it and they exist.

        The model is only uploaded if the run has exported it, which it does not after a signal or an error.
        """
        report, model = self.run_dir / "report.html", self.run_dir / "model"
        if self._log_report and report.is_file():
            self.send({"artifact": str(report), "kind": "report"})
        exported = summary.get("exit_reason") in ("done", "stop_at_step", "time_limit")
        if self._log_model and exported and model.is_dir():
            self.send({"artifact": str(model), "kind": "model"})
            size = sum(file.stat().st_size for file in model.rglob("*") if file.is_file())
            self._finish_timeout += size / UPLOAD_RATE
        super().finish(summary)
