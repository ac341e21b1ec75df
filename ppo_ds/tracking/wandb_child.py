"""Runs wandb in the process that ``wandb.py`` starts.

It reads JSON lines from standard input (options, then log, samples and finish messages) and writes replies to
standard output. If the input ends without a finish message (the trainer was killed), the run is closed as
failed. wandb's own output goes to standard error, which is a log file.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import traceback
from typing import Any, TextIO

ORPHAN_TIMEOUT = 20.0  # seconds to close the run after the trainer has died
MAX_REFUSED = 20  # consecutive messages that wandb refuses before this process gives up


def main() -> None:
    # Launchers signal every descendant. This process must outlive the signal to receive the trainer's last
    # messages; it exits when its input ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    messages = open(0, encoding="utf-8", closefd=False)  # UTF-8 whatever the locale
    options = json.loads(messages.readline() or "null")
    if options is None:
        return
    try:
        import wandb

        settings = wandb.Settings(init_timeout=options.pop("init_timeout"), console="off", silent=True)
        run = wandb.init(**options, resume="allow", settings=settings)
        # A resumed or rolled-back run repeats steps. wandb's own step counter cannot go back, and wandb drops
        # what is logged below it, so the metric "step" is the axis instead.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
    except Exception as error:  # the trainer continues without wandb, whatever the reason
        lines = str(error).strip().splitlines()
        _send(replies, failed=": ".join([type(error).__name__, *lines[:1]]))
        return
    online = options["mode"] == "online"
    _send(replies, started=run.url if online else f"to upload: wandb sync {run.settings.sync_dir}")
    finished, refused = _serve(run, messages)
    if finished is None:
        threading.Timer(ORPHAN_TIMEOUT, os._exit, [1]).start()
    run.finish(exit_code=0 if finished else 1)
    _send(replies, finished=True, refused=refused)
    os._exit(0)  # skips wandb's exit hooks and the timer


def _serve(run: Any, messages: TextIO) -> tuple[dict[str, Any] | None, int]:
    """Forwards messages to wandb until the finish message.

    Returns the summary (None if the input ended without it) and the number of messages that wandb refused. A
    refused message does not affect later messages: a table, for example, needs the server, which may be
    unreachable for a minute.
    """
    tables: dict[str, Any] = {}
    refused = consecutive = 0
    for line in messages:
        message = json.loads(line)
        if "finish" in message:
            run.summary.update({key: value for key, value in message["finish"].items() if value is not None})
            return message["finish"], refused
        try:
            if "log" in message:
                run.log(message["log"] | {"step": message["step"]})
            else:
                log_samples(run, tables, **message)
            consecutive = 0
        except Exception:
            traceback.print_exc()
            refused, consecutive = refused + 1, consecutive + 1
            if consecutive == MAX_REFUSED:
                raise
    return None, refused


def log_samples(
    run: Any, tables: dict[str, Any], samples: list[dict[str, Any]], split: str, step: int
) -> None:
    """Appends rows to the table of a split; in INCREMENTAL mode, only the new rows are uploaded each time."""
    import wandb

    if split not in tables:
        tables[split] = wandb.Table(
            columns=["step", *samples[0]], log_mode="INCREMENTAL", allow_mixed_types=True
        )
    for row in samples:
        cells = [row.get(column) for column in tables[split].columns[1:]]
        texts = [
            cell
            if cell is None or isinstance(cell, str | int | float)
            else json.dumps(cell, ensure_ascii=False)
            for cell in cells
        ]
        tables[split].add_data(step, *texts)
    run.log({f"samples/{split}": tables[split], "step": step})


def _send(stream: TextIO, **content: Any) -> None:
    try:
        print(json.dumps(content), file=stream, flush=True)
    except BrokenPipeError:
        pass  # the trainer is gone; the run is still closed


if __name__ == "__main__":
    main()
