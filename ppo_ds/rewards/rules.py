"""Rule-based rewards: format, exact match, number, regular expression, length, repetition.

Each rule has its own ``_target_`` and may be a part of a weighted reward (weighted.py). If ``inside`` names a
tag, the rule reads only the text between <tag> and </tag>, or an empty text if a response lacks these tags.
The reference answer is in the row's column ``column``.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from annotated_types import Le
from torch import Tensor

from ppo_ds.config.types import Count, Must, Natural, NonNegative
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.base import (
    Responses,
    RewardError,
    TextReward,
    check_tags_decodable,
    quoted,
    tag_pair,
)
from ppo_ds.rewards.numbers import Number, reference_number, stated_number
from ppo_ds.types import Row


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except (re.error, OverflowError):
        return False
    return True


Regex = Annotated[str, Must(_is_regex, "a regular expression of Python's re module")]
Tag = Annotated[
    str,
    Must(
        lambda name: re.fullmatch(r"[\w.:-]+", name) is not None,
        "the name of a tag without its brackets, such as answer",
    ),
]
Penalty = Annotated[float, Le(0)]


class Rule(TextReward):
    """Base class of rewards that score each response separately with ``rate``."""

    def __init__(self, inside: str | None, tokenizer: Tokenizer, key: str):
        """Checks that the tokenizer can produce the tag ``inside``; ``key`` is the rule's config section."""
        super().__init__(tokenizer)
        self._inside, self._key = inside, key
        check_tags_decodable(tag_pair(inside), tokenizer, f"{key}.inside={inside}")

    def score_responses(self, responses: Responses) -> Tensor:
        if self._inside:
            responses = responses.inside(self._inside)
        scores = [self.rate(text, row) for text, row in zip(responses.texts, responses.rows, strict=True)]
        return torch.tensor(scores, dtype=torch.float32)

    @abstractmethod
    def rate(self, text: str, row: Row) -> float:
        """Scores one response, or only its part inside the tag."""


class FormatReward(Rule):
    """Scores the format of tagged reasoning as MiniMind does: the whole format and each single tag.

    A response gets ``pattern_score`` if one of ``patterns`` matches from its start (re.DOTALL), and
    ``tag_score`` for each of ``tags`` that occurs exactly once. By default, a well-formed response gets 0.5 +
    4 x 0.25. The default patterns are MiniMind's except for the atomic groups (?>...), which match the same
    texts in linear time.
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
        self._pattern_score, self._tag_score, self._tags = pattern_score, tag_score, tags
        self._patterns = [re.compile(pattern, re.DOTALL) for pattern in patterns]
        check_tags_decodable(tags, tokenizer, f"{key}.tags")

    def rate(self, text: str, row: Row) -> float:
        well_formed = any(pattern.match(text) for pattern in self._patterns)
        tags_used_once = sum(text.count(tag) == 1 for tag in self._tags)
        return self._pattern_score * well_formed + self._tag_score * tags_used_once


class ExactMatchReward(Rule):
    """Gives ``score`` to a response that equals a reference of its row, and ``miss`` to any other."""

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
        """Initializes the rule; with ``strip``, white space around response and reference is ignored."""
        super().__init__(inside, tokenizer, key)
        self._column, self._strip, self._ignore_case = column, strip, ignore_case
        self._score, self._miss = score, miss

    def check_row(self, row: Row) -> None:
        references(row, self._column, self._key)

    def rate(self, text: str, row: Row) -> float:
        accepted = {self._normalize(reference) for reference in references(row, self._column, self._key)}
        return self._score if self._normalize(text) in accepted else self._miss

    def _normalize(self, text: str) -> str:
        text = text.strip() if self._strip else text
        return text.casefold() if self._ignore_case else text


class NumericReward(Rule):
    """Gives ``score`` to a response that states the number of a reference, and ``miss`` to any other.

    numbers.py extracts the number of a response. The reference is a number, a text that is a number, a
    solution that ends with one ("#### 42", \\boxed{42}), or a list of these, any of which may be matched.
    ``tolerance`` is relative to the reference, and absolute if the reference is between -1 and 1.
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

    def check_row(self, row: Row) -> None:
        self._accepted(row)

    def rate(self, text: str, row: Row) -> float:
        accepted = self._accepted(row)
        stated = stated_number(text)
        correct = stated is not None and any(stated.equals(number, self._tolerance) for number in accepted)
        return self._score if correct else self._miss

    def _accepted(self, row: Row) -> list[Number]:
        numbers = []
        for reference in references(row, self._column, self._key):
            number = reference_number(reference)
            if number is None or not math.isfinite(number.value):
                raise RewardError(
                    f"{self._key}.column={self._column}: the reference {quoted(reference)} is not a single "
                    "finite number; correct it, or name another column"
                )
            numbers.append(number)
        return numbers


class RegexReward(Rule):
    """Gives ``score`` to a response in which ``pattern`` is found, and ``miss`` to any other.

    With ``full``, the pattern must match the whole response. Flags are written in the pattern: (?is)...
    """

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
    """Gives ``score`` to responses of ``shortest`` to ``longest`` units, and less to others.

    Outside that range the score falls linearly to 0 over ``ramp`` units. A unit is a character, or a token
    of the actor's tokenizer; the end token is not counted.
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
            raise UserError(f"{key}.longest is missing: set it, or {key}.shortest, to a number of {unit}")
        if longest is not None and longest < shortest:
            raise UserError(f"{key}.longest={longest}: must be at least {key}.shortest={shortest}")
        self._shortest, self._longest, self._ramp = shortest, longest, ramp
        self._unit, self._score = unit, score

    def rate(self, text: str, row: Row) -> float:
        length = len(units(text, self._unit, self._tokenizer))
        outside = max(self._shortest - length, 0 if self._longest is None else length - self._longest, 0)
        return self._score * max(0.0, 1.0 - outside / self._ramp)


class RepetitionPenalty(Rule):
    """Penalizes the share of repeated n-grams as open-r1 does, from 0 down to ``max_penalty``.

    The score is (1 - distinct n-grams / all n-grams) * max_penalty, and 0 for responses shorter than an
    n-gram. With ``unit=words``, the text is lower-cased and split at white space; use tokens or characters
    for languages without spaces.
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
        distinct = len(set(zip(*(parts[i:] for i in range(self._n)), strict=False)))
        return self._max_penalty * (1 - distinct / total) if total > 0 else 0.0


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
