"""Compares responses by their scores."""

from __future__ import annotations

from collections.abc import Sequence

WORTH = (1.0, 0.5, 0.0)  # values of a won, a tied and a lost comparison in a win rate


def outcome_shares(
    scores: Sequence[float], others: Sequence[float], texts: Sequence[str], other_texts: Sequence[str]
) -> tuple[float, float, float]:
    """Compares each response with each of the others; returns the shares of won, tied and lost comparisons.

    Equal texts are a tie even if their scores differ, since scores depend slightly on the batch.
    """
    won = tied = 0
    for score, text in zip(scores, texts, strict=True):
        for other, other_text in zip(others, other_texts, strict=True):
            if score == other or text == other_text:
                tied += 1
            elif score > other:
                won += 1
    pairs = len(scores) * len(others)
    return won / pairs, tied / pairs, (pairs - won - tied) / pairs
