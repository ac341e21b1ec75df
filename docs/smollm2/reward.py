"""Scores short, complete responses in plain prose from 0 to 1.

Use it with reward=function reward.path=docs/smollm2/reward.py:score.
"""

from __future__ import annotations

import re
from typing import Any

COMMON = set(
    (
        "a about an and are as at be by can do does for from give have how i if in is it me my of on one or "
        "should so that the them they this to up was we what when which who why "
        "with would write you your short line sentence"
    ).split()
)


def score(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    return [
        grade(row["messages"][-1]["content"], response) for row, response in zip(rows, responses, strict=True)
    ]


def grade(question: str, response: str) -> float:
    """Scores one response.

    Completeness, brevity and topicality are added. Missing the question, repeating the question or itself,
    and lists reduce the sum by a factor.
    """
    asked, words = _words(question), _words(response)
    if len(words) < 5:
        return 0.0  # not a sentence: an empty response must not count as brief
    complete = response.rstrip().endswith((".", "!", '."', '!"'))
    brief = min(1.0, max(0.0, (45 - len(words)) / 25))  # 1 up to 20 words, 0 from 45 words
    topics = {word[:5] for word in asked if word not in COMMON}  # word[:5]: boil, boils and boiled are one
    topical = min(1.0, len(topics & {word[:5] for word in words}) / min(2, len(topics) or 1))
    # 1 if no pair of adjacent words occurs twice
    fresh = len(set(zip(words, words[1:], strict=False))) / (len(words) - 1)
    # up to half of the words may come from the question
    own = min(1.0, 2 * sum(word not in asked for word in words) / len(words))
    prose = 1.0 if "\n" not in response.strip() else 0.5
    return (0.4 * complete + 0.3 * brief + 0.3 * topical) * (0.5 + 0.5 * topical) * fresh**2 * own * prose


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.lower())
