"""Logs to TensorBoard."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from ppo_ds.tracking.child import warn
from ppo_ds.tracking.tracker import EventKind, Record
from ppo_ds.types import Histogram

FOLDER = "tensorboard"  # in the run directory


class TensorBoardTracker:
    """Writes an event file; after the first failure it warns once and writes nothing more.

    The records of each call are in the file when the call returns, so that all finished steps remain if the
    run is killed. torch's SummaryWriter is not used, because it writes from a thread, which prints a
    traceback when the disk is full; its functions that build the records are used.

    Steps that a resume or a rollback repeats replace the earlier ones: TensorBoard hides the values from the
    step after the checkpoint on.
    """

    def __init__(self, run_dir: str | os.PathLike, *, resumed_at: int = 0):
        self.folder = Path(run_dir).absolute() / FOLDER
        self._resumed_at = resumed_at
        self._writer: EventFile | None = None  # None before the start and after a failure

    def start(self, config: dict[str, Any]) -> None:
        try:
            self._writer = EventFile(self.folder)
        except ModuleNotFoundError:
            warn(
                "tensorboard is not installed; run: pip install -c constraints.txt -e '.[tensorboard]'; "
                "continuing without it"
            )
        except Exception as error:
            self._give_up(error)
        # an earlier run in this directory may have ended before its first checkpoint
        self._write(lambda file: file.hide_from(self._resumed_at + 1 if self._resumed_at else 0))
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        self._write(lambda file: file.text("config", _code(text), self._resumed_at))

    def log(self, step: int, metrics: Record) -> None:
        known = {name: value for name, value in metrics.items() if value is not None}
        self._write(lambda file: file.scalars(known, step))

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        """Writes the rows as one text, without their token columns, which only files and report.html show."""
        text = "\n\n---\n\n".join(_row(row) for row in rows)
        self._write(lambda file: file.text(f"samples/{split}", text, step))

    def event(self, step: int, kind: EventKind, text: str) -> None:
        self._write(lambda file: file.text(f"events/{kind}", _code(text), step))

    def histograms(self, step: int, histograms: dict[str, Histogram]) -> None:
        self._write(lambda file: file.histograms(histograms, step))

    def rewind(self, step: int) -> None:
        self._write(lambda file: file.hide_from(step + 1))

    def finish(self, summary: dict[str, Any]) -> None:
        text = _code(json.dumps(summary, indent=2, ensure_ascii=False, default=str))
        self._write(lambda file: file.text("summary", text, 0))
        self._write(lambda file: file.close())
        self._writer = None

    def _write(self, write: Callable[[EventFile], None]) -> None:
        if self._writer is not None:
            try:
                write(self._writer)
            except Exception as error:  # the disk is full, for example
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._writer = None
        warn(f"tensorboard failed ({type(error).__name__}: {error}); continuing without it")


class EventFile:
    """A new event file of TensorBoard, with the records of this process.

    TensorBoard reads the files of a folder in the order of their names, which begin with the time.
    """

    def __init__(self, folder: Path):
        from tensorboard.compat.proto import event_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import summary

        self._protos, self._summary = event_pb2, summary
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{time.time_ns():020d}.{secrets.token_hex(4)}"
        self._file: BinaryIO = open(path, "xb")  # fails for a symbolic link
        self._records = RecordWriter(self._file)
        self._add([{"file_version": "brain.Event:2"}], 0)

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._add([{"summary": self._summary.scalar(name, value)} for name, value in values.items()], step)

    def text(self, name: str, markdown: str, step: int) -> None:
        self._add([{"summary": self._summary.text(name, markdown)}], step)

    def histograms(self, histograms: dict[str, Histogram], step: int) -> None:
        """Adds histograms; their sums, which TensorBoard does not show, take values as the middle of bins."""
        events = []
        for name, one in histograms.items():
            pairs = zip(one.edges[:-1], one.edges[1:], one.counts, strict=True)
            middles = [((low + high) / 2, count) for low, high, count in pairs]
            proto = self._summary.histogram_raw(
                name,
                min=one.edges[0],
                max=one.edges[-1],
                num=sum(one.counts),
                sum=sum(middle * count for middle, count in middles),
                sum_squares=sum(middle**2 * count for middle, count in middles),
                # a bucket goes from the limit of the bucket before it to its own limit
                bucket_limits=one.edges,
                bucket_counts=[0, *one.counts],
            )
            events.append({"summary": proto})
        self._add(events, step)

    def hide_from(self, step: int) -> None:
        """Makes TensorBoard hide the earlier records of ``step`` and of all later steps."""
        start = self._protos.SessionLog(status=self._protos.SessionLog.START)
        self._add([{"session_log": start}], step)

    def close(self) -> None:
        self._file.close()

    def _add(self, events: list[dict[str, Any]], step: int) -> None:
        for event in events:
            record = self._protos.Event(wall_time=time.time(), step=step, **event)
            self._records.write(record.SerializeToString())
        self._file.flush()


def _code(text: str) -> str:
    """Formats a text as a code block of Markdown, which shows it unchanged."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _row(row: dict[str, Any]) -> str:
    texts = {name: row[name] for name in ("prompt", "response") if name in row}
    rest = {name: cell for name, cell in row.items() if name not in (*texts, "tokens", "asked")}
    numbers = json.dumps(rest, ensure_ascii=False, default=str)
    return "\n\n".join([_code(numbers), *(f"{name}\n\n{_code(str(text))}" for name, text in texts.items())])
