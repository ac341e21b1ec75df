r"""Extracts the number that is the result of a response, and compares numbers.

If the text has <answer>...</answer>, only the content of this tag is read. The result is the last
\boxed{...}, else the number after the last "####" (as in GSM8K), else the last number of the text. Signs,
decimals, exponents, thousands separators (1,234 and LaTeX's 1{,}234), currency signs, fractions and percents
are parsed. A whole box, and a whole reference, must be a single number: no part of 2\sqrt{3} or 2:1 counts as
the result. Every pattern takes time linear in the text, because responses may be long and arbitrary.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from ppo_ds.rewards.base import text_inside

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+"
_TIMES = r" ?(?:[x×*]|\\times|\\cdot)"


def _exponent(name: str) -> str:
    """Builds the pattern of an integer exponent, with or without braces."""
    return rf" ?(?:(?P<{name}>[-+−]?\d{{1,4}})(?![\d.]\d|\d)|\{{ ?(?P<{name}_braced>[-+−]?\d{{1,4}}) ?\}})"


# A minus after a word or a bracket is a subtraction (10-3), and digits in a name or unit (H2O, m^2) are not a
# number.
_NUMBER = (
    r"(?:(?<![\w)\]}])(?P<sign>[-+−]))?(?:\\?[$€£¥] ?)?(?<![A-Za-z_^\d])(?<!\d\.)"
    rf"(?:(?P<whole>\d{{1,9}}) (?=\d{{1,9}} ?/ ?\d))?(?P<top>{_DIGITS})"
    rf"(?:[eE](?P<power>[-+]?\d{{1,3}})(?!\w)|\^{_exponent('exponent')}|{_TIMES} ?10 ?\^{_exponent('tens')})?"
    rf"(?: ?/ ?(?P<bottom>{_DIGITS}))?(?P<percent> ?\\?%)?"
)
_ANY = re.compile(_NUMBER)
_MARKED = re.compile(rf"####[ \t]{{0,9}}{_NUMBER}")
# no digit may follow a fraction, because the last 3 of 2\frac34 3 is ambiguous
_FRACTION = re.compile(
    r"(?<!\^)(?<!\^ )(\d? ?)\\[dt]?frac"
    r" ?(?:\{(-?[\d.,]{1,99})\}|(\d)) ?(?:\{([\d.,]{1,99})\}|(\d))(?! ?\d)"
)
# a unit, but not a multiplier such as \text{million}
_UNIT = (
    r" ?(?:°|[€£¥]|\^ ?\{? ?\\circ ?\}?"
    r"|\\(?:text|mathrm|mbox) ?\{(?![^{}]*(?:illion|thousand|hundred|dozen))[^{}\d]*\}(?: ?\^ ?\{?[23]\}?)?)"
)
_WHOLE = re.compile(rf"(?:[A-Za-z] ?= ?)?{_NUMBER}(?:{_UNIT})?")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d| ?/)")
_BLANKS = re.compile(r"\s+|\\ |~")
_BOX = "\\boxed{"
_MAX_DIGITS = 400  # longer numbers exceed the range of a float


@dataclass(frozen=True)
class Number:
    """A number with or without a percent sign."""

    value: float  # 50 for 50%
    percent: bool

    def equals(self, other: Number, tolerance: float) -> bool:
        """Returns whether the numbers differ by at most ``tolerance`` * max(1, abs(other)).

        If only one side has a percent sign, 50% equals both 50 and 0.5.
        """
        mine = {self.value, self.value / 100} if self.percent and not other.percent else {self.value}
        theirs = {other.value, other.value / 100} if other.percent and not self.percent else {other.value}
        return any(abs(a - b) <= tolerance * max(1.0, abs(b)) for a in mine for b in theirs)


def stated_number(text: str) -> Number | None:
    """Returns the number that is the result of a response, or None."""
    text, box = _result(text)
    if box is not None:
        return _one_number(box)
    whole = _one_number(_after_mark(text))
    if whole is not None:
        return whole
    text = _without_latex(text)
    last = deque(_MARKED.finditer(text), maxlen=1) or deque(_ANY.finditer(text), maxlen=1)
    return _parse(last[0]) if last else None


def reference_number(text: str) -> Number | None:
    r"""Returns the number of a reference, or None if the part read is not exactly one number.

    That part is the content of the last \boxed{...}; without a box, the rest of the line after the last
    "####"; without this mark, the whole text. Only <answer>...</answer> is read if the text has it.
    """
    text, box = _result(text)
    return _one_number(_after_mark(text) if box is None else box)


def boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}, up to its matching brace, or None."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for i in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len(_BOX) : i]
    return None


def _result(text: str) -> tuple[str, str | None]:
    """Returns the text to read (inside <answer>, if present) and the content of its last box, or None."""
    inner = text_inside(text, "answer")
    text = text if inner is None else inner
    return text, boxed(text)


def _after_mark(text: str) -> str:
    """Returns the rest of the line after the last ####, or the whole text if it contains no ####."""
    _, mark, rest = text.rpartition("####")
    return rest.split("\n", 1)[0] if mark else text


def _one_number(text: str) -> Number | None:
    """Parses a text; returns None unless the whole text is one number."""
    text = _without_latex(_BLANKS.sub(" ", text).strip().rstrip(".").strip("$").strip())
    match = _WHOLE.fullmatch(_SPACED.sub(lambda m: m[0].replace(" ", ""), text))
    return _parse(match) if match else None


def _without_latex(text: str) -> str:
    """Removes LaTeX's thousands separators and rewrites its fractions as a/b."""
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    return _FRACTION.sub(lambda m: f"{m[1] and m[1].strip() + ' '}{m[2] or m[3]}/{m[4] or m[5]}", text)


def _parse(match: re.Match[str]) -> Number:
    tens = match["power"] or match["tens"] or match["tens_braced"]
    top, bottom = _to_float(match["top"], tens), _to_float(match["bottom"] or "1")
    if exponent := match["exponent"] or match["exponent_braced"]:
        try:
            top = top ** int(exponent.replace("−", "-"))
        except (OverflowError, ZeroDivisionError):
            top = float("inf")
    value = _to_float(match["whole"] or "0") + (top / bottom if bottom else float("inf"))
    return Number(-value if match["sign"] in ("-", "−") else value, match["percent"] is not None)


def _to_float(digits: str, power: str | None = None) -> float:
    if len(digits) > _MAX_DIGITS:
        return float("inf")
    return float(f"{digits.replace(',', '')}e{(power or '0').replace('−', '-')}")
