"""Reward function of ``reward=math``: compares mathematical results with the package math-verify.

It reads LaTeX: fractions, roots, sets, intervals, equations and expressions. math-verify takes long for some
responses, so that ``conf/reward/math.yaml`` calls this function in worker processes with a time limit.
"""

from __future__ import annotations

import logging
from typing import Any

from ppo_ds.errors import not_installed

try:
    from math_verify import parse, verify
except ImportError as error:
    raise ImportError(not_installed("math-verify", "math")) from error

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # its warnings print whole responses


def score(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    """Returns 1 for a response whose result equals the reference in the column ``answer``, else 0.

    The reference is a formula, or a solution that ends with one ("#### 42", \\boxed{42}).
    """
    scores = []
    for response, row in zip(responses, rows, strict=True):
        text = str(row["answer"]).rpartition("####")[2].strip()
        reference = parse(text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}")
        if not reference:
            raise ValueError(f"the reference {text[:80]!r} is no mathematical expression")
        scores.append(float(verify(reference, parse(response))))
    return scores
