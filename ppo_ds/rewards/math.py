"""Reward function of ``reward=math``: compares mathematical results with the package math-verify.

math-verify parses LaTeX: fractions, roots, sets, intervals, equations and expressions. It is slow on some
responses, so ``conf/reward/math.yaml`` calls this function in worker processes with a time limit.
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
    """Returns 1 for a response whose result equals the one in the column ``answer``, else 0.

    ``answer`` is a formula, a solution that ends with one ("#### 42", \\boxed{42}), or a list of these, one
    of which must match. Raises ValueError for an answer that math-verify cannot parse.
    """
    scores = []
    for response, row in zip(responses, rows, strict=True):
        answers = row["answer"] if isinstance(row["answer"], list) else [row["answer"]]
        accepted = [form for answer in answers for form in forms(answer)]
        found = parse(response)
        scores.append(float(any(verify(form, found) for form in accepted)))
    return scores


def forms(answer: Any) -> list[Any]:
    """Returns the accepted results: the answer parsed inside a box and, if it ends with %, also unboxed."""
    text = "" if answer is None else str(answer).rpartition("####")[2].strip()
    boxed = text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"
    read = [parse(form) for form in ([boxed, text.replace("\\%", "%")] if text.endswith("%") else [boxed])]
    if not all(read):
        raise ValueError(f"the reference {text[:80]!r} is no mathematical expression")
    return read
