"""Rewards that are rules on the text of an answer: format, match with a reference, number, pattern, length, repetition.

Each is a `_target_` of its own and may be a part of a mixture (weighted.py). ``inside`` is the name of a tag: the rule then reads only what
stands between <tag> and </tag>, an empty text where an answer has no such pair. A reference stands in the row, in ``column``.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from ppo_ds.config.typed import Bound, Count, Natural, NonNegative
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import Answers, RewardError, TextReward, both_tags, expect_writable, shown
from ppo_ds.rewards.numbers import Number, reference_number, stated_number
from ppo_ds.types import Row


class _Regex:
    """What a text must be for `re` to compile it."""

    def __contains__(self, pattern: str) -> bool:
        try:
            re.compile(pattern)
        except (re.error, OverflowError):
            return False
        return True

    def __str__(self) -> str:
        return "a regular expression, as Python's re reads it"


class _TagName:
    def __contains__(self, name: str) -> bool:
        return re.fullmatch(r"[\w.:-]+", name) is not None

    def __str__(self) -> str:
        return "the name of a tag without its brackets, such as answer"


Regex = Annotated[str, _Regex()]
Tag = Annotated[str, _TagName()]
Penalty = Annotated[float, Bound(high=0)]


class Rule(TextReward):
    """Rates answers one by one."""

    def __init__(self, inside: str | None, tokenizer: Tokenizer, key: str):
        """``key``: this section's in the config, for messages."""
        super().__init__(tokenizer)
        self._inside, self._key = inside, key
        expect_writable(both_tags(inside), tokenizer, f"{key}.inside={inside}")

    def judge(self, answers: Answers) -> Tensor:
        read = answers.inside(self._inside) if self._inside else answers
        return torch.tensor(
            [self.rate(text, row) for text, row in zip(read.texts, read.rows, strict=True)],
            dtype=torch.float32,
        )

    @abstractmethod
    def rate(self, text: str, row: Row) -> float:
        """One answer, or the part of it that is to be read."""


class FormatReward(Rule):
    """MiniMind's reward for reasoning in tags: the whole form, and so that it can be found step by step, each tag by itself.

    ``pattern_score`` where one of ``patterns`` matches from the start (re.DOTALL), and ``tag_score`` for each of ``tags`` that is there exactly
    once: 0.5 + 4 x 0.25 for a right answer. The patterns are MiniMind's but for (?>...), which finds the same in linear time.
    """

    def __init__(
        self,
        pattern_score: float = 0.5,
        patterns: tuple[Regex, ...] = (
            r"^<think>\n(?>.*?\n</think>\n<answer>\n).*?\n</answer>$",
            r"^<think>\n(?>.*?\n</think>\n\n<answer>\n).*?\n</answer>$",
        ),
        tag_score: float = 0.25,
        tags: tuple[str, ...] = ("<think>", "</think>", "<answer>", "</answer>"),
        *,
        tokenizer: Tokenizer,
        key: str = "reward",
    ):
        super().__init__(None, tokenizer, key)
        self._pattern_score, self._patterns = (
            pattern_score,
            [re.compile(pattern, re.DOTALL) for pattern in patterns],
        )
        self._tag_score, self._tags = tag_score, tags
        expect_writable(tags, tokenizer, f"{key}.tags")

    def rate(self, text: str, row: Row) -> float:
        formed = any(pattern.match(text) for pattern in self._patterns)
        return self._pattern_score * formed + self._tag_score * sum(
            text.count(tag) == 1 for tag in self._tags
        )


class ExactMatchReward(Rule):
    """``score`` where the answer is the reference, else ``miss``. The reference may be a list of texts, each of which is right."""

    def __init__(
        self,
        column: str = "answer",
        strip: bool = True,
        ignore_case: bool = False,
        score: float = 1.0,
        miss: float = 0.0,
        inside: Tag | None = None,
        *,
        tokenizer: Tokenizer,
        key: str = "reward",
    ):
        """``strip``: white space around either does not count."""
        super().__init__(inside, tokenizer, key)
        self._column, self._strip, self._ignore_case = column, strip, ignore_case
        self._score, self._miss = score, miss

    def expect(self, row: Row) -> None:
        references(row, self._column, self._key)

    def rate(self, text: str, row: Row) -> float:
        accepted = {self._plain(reference) for reference in references(row, self._column, self._key)}
        return self._score if self._plain(text) in accepted else self._miss

    def _plain(self, text: str) -> str:
        text = text.strip() if self._strip else text
        return text.casefold() if self._ignore_case else text


class NumericReward(Rule):
    """``score`` where the number that the answer states equals the reference's, else ``miss``; see numbers.py for which number that is.

    The reference is a number, a text that is one, a solution that ends in one ("#### 42", \\boxed{42}), or a list of such, each of which is right.
    ``tolerance``: relative, absolute below 1.
    """

    def __init__(
        self,
        column: str = "answer",
        tolerance: NonNegative = 1e-6,
        score: float = 1.0,
        miss: float = 0.0,
        inside: Tag | None = None,
        *,
        tokenizer: Tokenizer,
        key: str = "reward",
    ):
        super().__init__(inside, tokenizer, key)
        self._column, self._tolerance = column, tolerance
        self._score, self._miss = score, miss

    def expect(self, row: Row) -> None:
        self._wanted(row)

    def rate(self, text: str, row: Row) -> float:
        wanted = self._wanted(row)
        stated = stated_number(text)
        right = stated is not None and any(stated.equals(number, self._tolerance) for number in wanted)
        return self._score if right else self._miss

    def _wanted(self, row: Row) -> list[Number]:
        return [self._number(reference) for reference in references(row, self._column, self._key)]

    def _number(self, reference: str) -> Number:
        number = reference_number(reference)
        if number is None or not math.isfinite(number.value):
            place = f"{self._key}.column={self._column}"
            raise RewardError(
                f"{place}: no number in the reference {shown(reference)} that is all of it; mend it, or name another column"
            )
        return number


