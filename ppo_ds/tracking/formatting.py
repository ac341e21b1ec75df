"""Formats numbers and durations for the console."""

from __future__ import annotations

import math


def format_duration(value: float | None, whole: bool = False) -> str:
    """Formats seconds: 4.2 s (4 s if ``whole``), 3 min 05 s, 2 h 07 min."""
    if value is None:
        return "an unknown time"
    if value < 60:
        return f"{value:.0f} s" if whole else f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_number(value: float | None, form: str) -> str:
    """Formats a metric by a spec such as "7.3f" or ".1%"; None, a non-finite value, becomes a padded "-".

    Halves are rounded away from 0, as in the HTML pages; Python's format would round 0.5325 to 53.2%.
    Numbers that single precision makes slightly smaller than a half, such as 0.47749999, count as halves.
    """
    width, precision = form.split(".")
    if value is None:
        return f"{'-':>{width}}"
    decimals = int(precision[:-1]) + 2 * form.endswith("%")
    return format(value + math.copysign(5 * 10.0 ** -(decimals + 4), value), form)


def format_change(before: float, after: float, percent: bool) -> str:
    """Formats ``after`` minus ``before``, both rounded as they are displayed: +5.5 points, -0.020."""
    factor, form = (100, ".1f") if percent else (1, ".3f")
    start, end = (float(format_number(factor * value, form)) for value in (before, after))
    return f"{end - start:+{form}}{' points' if percent else ''}"
