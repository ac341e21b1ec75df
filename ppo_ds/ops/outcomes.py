"""Outcomes of comparisons of responses by their scores."""

from __future__ import annotations

from collections.abc import Sequence

WORTH = (1.0, 0.5, 0.0)  # of a won, a tied and a lost comparison in a win rate


def outcome_shares(
    scores: Sequence[float], others: Sequence[float], texts: Sequence[str], other_texts: Sequence[str]
) -> tuple[float, float, float]:
    """Returns the shares of all pairs of responses to one prompt that are won, tied and lost.

    Equal texts are a tie even if their scores differ, which depend slightly on the batch.
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
