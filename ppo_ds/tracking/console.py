"""Prints the progress of a run: a banner, a line per step, and on a terminal a live view below them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from ppo_ds.errors import printable
from ppo_ds.tracking.catalogue import STEP_LINE
from ppo_ds.tracking.formatting import format_duration, format_number
from ppo_ds.tracking.live import LiveView
from ppo_ds.tracking.screen import Screen
from ppo_ds.tracking.tracker import EventKind, Record, Tracker


@dataclass(eq=False)
class ConsoleTracker(Tracker):
    """Prints the progress of a run on standard output."""

    stage: str
    total_steps: int
    _: KW_ONLY
    activity: Callable[[], Any]  # returns this process's phase, for the live view
    first_step: int = 0  # steps that the run has made already
    print_answers: int = 0  # steps between printed answers; 0: none
    screen: Screen = field(default_factory=Screen)  # may show lines already

    def __post_init__(self) -> None:
        self.console = self.screen.console
        self._plus_minus = "±" if self.console.encoding.startswith("utf") else "+-"
        self._view = LiveView(self.stage, self.total_steps, self.activity, step=self.first_step)

    def banner(self, text: str, *, title: str = "ppo_ds") -> None:
        if self.console.is_terminal:
            self.console.print(
                Panel(
                    escape(text.strip()), title=title, title_align="left", border_style="cyan", padding=(0, 1)
                )
            )
        else:
            self.console.print(f"{title}\n{text.strip()}", markup=False, soft_wrap=True)

    def start(self, config: dict[str, Any]) -> None:
        self.screen.show(lambda: self._view)

    def log(self, step: int, metrics: Record) -> None:
        self._view.log(step)
        columns = self.console.width if self.console.is_terminal else None
        line = step_line(step, self.total_steps, metrics, plus_minus=self._plus_minus, columns=columns)
        self.console.print(line, soft_wrap=True)

    def samples(self, step: int, rows: list[dict[str, Any]], split: str = "train") -> None:
        """Prints the first row of every ``print_answers``-th step, and of its evaluation."""
        if self.print_answers and step % self.print_answers == 0:
            self.console.print(answer_lines(step, rows[0], split), markup=False, soft_wrap=True)

    def event(self, step: int, kind: EventKind, text: str) -> None:
        """Shows an alarm in the live view, and prints the evaluation before the first step.

        Lines for warnings and alarms are printed by the run itself.
        """
        if kind == "alarm":
            self._view.alarm(step, text)
        if kind == "evaluated":
            self.console.print(text, markup=False, soft_wrap=True)

    def rewind(self, step: int) -> None:
        self._view.rewind(step)

    def finish(self, summary: dict[str, Any]) -> None:
        self.screen.close()
        reason, duration = summary.get("exit_reason", "done"), format_duration(summary.get("wall_s"))
        self.console.print(f"{reason} after {duration}", markup=False)
        self.console.file.flush()


def answer_lines(step: int, row: dict[str, Any], split: str) -> str:
    """Formats a prompt and its answer. Line breaks are kept; other control characters become escapes."""
    title = f"step {step}, {'held out' if split == 'eval' else 'sample'}"
    if row.get("score") is not None:
        title += f", score {format_number(row['score'], '.3f')}"
    lines = [title]
    for name in ("prompt", "response"):
        label = "answer" if name == "response" else name
        for number, line in enumerate(str(row.get(name, "")).split("\n")):
            lines.append(f"  {label if number == 0 else '':<8}{printable(line)}")
    return "\n".join(lines)


def step_line(
    step: int, total: int, metrics: Record, *, plus_minus: str = "±", columns: int | None = None
) -> str:
    """Formats one step as a line of rich markup; omits the least important parts to fit into ``columns``.

    Missing metrics are left out; metrics that were not finite are shown as "-".
    """
    parts = [(0, f"[bold]step {step:>{len(str(total))}}/{total}[/]")]  # parts with a rank of importance
    if "reward/score_mean" in metrics:
        spread = f" {plus_minus} {format_number(metrics.get('reward/score_std'), '.3f')}"
        parts.append((1, f"[green]reward {format_number(metrics['reward/score_mean'], '7.3f')}{spread}[/]"))
    for shown in STEP_LINE:
        if shown.metric in metrics:
            number = format_number(metrics[shown.metric], shown.format)
            parts.append((shown.rank, f"[dim]{shown.label}[/] {number}"))
    if "perf/tokens_per_s" in metrics:
        parts.append((8, f"{format_number(metrics['perf/tokens_per_s'], '6.0f')} [dim]tok/s[/]"))
    if "time/step" in metrics:
        parts.append((5, f"{format_number(metrics['time/step'], '6.2f')} [dim]s[/]"))
    if (heldout := heldout_result(metrics)) is not None:
        parts.append((2, f"[bold cyan]{heldout}[/]"))
    lines = ["  ".join(text for rank, text in parts if rank <= last) for last in range(9)]
    if columns is None:
        return lines[-1]
    fitting = [line for line in lines if Text.from_markup(line).cell_len <= columns]
    return fitting[-1] if fitting else lines[0]


def heldout_result(metrics: Mapping[str, float | None]) -> str | None:
    """Formats the evaluation of a step; None if the step has none."""
    if "eval/accuracy" in metrics:
        where = "held-out accuracy" if "rm/loss" in metrics else "accuracy"
        return f"{where} {format_number(metrics['eval/accuracy'], '.1%')}"
    if "eval/perplexity" in metrics:
        loss, perplexity = (format_number(metrics[f"eval/{name}"], ".3f") for name in ("loss", "perplexity"))
        return f"held-out loss {loss}, perplexity {perplexity}"
    if "eval/score_mean" in metrics:
        return f"held out {format_number(metrics['eval/score_mean'], '.3f')}"
    return None
