"""Audits a reward model before training: scores a few fixed dialogues in several ways.

A score must not depend on the other texts of its batch or on the padding, and it must be a finite number that
differs between texts; a violation is recorded as a failure. Other observations are recorded as remarks for
the user: the effect of the end token, and how often a fitting response scores above an unrelated one. Every
rank runs the same forwards on the same texts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.text import EncodedText
from ppo_ds.types import Row

# off: no audit; report: failures are warnings; strict: failures are errors. YAML reads a bare `off` as false.
AuditMode = Literal["off", "report", "strict", False]

# Largest accepted difference between two scores of the same text, relative to the largest absolute score (at
# least 1). It is not 0 because batches of different shapes run different kernels, which round differently.
_TOLERANCE = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
_EQUAL = 1e-5  # scores within this range count as all equal, in any dtype; relative like _TOLERANCE


@dataclass(frozen=True)
class Dialogue:
    """A dialogue and a response that fits it."""

    turns: tuple[str, ...]  # alternating messages; the first and the last are the user's
    response: str

    def row(self, tokenizer: Tokenizer) -> Row:
        """Builds the row that a data set with this dialogue would contain; ``tokenizer`` is the actor's."""
        messages: list[Message] = [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(self.turns)
        ]
        prompt = (
            tokenizer.render_chat(messages) if tokenizer.has_chat_template else "\n".join(self.turns) + "\n"
        )
        return {"prompt_text": prompt, "messages": messages}


DIALOGUES = (
    Dialogue(("What is the capital of France?",), "The capital of France is Paris."),
    Dialogue(("水在标准大气压下的沸点是多少摄氏度？",), "在标准大气压下，水的沸点是100摄氏度。"),
    Dialogue(
        (
            "I have two apples.",
            "Nice! What would you like to know about them?",
            "I buy three more. How many apples do I have now?",
        ),
        "You now have five apples, since 2 + 3 = 5.",
    ),
    Dialogue(
        ("Please explain in two sentences why the sky is blue on a clear day.",),
        "Sunlight is scattered by the molecules of the air, and short wavelengths, such as those of blue "
        "light, are scattered much more than long ones. So blue light reaches our eyes from every direction "
        "of the sky, while the other colours mostly pass straight through.",
    ),
    Dialogue(
        ("你好！我想学做菜。", "你好！你想先学哪一道菜？", "番茄炒蛋需要哪些主要食材？"),
        "主要食材是番茄和鸡蛋，另外准备少许盐、糖、葱花和食用油。",
    ),
    Dialogue(("Translate into English: guten Morgen",), "Good morning."),
)


@dataclass(frozen=True)
class Probes:
    """The dialogues as rows; each has a fitting response and an unrelated one, that of the next dialogue."""

    rows: tuple[Row, ...]
    fitting: tuple[str, ...]
    unrelated: tuple[str, ...]

    def pairs(self) -> list[tuple[Row, str]]:
        """Returns every row with its fitting response, then with an empty and then with the unrelated one."""
        return [
            *zip(self.rows, self.fitting, strict=True),
            *((row, "") for row in self.rows),
            *zip(self.rows, self.unrelated, strict=True),
        ]


def probes(tokenizer: Tokenizer) -> Probes:
    """Builds the probes for an actor with this tokenizer."""
    responses = tuple(dialogue.response for dialogue in DIALOGUES)
    rows = tuple(dialogue.row(tokenizer) for dialogue in DIALOGUES)
    return Probes(rows, responses, responses[1:] + responses[:1])


@dataclass
class Findings:
    """Results of an audit, one line each."""

    failures: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    batches_agree: bool = False  # chat scorers only: whether get_scores works and agrees with get_score

    def check_finite(self, scores: Tensor, dtype: str) -> bool:
        """Records a failure if a score is not finite or all are equal; returns whether all are finite."""
        if not scores.isfinite().all():
            count = int((~scores.isfinite()).sum())
            remedy = "" if dtype == "fp32" else "; try dtype fp32"
            self.failures.append(f"{count} of its {len(scores)} scores are not finite{remedy}")
            return False
        if scores.max() - scores.min() <= _EQUAL * scores.abs().max().clamp(min=1.0):
            self.failures.append(
                f"its scores of {len(scores)} different texts are all {scores[0]:.3g}: it gives no training "
                "signal"
            )
        return True

    def check_batch_independence(self, alone: Tensor, together: Tensor, dtype: str, consequence: str) -> bool:
        """Compares the scores of texts scored alone and in a batch; returns whether they agree."""
        gap = (alone - together).abs().max()
        if gap <= _tolerance(together, dtype):
            return True
        self.failures.append(
            f"the score of a text alone differs by up to {gap:.2g} from its score in a batch: {consequence}"
        )
        return False

    def remark_plausibility(self, scores: Tensor) -> None:
        """Records how often fitting responses score higher; ``scores`` has the order of ``Probes.pairs``."""
        fitting, empty, unrelated = scores.chunk(3)
        wins = " and ".join(
            f"above {name} in {int((fitting > other).sum())} of {len(fitting)}"
            for name, other in (("an empty one", empty), ("an unrelated one", unrelated))
        )
        self.remarks.append(f"a fitting response scores {wins} dialogues")