class RegexReward(Rule):
    """``score`` where ``pattern`` is found in the answer (``full``: is all of it), else ``miss``. Flags stand in the pattern: (?is)..."""

    def __init__(
        self,
        pattern: Regex,
        full: bool = False,
        score: float = 1.0,
        miss: float = 0.0,
        inside: Tag | None = None,
        *,
        tokenizer: Tokenizer,
        key: str = "reward",
    ):
        super().__init__(inside, tokenizer, key)
        compiled = re.compile(pattern)
        self._matches = compiled.fullmatch if full else compiled.search
        self._score, self._miss = score, miss

    def rate(self, text: str, row: Row) -> float:
        return self._score if self._matches(text) else self._miss


class LengthReward(Rule):
    """``score`` for a length from ``shortest`` to ``longest``, falling in a line to 0 over ``ramp`` more or fewer; in tokens or characters.

    Tokens are those of the text as the actor's tokenizer writes it, without the end token.
    """

    def __init__(
        self,
        shortest: Natural = 0,
        longest: Count | None = None,
        ramp: Count = 100,
        unit: Literal["tokens", "characters"] = "tokens",
        score: float = 1.0,
        inside: Tag | None = None,
        *,
        tokenizer: Tokenizer,
        key: str = "reward",
    ):
        super().__init__(inside, tokenizer, key)
        if longest is None and shortest == 0:
            raise UserError(
                f"{key}.longest is missing: the most {unit} that an answer should have (or {key}.shortest)"
            )
        if longest is not None and longest < shortest:
            raise UserError(f"{key}.longest={longest}: must be at least {key}.shortest={shortest}")
        self._shortest, self._longest, self._ramp, self._unit = shortest, longest, ramp, unit
        self._score = score

    def rate(self, text: str, row: Row) -> float:
        length = len(units(text, self._unit, self._tokenizer))
        outside = max(self._shortest - length, 0 if self._longest is None else length - self._longest, 0)
        return self._score * max(0.0, 1.0 - outside / self._ramp)


class RepetitionPenalty(Rule):
    """``max_penalty`` times the share of the answer's n-grams that were there before, as in open-r1: from ``max_penalty`` to 0.

    (1 - different n-grams / all n-grams) * max_penalty; 0 for answers without an n-gram. ``unit``: words are lower-case and split at white
    space; take tokens or characters for languages that do not write spaces.
    """

    def __init__(
        self,
        n: Count = 3,
        max_penalty: Penalty = -1.0,
        unit: Literal["words", "tokens", "characters"] = "words",
        inside: Tag | None = None,
        *,
        tokenizer: Tokenizer,
        key: str = "reward",
    ):
        super().__init__(inside, tokenizer, key)
        self._n, self._max_penalty, self._unit = n, max_penalty, unit

    def rate(self, text: str, row: Row) -> float:
        parts = units(text, self._unit, self._tokenizer)
        total = len(parts) - self._n + 1
        different = len(set(zip(*(parts[i:] for i in range(self._n)), strict=False)))
        return self._max_penalty * (1 - different / total) if total > 0 else 0.0


def units(text: str, unit: str, tokenizer: Tokenizer) -> Sequence[Any]:
    """The words, characters or token ids of a text."""
    if unit == "words":
        return text.lower().split()
    return text if unit == "characters" else tokenizer.encode_many([text], special_tokens=False)[0]


def references(row: Row, column: str, key: str) -> list[str]:
    """What the row has in ``column``, as texts: one, or those of a list. RewardError where there is nothing to compare with."""
    if column not in row:
        raise RewardError(
            f"{key}.column={column}: no such column in the rows; they have {', '.join(row)}; set {key}.column"
        )
    value = row[column]
    found = [
        _reference(one, f"{key}.column={column}")
        for one in (value if isinstance(value, (list, tuple)) else [value])
    ]
    if not found or not all(text.strip() for text in found):
        place = f" for prompt {shown(row['prompt_text'])}" if "prompt_text" in row else ""
        raise RewardError(
            f"{key}.column={column}: the reference is empty{place}; give each row one, or set {key}.column"
        )
    return found


def _reference(value: Any, place: str) -> str:
    """One reference as text. A file format may have made 5 into 5.0, as Parquet does with whole numbers where a row has none."""
    if isinstance(value, bool) or not (value is None or isinstance(value, (str, int, float))):
        raise RewardError(
            f"{place}: the reference {shown(str(value))} is neither a text nor a number; mend it, or name another column"
        )
    if value is None or value != value:  # nan: a gap
        return ""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)
