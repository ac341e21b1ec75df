"""Logs to Trackio from a child process (child.py)."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from ppo_ds.errors import printable
from ppo_ds.storage.drafts import write_file
from ppo_ds.tracking.child import ChildTracker, read_run_id

CHILD = Path(__file__).with_name("trackio_child.py")


class TrackioTracker(ChildTracker):
    """Logs to Trackio's local database or, with ``space``, to a Hugging Face Space."""

    label = "trackio"
    data_hint = "metrics.jsonl and samples/ have all of it"

    def __init__(
        self,
        run_dir: str | os.PathLike,
        *,
        project: str,
        name: str,
        space: str | None = None,
        start_timeout: float = 60.0,
        finish_timeout: float = 60.0,
    ):
        """Initializes the tracker; timeouts are in seconds.

        Trackio identifies runs by their name. The name is therefore followed by an id, which is stored in
        ``run_dir/trackio.id``, so that a resumed run continues its own Trackio run.
        """
        super().__init__(run_dir, finish_timeout=finish_timeout)
        self._project, self._name, self._space = project, name, space
        self._start_timeout = start_timeout

    def start(self, config: dict[str, Any]) -> None:
        """Starts Trackio, or continues without it after a warning."""
        try:
            run_id = read_run_id(self._id_file) or secrets.token_hex(4)
            options = {
                "project": self._project,
                "name": f"{self._name}-{run_id}",
                "space": self._space,
                "config": config,
            }
            reply = self.launch(CHILD, options, self._start_timeout)
            if "started" in reply:
                print(printable(f"trackio: {reply['started']}"), flush=True)
                write_file(self._id_file, run_id + "\n")
            elif reply["failed"].startswith("ModuleNotFoundError: No module named 'trackio'"):
                self.warn(
                    "is not installed; run: pip install -c constraints.txt -e '.[trackio]'; "
                    "continuing without it"
                )
            else:
                self.warn(f"failed ({reply['failed']}); continuing without it")
        except OSError as error:  # the disk is full, or no process can be created
            self.stop()
            self.warn(f"cannot be started ({error}); continuing without it")
