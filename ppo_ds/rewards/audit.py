"""Audits a reward model before training: scores a few fixed dialogues in several ways.

Violations, such as a score that depends on the other texts of the batch, are recorded as failures, other
observations as remarks. Every rank runs the same forwards on the same texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.rewards.base import RewardError, reward_errors_as_user_errors
from ppo_ds.rewards.text import EncodedText, TextEncoder
from ppo_ds.types import Row

# off: no audit; report: failures are warnings; strict: failures are errors. YAML reads a bare `off` as false.
AuditMode = Literal["off", "report", "strict", False]

# Largest accepted difference between two scores of the same text, relative to the largest absolute score (at
# least 1). It is not 0 because batches of different shapes run different kernels, which round differently.
_TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
_EQUAL = 1e-5  # a smaller range of scores counts as all equal, in any dtype; relative like _TOLERANCE


# (alternating messages that begin and end with the user; a fitting response)
DIALOGUES = (
    (("What is the capital of France?",), "The capital of France is Paris."),
    (("水在标准大气压下的沸点是多少摄氏度？",), "在标准大气压下，水的沸点是100摄氏度。"),
    (
        (
            "I have two apples.",
            "Nice! What would you like to know about them?",
            "I buy three more. How many apples do I have now?",
        ),
        "You now have five apples, since 2 + 3 = 5.",
    ),
    (
        ("Please explain in two sentences why the sky is blue on a clear day.",),
        "Sunlight is scattered by the molecules of the air, and short wavelengths, such as those of blue "
        "light, are scattered much more than long ones. So blue light reaches our eyes from every direction "
        "of the sky, while the other colours mostly pass straight through.",
    ),
    (
        ("你好！我想学做菜。", "你好！你想先学哪一道菜？", "番茄炒蛋需要哪些主要食材？"),
        "主要食材是番茄和鸡蛋，另外准备少许盐、糖、葱花和食用油。",
    ),
    (("Translate into English: guten Morgen",), "Good morning."),
)


def probes(tokenizer: Tokenizer) -> list[tuple[Row, str]]:
    """Returns (row, response) of every dialogue: first all fitting, then empty, then unrelated responses."""
    rows: list[Row] = []
    for turns, _ in DIALOGUES:
        messages: list[Message] = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)
        ]
        chat = tokenizer.render_chat(messages) if tokenizer.has_chat_template else "\n".join(turns) + "\n"
        rows.append({"prompt_text": chat, "messages": messages})
    fitting = [response for _, response in DIALOGUES]
    unrelated = fitting[1:] + fitting[:1]
    return list(zip(rows * 3, [*fitting, *[""] * len(rows), *unrelated], strict=True))


@dataclass
class Findings:
    """Results of an audit, one line each."""

    dtype: str = "fp32"
    failures: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    batches_agree: bool = False  # chat scorers only: get_scores works and agrees with get_score

    def check_finite(self, scores: Tensor) -> bool:
        """Records a failure if a score is not finite or all are equal. Returns whether all are finite."""
        if count := int((~scores.isfinite()).sum()):
            remedy = "" if self.dtype == "fp32" else "; try dtype fp32"
            self.failures.append(f"{count} of its {len(scores)} scores are not finite{remedy}")
        elif scores.max() - scores.min() <= _EQUAL * scores.abs().max().clamp(min=1.0):
            self.failures.append(
                f"its scores of {len(scores)} different texts are all {scores[0]:.3g}: it gives no training "
                "signal"
            )
        return not count

    def within_rounding(self, gap: Tensor, scores: Tensor) -> bool:
        return bool(gap <= _TOLERANCE[self.dtype] * scores.abs().max().clamp(min=1.0))

    def check_batch_independence(self, alone: Tensor, together: Tensor, consequence: str) -> bool:
        """Records a failure if texts have other scores alone than in a batch. Returns whether they agree."""
        gap = (alone - together).abs().max()
        if agree := self.within_rounding(gap, together):
            return agree
        self.failures.append(
            f"the score of a text alone differs by up to {gap:.2g} from its score in a batch: {consequence}"
        )
        return False

    def remark_plausibility(self, scores: Tensor) -> None:
        """Records how often fitting responses score above others; ``scores`` have the order of ``probes``."""
        fitting, empty, unrelated = scores.chunk(3)
        above_empty, above_unrelated = int((fitting > empty).sum()), int((fitting > unrelated).sum())
        self.remarks.append(
            f"a fitting response scores above an empty one in {above_empty} of {len(fitting)} and above an "
            f"unrelated one in {above_unrelated} of {len(fitting)} dialogues"
        )


def run_audit(
    inspect: Callable[[], Findings],
    mode: AuditMode,
    *,
    name: str,
    key: str,
    note: Callable[[str], None],
    all_reduce_max: Callable[[int], int],
) -> Findings | None:
    """Runs ``inspect`` unless the audit is off, and passes lines with its findings to ``note``.

    All ranks must call this. In the mode strict, all raise UserError if any rank found a failure. Returns
    None if the audit is off. ``name`` is the model's KEY=PATH.
    """
    if mode not in ("report", "strict"):
        return None
    with reward_errors_as_user_errors():
        findings = inspect()
    if all_reduce_max(len(findings.failures)) and mode == "strict":
        failures = findings.failures or ["the audit failed on another rank"]
        how = f"({key}.audit=strict; with report it is a warning)"
        raise UserError(*(f"{name}: {line} {how}" for line in failures))
    for line in findings.failures:
        note(f"warning    {name}: {line}")
    if findings.remarks:
        note(f"audit      {name}: {'; '.join(findings.remarks)}")
    return findings


def audit_classifier(
    score: Callable[[list[EncodedText], str], Tensor],
    encoder: TextEncoder,
    *,
    tokenizer: Tokenizer,
    is_decoder: bool,
    dtype: str,
) -> Findings:
    """Audits a sequence classifier; ``score(texts, padding_side)`` returns the scores, [B]."""
    findings, count = Findings(dtype), len(DIALOGUES)
    texts = [encoder(row, response, True) for row, response in probes(tokenizer)]
    together = score(texts, "right")
    if not findings.check_finite(together):
        return findings
    alone = torch.cat([score([text], "right") for text in texts[:count]])
    findings.check_batch_independence(
        alone, together[:count], "a response's score would depend on the rest of its batch"
    )
    gap = (score(texts, "left") - together).abs().max()
    if not findings.within_rounding(gap, together):
        line = f"with padding on the left its scores differ by up to {gap:.2g}"
        if is_decoder:  # a critic initialized from a decoder reads prompts, which are padded on the left
            findings.failures.append(
                f"{line}: rewards pad on the right, but a critic initialized from this model reads prompts "
                "padded on the left"
            )
        else:  # an encoder pools at its first position and never becomes a critic
            findings.remarks.append(f"{line}, which is harmless: texts are padded on the right")
    findings.remark_plausibility(together)
    return findings


def audit_chat_scorer(
    score: Callable[[list[list[Message]], bool], Tensor],
    *,
    tokenizer: Tokenizer,
    dtype: str,
    has_get_scores: bool,
    name: str,
) -> Findings:
    """Audits a model that defines get_score itself.

    ``score(chats, batched)`` returns the scores, [B], by get_scores if ``batched``, else by get_score.
    get_score is also used if only get_scores fails, for example because a library has removed a function.
    """
    findings, count = Findings(dtype, batches_agree=has_get_scores), len(DIALOGUES)
    chats = [
        [*row["messages"], {"role": "assistant", "content": response}] for row, response in probes(tokenizer)
    ]
    try:
        scores = score(chats, has_get_scores)
    except RewardError as error:
        if not has_get_scores:
            raise
        reason = str(error).removeprefix(f"{name}: ")
        findings.remarks.append(f"{reason} (get_score is called one by one instead)")
        findings.batches_agree = False
        scores = score(chats, False)
    if not findings.check_finite(scores):
        return findings
    if findings.batches_agree:
        findings.batches_agree = findings.check_batch_independence(
            score(chats[:count], False),
            scores[:count],
            "get_score is called one by one instead of get_scores",
        )
        if not findings.batches_agree:
            scores = score(chats, False)
    findings.remark_plausibility(scores)
    return findings
