"""Console output of a run: a banner, a progress bar and a line per step (plain lines without a terminal)."""

from __future__ import annotations

import atexit
import sys
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ppo_ds.tracking.tracker import EventKind, Record
from ppo_ds.types import Histogram


def open_console(stream: TextIO | None = None) -> Console:
    """Opens a rich console on ``stream`` (default: stdout).

    If ``stream`` is not a terminal, it gets no colours or control codes, and 120 instead of 80 columns.
    """
    stream = stream or sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")  # a response in Chinese must not end a run whose log is ASCII
    terminal = stream.isatty()
    return Console(
        file=stream,
        highlight=False,
        emoji=False,
        force_terminal=terminal,
        no_color=not terminal,
        width=None if terminal else 120,
    )


class ConsoleTracker:
    """Prints the progress of a run on standard output."""

    def __init__(self, stage: str, total_steps: int, *, first_step: int = 0, stream: TextIO | None = None):
        """Initializes the tracker of a run of ``stage``.

        ``first_step`` is the number of steps that were completed before this process started.
        """
        self.console = open_console(stream)
        self._total = total_steps
        self._plus_minus = "±" if self.console.encoding.lower().startswith("utf") else "+-"
        self._progress = Progress(
            TextColumn(f"[bold]{stage}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("[dim]elapsed"),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            console=self.console,
            expand=True,
        )
        self._task = self._progress.add_task(stage, total=total_steps, completed=first_step)

    def banner(self, text: str, *, title: str = "ppo_ds") -> None:
        """Prints the start-up banner."""
        if self.console.is_terminal:
            self.console.print(
                Panel(
                    escape(text.strip()), title=title, title_align="left", border_style="cyan", padding=(0, 1)
                )
            )
        else:
            self.console.print(f"{title}\n{text.strip()}", markup=False, soft_wrap=True)

    def start(self, config: dict[str, Any]) -> None:
        if self.console.is_terminal:
            self._progress.start()
            atexit.register(self._progress.stop)  # restores the cursor after an exception

    def log(self, step: int, metrics: Record) -> None:
        self.console.print(step_line(step, self._total, metrics, plus_minus=self._plus_minus), soft_wrap=True)
        self._progress.update(self._task, completed=step)

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        """Prints nothing: samples are in the run directory and in the final report."""

    def event(self, step: int, kind: EventKind, text: str) -> None:
        """Prints nothing: the run logs its warnings and alarms itself."""

    def histograms(self, step: int, histograms: dict[str, Histogram]) -> None:
        """Does nothing: only dashboards show histograms."""

    def rewind(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def finish(self, summary: dict[str, Any]) -> None:
        if self.console.is_terminal:
            self._progress.stop()
            atexit.unregister(self._progress.stop)
        self.console.print(
            f"{summary.get('exit_reason', 'done')} after {format_duration(summary.get('wall_s'))}",
            markup=False,
        )
        self.console.file.flush()


def step_line(step: int, total: int, metrics: Record, *, plus_minus: str = "±") -> str:
    """Formats one step as a line of rich markup.

    Missing metrics are left out; metrics that were not finite are shown as "-".
    """
    parts = [f"[bold]step {step:>{len(str(total))}}/{total}[/]"]
    if "reward/score_mean" in metrics:
        spread = f" {plus_minus} {_number(metrics.get('reward/score_std'), '.3f')}"
        parts.append(f"[green]reward {_number(metrics['reward/score_mean'], '7.3f')}{spread}[/]")
    for label, name, form in (
        ("kl", "kl/ref_seq_mean", "7.4f"),
        ("loss", "policy/loss", "8.4f"),
        ("value", "value/loss", "8.4f"),
        ("loss", "sft/loss", "7.4f"),
        ("token accuracy", "sft/token_accuracy", "6.1%"),
        ("loss", "rm/loss", "7.4f"),
        ("accuracy", "rm/accuracy", "6.1%"),
        ("margin", "rm/margin_mean", "7.3f"),
    ):
        if name in metrics:
            parts.append(f"[dim]{label}[/] {_number(metrics[name], form)}")
    if "rollout/resp_len_mean" in metrics:
        parts.append(f"[dim]length[/] {_number(metrics['rollout/resp_len_mean'], '5.1f')}")
    if "perf/tokens_per_s" in metrics:
        parts.append(f"{_number(metrics['perf/tokens_per_s'], '6.0f')} [dim]tok/s[/]")
    if "time/step" in metrics:
        parts.append(f"{_number(metrics['time/step'], '6.2f')} [dim]s[/]")
    if "eval/accuracy" in metrics:
        where = "held-out accuracy" if "rm/loss" in metrics else "accuracy"
        parts.append(f"[bold cyan]{where} {_number(metrics['eval/accuracy'], '.1%')}[/]")
    elif "eval/perplexity" in metrics:
        loss, perplexity = (_number(metrics[f"eval/{name}"], ".3f") for name in ("loss", "perplexity"))
        parts.append(f"[bold cyan]held-out loss {loss}, perplexity {perplexity}[/]")
    elif "eval/score_mean" in metrics:
        parts.append(f"[bold cyan]held out {_number(metrics['eval/score_mean'], '.3f')}[/]")
    return "  ".join(parts)


def format_duration(value: float | None) -> str:
    """Formats seconds: 4.2 s, 3 min 05 s, 2 h 07 min."""
    if value is None:
        return "-"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _number(value: float | None, form: str) -> str:
    width = form.split(".")[0]
    return f"{'-':>{width}}" if value is None else format(value, form)