def audit_classifier(
    score: Callable[[list[EncodedText], str], Tensor],
    encode: Callable[[Row, str, bool], EncodedText],
    *,
    tokenizer: Tokenizer,
    eos_id: int | None,
    max_tokens: int | None,
    is_decoder: bool,
    dtype: str,
) -> Findings:
    """Audits a sequence classifier.

    ``score(texts, padding_side)`` splits the texts into batches and returns their scores, [B]. ``tokenizer``
    is the actor's; ``eos_id``, ``max_tokens``, ``is_decoder`` and ``dtype`` describe the reward model.
    """
    findings, probe = Findings(), probes(tokenizer)
    texts = [encode(row, response, True) for row, response in probe.pairs()]
    fitting = texts[: len(probe.rows)]
    together = score(texts, "right")
    if not findings.check_finite(together, dtype):
        return findings
    alone = torch.cat([score([text], "right") for text in fitting])
    findings.check_batch_independence(
        alone, together[: len(fitting)], dtype, "a response's score would depend on the rest of its batch"
    )
    tolerance = _tolerance(together, dtype)
    gap = (score(texts, "left") - together).abs().max()
    if gap > tolerance:
        line = f"with padding on the left its scores differ by up to {gap:.2g}"
        if is_decoder:  # a critic initialized from it reads prompts, which are padded on the left
            findings.failures.append(
                f"{line}: rewards pad on the right, but a critic initialized from this model reads prompts "
                "padded on the left"
            )
        else:  # an encoder pools at its first position and never becomes a critic
            findings.remarks.append(f"{line}, which is harmless: texts are padded on the right")
    if eos_id is not None:
        toggled = score([_toggle_eos(text, eos_id, max_tokens) for text in fitting], "right")
        gap = (toggled - together[: len(fitting)]).abs().max()
        ends = [text.ids[-1] == eos_id for text in fitting]
        if gap <= tolerance and all(ends):
            # if the end token is also the pad token, transformers reads the position before the end token
            findings.remarks.append(
                "its texts end with the end token, which changes no score: the model may read the position "
                "before it"
            )
        else:
            if all(ends):
                texts_end = "its texts end with it"
            elif any(ends):
                texts_end = "some of its texts end with it"
            else:
                texts_end = "its texts end without it"
            findings.remarks.append(f"the end token changes a score by up to {gap:.2g}; {texts_end}")
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
    """Audits a model that defines its own get_score.

    ``score(chats, batched)`` returns the scores, [B]; it calls get_scores if ``batched``, else get_score. It
    raises RewardError, whose message starts with ``name``, if the model's code fails; if only get_scores
    fails, for example because it calls a function that a library has removed, get_score is used instead.
    ``tokenizer`` is the actor's.
    """
    findings, probe = Findings(batches_agree=has_get_scores), probes(tokenizer)
    chats = [
        [*row["messages"], {"role": "assistant", "content": response}] for row, response in probe.pairs()
    ]
    fitting = chats[: len(probe.rows)]
    try:
        scores = score(chats, has_get_scores)
    except RewardError as error:
        if not has_get_scores:
            raise
        reason = str(error).removeprefix(f"{name}: ")
        findings.remarks.append(f"{reason} (get_score is called one by one instead)")
        findings.batches_agree = False
        scores = score(chats, False)
    if not findings.check_finite(scores, dtype):
        return findings
    if findings.batches_agree:
        findings.batches_agree = findings.check_batch_independence(
            score(fitting, False),
            scores[: len(fitting)],
            dtype,
            "get_score is called one by one instead of get_scores",
        )
        if not findings.batches_agree:
            scores = score(chats, False)
    findings.remark_plausibility(scores)
    return findings


def _toggle_eos(text: EncodedText, eos_id: int, max_tokens: int | None) -> EncodedText:
    """Removes the end token of a text; if it has none, appends one and truncates like the encoder."""
    if text.ids[-1] == eos_id:
        return EncodedText(text.ids[:-1], None if text.types is None else text.types[:-1])
    first = 0 if max_tokens is None else max(0, len(text) + 1 - max_tokens)
    return EncodedText(
        [*text.ids, eos_id][first:], None if text.types is None else [*text.types, text.types[-1]][first:]
    )


def _tolerance(scores: Tensor, dtype: str) -> Tensor:
    return _TOLERANCE[dtype] * scores.abs().max().clamp(min=1.0)
