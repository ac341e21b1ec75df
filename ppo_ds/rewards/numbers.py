r"""The number that an answer states, and whether it is the right one.

Which one counts: inside <answer>...</answer> where the text has it; in there, what the last \boxed{...} holds; then the number after the last
"####" (GSM8K's mark), else the last number of all. Understood are signs, decimals, exponents, thousands (1,234 and LaTeX's 1{,}234), currency
signs, fractions (3/4, 2 1/2, \frac{3}{4}) and percents. Every pattern is linear in the text: answers may be long and odd.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from ppo_ds.rewards.base import text_inside

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+"
# A minus after a word or a bracket is a difference (10-3), and digits in a name or unit (H2O, m^2) are no number.
_NUMBER = (
    r"(?:(?<![\w)\]}])(?P<sign>[-+−]))?(?:\\?[$€£¥] ?)?(?<![A-Za-z_^\d])(?<!\d\.)"
    rf"(?:(?P<whole>\d{{1,9}}) (?=\d{{1,9}} ?/ ?\d))?(?P<top>{_DIGITS})(?:[eE](?P<power>[-+]?\d{{1,3}})(?!\w))?"
    rf"(?: ?/ ?(?P<bottom>{_DIGITS}))?(?P<percent> ?\\?%)?"
)
_ANY = re.compile(_NUMBER)
_MARKED = re.compile(rf"####[ \t]{{0,9}}{_NUMBER}")
_FRACTION = re.compile(r"(\d? ?)\\[dt]?frac ?\{(-?[\d.,]{1,99})\} ?\{([\d.,]{1,99})\}")
_BOX = "\\boxed{"
_LONGEST = 400  # digits; a longer number is beyond any float


@dataclass(frozen=True)
class Number:
    value: float  # of 50%: 50
    percent: bool

    def equals(self, other: Number, tolerance: float) -> bool:
        """Within ``tolerance`` times the larger of 1 and the other. Where one side only has a percent sign, 50% may be 50 or 0.5."""
        mine = {self.value, self.value / 100} if self.percent and not other.percent else {self.value}
        theirs = {other.value, other.value / 100} if other.percent and not self.percent else {other.value}
        return any(abs(a - b) <= tolerance * max(1.0, abs(b)) for a in mine for b in theirs)


def stated_number(text: str) -> Number | None:
    """The number that ``text`` gives as its result; None where it has none."""
    for part in (text_inside(text, "answer"), boxed(text)):
        if part is not None:
            text = boxed(part) or part
            break
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    text = _FRACTION.sub(lambda m: f"{m[1] and m[1].strip() + ' '}{m[2]}/{m[3]}", text)
    last = deque(_MARKED.finditer(text), maxlen=1) or deque(_ANY.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds, to its own closing brace."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for i in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len(_BOX) : i]
    return None


def _value(match: re.Match[str]) -> Number:
    top, bottom = _float(match["top"], match["power"]), _float(match["bottom"] or "1")
    value = _float(match["whole"] or "0") + (top / bottom if bottom else float("inf"))
    return Number(-value if match["sign"] in ("-", "−") else value, match["percent"] is not None)


def _float(digits: str, power: str | None = None) -> float:
    return float(f"{digits.replace(',', '')}e{power or 0}") if len(digits) <= _LONGEST else float("inf")
