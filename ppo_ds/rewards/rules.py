"""Rule-based rewards: format, exact match, number, regular expression, length, repetition.

Each rule is a ``_target_`` and may be part of a weighted reward (weighted.py). If ``inside`` is a tag name,
the rule reads only the text between <tag> and </tag>, or an empty text if a response lacks these tags. The
reference answer is in the row's column ``column``.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Le
from torch import Tensor

from ppo_ds.config.types import Count, Must, Natural, NonNegative
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import Responses, RewardError, TextReward, check_tags_decodable, quoted, tag_pair
from ppo_ds.rewards.numbers import Number, reference_number, stated_number
from ppo_ds.types import Row


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, OverflowError):
        return False
    return True


Regex = Annotated[str, Must(_is_regex, "a regular expression of Python's re module")]
_TAG = re.compile(r"[\w.:-]+")
Tag = Annotated[str, Must(_TAG.fullmatch, "the name of a tag without its brackets, such as answer")]
Penalty = Annotated[float, Le(0)]


@dataclass(eq=False)
class Rule(TextReward):
    """Base class of rewards that score each response separately with ``rate``."""

    _: KW_ONLY
    tokenizer: Tokenizer
    key: str = "reward"  # the rule's section in the config

    def __post_init__(self) -> None:
        check_tags_decodable(tag_pair(self.tag), self.tokenizer, f"{self.key}.inside={self.tag}")

    @property
    def tag(self) -> str | None:
        """The tag whose content is read; None: the whole text."""
        return getattr(self, "inside", None)

    def score_responses(self, responses: Responses) -> Tensor:
        if self.tag:
            responses = responses.inside(self.tag)
        scores = [self.rate(text, row) for text, row in zip(responses.texts, responses.rows, strict=True)]
        return torch.tensor(scores, dtype=torch.float32)

    @abstractmethod
    def rate(self, text: str, row: Row) -> float:
        """Scores one response, or the part of it inside the tag."""


@dataclass(eq=False)
class FormatReward(Rule):
    """Scores the format of tagged reasoning as MiniMind does: the whole format and each single tag.

    A response gets ``pattern_score`` if one of ``patterns`` matches from its start (re.DOTALL), and
    ``tag_score`` for each of ``tags`` that occurs exactly once. The default patterns are MiniMind's, but with
    atomic groups (?>...): they match the same texts in linear time.
    """

    pattern_score: float = 0.5
    patterns: tuple[Regex, ...] = (
        r"^<think>\n(?>.*?\n</think>\n<answer>\n).*?\n</answer>$",
        r"^<think>\n(?>.*?\n</think>\n\n<answer>\n).*?\n</answer>$",
    )
    tag_score: float = 0.25
    tags: tuple[str, ...] = ("<think>", "</think>", "<answer>", "</answer>")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tags_decodable(self.tags, self.tokenizer, f"{self.key}.tags")

    def rate(self, text: str, row: Row) -> float:
        well_formed = any(re.match(pattern, text, re.DOTALL) for pattern in self.patterns)
        tags_used_once = sum(text.count(tag) == 1 for tag in self.tags)
        return self.pattern_score * well_formed + self.tag_score * tags_used_once


class Matching(Rule):
    """Base class of rules with two scores: ``score`` for a correct response, ``miss`` for others."""

    score: float
    miss: float

    @abstractmethod
    def matches(self, text: str, row: Row) -> bool:
        """Returns whether a response is correct."""

    def rate(self, text: str, row: Row) -> float:
        return self.score if self.matches(text, row) else self.miss


@dataclass(eq=False)
class ExactMatchReward(Matching):
    """Returns ``score`` for a response that equals a reference of its row, and ``miss`` for others.

    With ``strip``, surrounding white space of response and reference is ignored.
    """

    column: str = "answer"
    strip: bool = True
    ignore_case: bool = False
    score: float = 1.0
    miss: float = 0.0
    inside: Tag | None = None

    def check_row(self, row: Row) -> None:
        references(row, self.column, self.key)

    def matches(self, text: str, row: Row) -> bool:
        accepted = references(row, self.column, self.key)
        return self._normalize(text) in map(self._normalize, accepted)

    def _normalize(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


@dataclass(eq=False)
class NumericReward(Matching):
    """Returns ``score`` for a response whose result is the number of a reference, and ``miss`` for others.

    numbers.py extracts the number of a response. The reference is a number, a numeric text, a solution that
    ends with a number ("#### 42", \\boxed{42}), or a list of these, one of which must match. ``tolerance`` is
    relative to the reference, or absolute if the reference is between -1 and 1.
    """

    column: str = "answer"
    tolerance: NonNegative = 1e-6
    score: float = 1.0
    miss: float = 0.0
    inside: Tag | None = None

    def check_row(self, row: Row) -> None:
        self._accepted(row)

    def matches(self, text: str, row: Row) -> bool:
        accepted, stated = self._accepted(row), stated_number(text)
        return stated is not None and any(stated.equals(number, self.tolerance) for number in accepted)

    def _accepted(self, row: Row) -> list[Number]:
        numbers = []
        for reference in references(row, self.column, self.key):
            number = reference_number(reference)
            if number is None or not math.isfinite(number.value):
                raise RewardError(
                    f"{self.key}.column={self.column}: the reference {quoted(reference)} is not a single "
                    "finite number; correct it, or name another column"
                )
            numbers.append(number)
        return numbers


@dataclass(eq=False)
class RegexReward(Matching):
    """Returns ``score`` for a response in which ``pattern`` is found, and ``miss`` for others.

    With ``full``, the pattern must match the whole response. Flags are written in the pattern: (?is)...
    """

    pattern: Regex
    full: bool = False
    score: float = 1.0
    miss: float = 0.0
    inside: Tag | None = None

    def matches(self, text: str, row: Row) -> bool:
        search = re.fullmatch if self.full else re.search
        return search(self.pattern, text) is not None


@dataclass(eq=False)
class LengthReward(Rule):
    """Returns ``score`` for responses of ``shortest`` to ``longest`` units, and less for others.

    Outside this range the score falls linearly to 0 over ``ramp`` units. A unit is a character, or a token of
    the actor's tokenizer; the end token does not count.
    """

    shortest: Natural = 0
    longest: Count | None = None
    ramp: Count = 100
    unit: Literal["tokens", "characters"] = "tokens"
    score: float = 1.0
    inside: Tag | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.longest is None and self.shortest == 0:
            raise UserError(
                f"{self.key}.longest is missing: set it, or {self.key}.shortest, to a number of {self.unit}"
            )
        if self.longest is not None and self.longest < self.shortest:
            raise UserError(
                f"{self.key}.longest={self.longest}: must be at least {self.key}.shortest={self.shortest}"
            )

    def rate(self, text: str, row: Row) -> float:
        length = len(units(text, self.unit, self.tokenizer))
        outside = max(self.shortest - length, 0 if self.longest is None else length - self.longest, 0)
        return self.score * max(0.0, 1.0 - outside / self.ramp)


@dataclass(eq=False)
class RepetitionPenalty(Rule):
    """Penalizes the share of repeated n-grams as open-r1 does, from 0 down to ``max_penalty``.

    The score is (1 - distinct n-grams / all n-grams) * max_penalty, or 0 for responses shorter than an
    n-gram. Words are lower-cased and split at white space; for text without spaces, set another ``unit``.
    """

    n: Count = 3
    max_penalty: Penalty = -1.0
    unit: Literal["words", "tokens", "characters"] = "words"
    inside: Tag | None = None

    def rate(self, text: str, row: Row) -> float:
        parts = units(text, self.unit, self.tokenizer)
        total = len(parts) - self.n + 1
        distinct = len(set(zip(*(parts[i:] for i in range(self.n)), strict=False)))
        return self.max_penalty * (1 - distinct / total) if total > 0 else 0.0


def units(text: str, unit: str, tokenizer: Tokenizer) -> Sequence[Any]:
    """Splits a text into words, characters or token ids."""
    if unit == "words":
        return text.lower().split()
    return text if unit == "characters" else tokenizer.encode_many([text], special_tokens=False)[0]


def references(row: Row, column: str, key: str) -> list[str]:
    """Returns the reference answers in ``column``, which holds one answer or a list, as texts.

    Raises RewardError if the column is missing, or if an answer is empty or neither a text nor a number.
    """
    if column not in row:
        raise RewardError(
            f"{key}.column={column}: no such column in the rows; they have {', '.join(row)}; set {key}.column"
        )
    value = row[column]
    texts = []
    for reference in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(reference, bool) or not (reference is None or isinstance(reference, (str, int, float))):
            raise RewardError(
                f"{key}.column={column}: the reference {quoted(str(reference))} is neither a text nor a "
                "number; correct it, or name another column"
            )
        if reference is None or reference != reference:  # NaN stands for a missing value
            reference = ""
        elif isinstance(reference, float) and reference.is_integer():
            reference = int(reference)  # Parquet stores whole numbers as floats if some row has no value
        texts.append(str(reference))
    if not texts or not all(text.strip() for text in texts):
        prompt = f" for prompt {quoted(row['prompt_text'])}" if "prompt_text" in row else ""
        raise RewardError(
            f"{key}.column={column}: the reference is empty{prompt}; give each row one, or set {key}.column"
        )
    return texts
