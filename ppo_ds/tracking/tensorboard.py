"""Logs to TensorBoard."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from ppo_ds.tracking.background import Dashboard
from ppo_ds.tracking.tracker import EventKind, Record
from ppo_ds.types import Histogram


class TensorBoardTracker(Dashboard):
    """Writes event files to ``run_dir/tensorboard``, where repeated steps replace the earlier ones."""

    name = "tensorboard"

    def __init__(self, run_dir: Path, *, resumed_at: int = 0):
        self._folder, self._resumed_at = str(run_dir / "tensorboard"), resumed_at
        self._writer: Any = None

    def start(self, config: dict[str, Any]) -> None:
        # hides from step 0 unless the run resumes: an earlier run may have ended before its first checkpoint
        self._open(hide_from=self._resumed_at + 1 if self._resumed_at else 0)
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        self._text("config", _code(text), self._resumed_at)

    def _open(self, hide_from: int) -> None:
        """Opens a new event file, which makes TensorBoard hide earlier records from step ``hide_from`` on."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(self._folder, purge_step=hide_from)

    def _text(self, name: str, text: str, step: int) -> None:
        self._writer.add_text(name, text, step)
        self._writer.flush()

    def log(self, step: int, metrics: Record) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        """Writes the rows as one text."""
        self._text(f"samples/{split}", "\n\n---\n\n".join(map(_row, rows)), step)

    def event(self, step: int, kind: EventKind, text: str) -> None:
        self._text(f"events/{kind}", _code(text), step)

    def histograms(self, step: int, histograms: dict[str, Histogram]) -> None:
        """Adds histograms; their sums, which TensorBoard does not show, use the centers of bins."""
        for name, one in histograms.items():
            middles = [(low + high) / 2 for low, high in zip(one.edges, one.edges[1:], strict=False)]
            pairs = list(zip(middles, one.counts, strict=True))
            self._writer.add_histogram_raw(
                name,
                min=one.edges[0],
                max=one.edges[-1],
                num=sum(one.counts),
                sum=sum(middle * count for middle, count in pairs),
                sum_squares=sum(middle**2 * count for middle, count in pairs),
                # a bucket goes from the previous bucket's limit to its limit
                bucket_limits=one.edges,
                bucket_counts=[0, *one.counts],
                global_step=step,
            )

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._open(hide_from=step + 1)

    def finish(self, summary: dict[str, Any]) -> None:
        self._text("summary", _code(json.dumps(summary, indent=2, ensure_ascii=False, default=str)), 0)
        self._writer.close()


def _code(text: str) -> str:
    """Formats a text as a Markdown code block, so that it is shown unchanged."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _row(row: dict[str, Any]) -> str:
    texts = {name: row[name] for name in ("prompt", "response") if name in row}
    rest = {name: cell for name, cell in row.items() if name not in (*texts, "asked")}
    numbers = json.dumps(rest, ensure_ascii=False, default=str)
    return "\n\n".join([_code(numbers), *(f"{name}\n\n{_code(str(text))}" for name, text in texts.items())])
