r"""The number that an answer states, and whether it is the right one.

Which one counts: inside <answer>...</answer> where the text has it; in there, what the last \boxed{...} holds; then the number after the last
"####" (GSM8K's mark), else the last number of all. Understood are signs, decimals, exponents (2e3, 2^{10}, 3.5 \times 10^{-3}), thousands (1,234
and LaTeX's 1{,}234), currency signs, fractions (3/4, 2 1/2, \frac{3}{4}, \frac34) and percents. Every pattern is linear in the text: answers may
be long and odd. A box or a reference must be one number as a whole, where 1 000 000 is one too: of 2\sqrt{3} or 2:1 no part is the answer.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from ppo_ds.rewards.base import text_inside

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\.)\.\d+"
_TIMES = r" ?(?:[x×*]|\\times|\\cdot)"


def _braced(name: str) -> str:
    """A whole exponent, in braces or not."""
    return rf" ?(?:(?P<{name}>[-+−]?\d{{1,4}})(?![\d.]\d|\d)|\{{ ?(?P<{name}_braced>[-+−]?\d{{1,4}}) ?\}})"


# A minus after a word or a bracket is a difference (10-3), and digits in a name or unit (H2O, m^2) are no number.
_NUMBER = (
    r"(?:(?<![\w)\]}])(?P<sign>[-+−]))?(?:\\?[$€£¥] ?)?(?<![A-Za-z_^\d])(?<!\d\.)"
    rf"(?:(?P<whole>\d{{1,9}}) (?=\d{{1,9}} ?/ ?\d))?(?P<top>{_DIGITS})"
    rf"(?:[eE](?P<power>[-+]?\d{{1,3}})(?!\w)|\^{_braced('exponent')}|{_TIMES} ?10 ?\^{_braced('tens')})?"
    rf"(?: ?/ ?(?P<bottom>{_DIGITS}))?(?P<percent> ?\\?%)?"
)
_ANY = re.compile(_NUMBER)
_MARKED = re.compile(rf"####[ \t]{{0,9}}{_NUMBER}")
_FRACTION = re.compile(
    r"(?<!\^)(?<!\^ )(\d? ?)\\[dt]?frac ?(?:\{(-?[\d.,]{1,99})\}|(\d)) ?(?:\{([\d.,]{1,99})\}|(\d))(?! ?\d)"  # 2\frac34 3
)
_UNIT = r" ?(?:°|[€£¥]|\^ ?\{? ?\\circ ?\}?|\\(?:text|mathrm|mbox) ?\{(?![^{}]*(?:illion|thousand|hundred|dozen))[^{}\d]*\}(?: ?\^ ?\{?[23]\}?)?)"
_WHOLE = re.compile(rf"(?:[A-Za-z] ?= ?)?{_NUMBER}(?:{_UNIT})?")
_SPACED = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?!\d| ?/)")
_BLANKS = re.compile(r"\s+|\\ |~")
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
    """The number that an answer gives as its result; None where it has none."""
    text, box = _result(text)
    if box is not None:
        return _one_number(box)
    whole = _one_number(_after_mark(text))
    if whole is not None:
        return whole
    text = _plain(text)
    last = deque(_MARKED.finditer(text), maxlen=1) or deque(_ANY.finditer(text), maxlen=1)
    return _value(last[0]) if last else None


def reference_number(text: str) -> Number | None:
    r"""The number that a reference is: in its \boxed{...}, after its last "####", or all of it. None where that is not one number."""
    text, box = _result(text)
    return _one_number(_after_mark(text) if box is None else box)


def _result(text: str) -> tuple[str, str | None]:
    """What stands in <answer>, or all, and the box in it."""
    inner = text_inside(text, "answer")
    text = text if inner is None else inner
    return text, boxed(text)


def _after_mark(text: str) -> str:
    """The line after the last ####; the whole text without one."""
    _, mark, rest = text.rpartition("####")
    return rest.split("\n", 1)[0] if mark else text


def _one_number(text: str) -> Number | None:
    text = _plain(_BLANKS.sub(" ", text).strip().rstrip(".").strip("$").strip())
    match = _WHOLE.fullmatch(_SPACED.sub(lambda m: m[0].replace(" ", ""), text))
    return _value(match) if match else None


def _plain(text: str) -> str:
    """Without LaTeX's ways to write thousands and fractions."""
    text = text.replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    return _FRACTION.sub(lambda m: f"{m[1] and m[1].strip() + ' '}{m[2] or m[3]}/{m[4] or m[5]}", text)


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
    tens = match["power"] or match["tens"] or match["tens_braced"]
    top, bottom = _float(match["top"], tens), _float(match["bottom"] or "1")
    if exponent := match["exponent"] or match["exponent_braced"]:
        top = _raised(top, int(exponent.replace("−", "-")))
    value = _float(match["whole"] or "0") + (top / bottom if bottom else float("inf"))
    return Number(-value if match["sign"] in ("-", "−") else value, match["percent"] is not None)


def _raised(base: float, exponent: int) -> float:
    try:
        return base**exponent
    except (OverflowError, ZeroDivisionError):
        return float("inf")


def _float(digits: str, power: str | None = None) -> float:
    return (
        float(f"{digits.replace(',', '')}e{(power or '0').replace('−', '-')}")
        if len(digits) <= _LONGEST
        else float("inf")
    )
