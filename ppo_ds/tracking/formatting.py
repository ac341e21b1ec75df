"""Formats numbers and durations for the console."""

from __future__ import annotations


def format_duration(value: float | None, whole: bool = False) -> str:
    """Formats seconds: 4.2 s (4 s if ``whole``), 3 min 05 s, 2 h 07 min."""
    if value is None:
        return "an unknown time"
    if value < 60:
        return f"{value:.0f} s" if whole else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_number(value: float | None, form: str) -> str:
    """Formats a metric; one that was not finite is shown as "-", in the same width."""
    width = form.split(".")[0]
    return f"{'-':>{width}}" if value is None else format(value, form)
