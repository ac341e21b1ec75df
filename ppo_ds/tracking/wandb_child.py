"""The process around wandb that ``wandb.py`` starts: JSON lines in on standard input, answers out on standard output.

The first line holds the options; then come log, samples and finish. When the input ends without a finish (the trainer was killed),
the run is closed as failed. Whatever wandb prints goes to standard error, which is a log file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, TextIO

ORPHAN_TIMEOUT = 20.0  # seconds to close the run after the trainer has died
MOST_REFUSED = 20  # messages in a row, after which this process gives up


def main() -> None:
    # Launchers signal every descendant; this process ends when its input does, after the trainer's last words.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdin.reconfigure(encoding="utf-8")  # whatever the locale says
    options = json.loads(sys.stdin.readline() or "null")
    if options is None:
        return
    try:
        run = _open(options)
    except Exception as problem:  # whatever it is, the trainer goes on without wandb
        _answer(answers, failed=_reason(problem))
        return
    _answer(
        answers,
        started=run.url if options["mode"] == "online" else f"to upload: wandb sync {run.settings.sync_dir}",
    )
    finished, refused = _serve(run)
    if finished is None:
        threading.Timer(ORPHAN_TIMEOUT, os._exit, [1]).start()
    run.finish(exit_code=0 if finished else 1)
    _answer(answers, finished=True, refused=refused)
    os._exit(0)  # not by way of wandb's exit hooks, and without the timer


def _open(options: dict[str, Any]) -> Any:
    import wandb

    settings = wandb.Settings(init_timeout=options.pop("init_timeout"), console="off", silent=True)
    run = wandb.init(**options, resume="allow", settings=settings)
    # wandb's own counter only grows, and what is logged below it is dropped; a resumed run may go back to an earlier step
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _serve(run: Any) -> tuple[dict[str, Any] | None, int]:
    """Passes on what comes until finish: its summary (None where the input ended without one), and how many messages wandb did not take.

    One that is not taken (a table is stored by way of the server, which may be away for a minute) must not cost those that follow.
    """
    tables: dict[str, Any] = {}
    refused = in_a_row = 0
    for line in sys.stdin:
        message = json.loads(line)
        if "finish" in message:
            run.summary.update({key: value for key, value in message["finish"].items() if value is not None})
            return message["finish"], refused
        try:
            _pass_on(run, tables, message)
            in_a_row = 0
        except Exception:
            traceback.print_exc()
            refused, in_a_row = refused + 1, in_a_row + 1
            if in_a_row == MOST_REFUSED:
                raise
    return None, refused


def _pass_on(run: Any, tables: dict[str, Any], message: dict[str, Any]) -> None:
    if "log" in message:
        run.log(message["log"] | {"step": message["step"]})
    else:
        _log_samples(run, tables, **message)


def _log_samples(
    run: Any, tables: dict[str, Any], samples: list[dict[str, Any]], split: str, step: int
) -> None:
    """A table that grows: INCREMENTAL uploads the new rows only, not all of them each time."""
    import wandb

    if split not in tables:
        tables[split] = wandb.Table(
            columns=["step", *samples[0]], log_mode="INCREMENTAL", allow_mixed_types=True
        )
    for row in samples:
        tables[split].add_data(step, *(_cell(row.get(column)) for column in tables[split].columns[1:]))
    run.log({f"samples/{split}": tables[split], "step": step})


def _cell(value: Any) -> Any:
    return (
        value
        if value is None or isinstance(value, str | int | float)
        else json.dumps(value, ensure_ascii=False)
    )


def _reason(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0]}" if lines else type(problem).__name__


def _answer(stream: TextIO, **content: Any) -> None:
    try:
        print(json.dumps(content), file=stream, flush=True)
    except BrokenPipeError:
        pass  # the trainer is gone; the run is closed all the same


if __name__ == "__main__":
    main()
