"""A look at a reward model before it judges any answer that counts: a few fixed dialogues, scored in several ways.

A score must not hang on what else is in its batch, nor on the padding, and must be a number that differs between texts. What else is found (what the
end token does, whether a fitting answer beats one that misses the point) is for the reader. Every rank runs the same forwards on the same texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.rewards.text import Text
from ppo_ds.types import Row

# How much comes of it. A bare `off` is false to YAML.
Audit = Literal["off", "report", "strict", False]

_TOLERANCE = {
    "fp32": 1e-3,
    "fp16": 1e-2,
    "bf16": 5e-2,
}  # of the largest score, at least of 1: other shapes take other kernels
_EQUAL = 1e-5  # likewise: a head of zeros, whatever the dtype


@dataclass(frozen=True)
class Dialogue:
    """What was said, turn by turn from the user on, and an answer to it that fits."""

    turns: tuple[str, ...]
    answer: str

    def row(self, tokenizer: Tokenizer) -> Row:
        """As a row of a data set; ``tokenizer``: the actor's."""
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
        "Sunlight is scattered by the molecules of the air, and short wavelengths, such as those of blue light, are scattered much more than "
        "long ones. So blue light reaches our eyes from every direction of the sky, while the other colours mostly pass straight through.",
    ),
    Dialogue(
        ("你好！我想学做菜。", "你好！你想先学哪一道菜？", "番茄炒蛋需要哪些主要食材？"),
        "主要食材是番茄和鸡蛋，另外准备少许盐、糖、葱花和食用油。",
    ),
    Dialogue(("Translate into English: guten Morgen",), "Good morning."),
)


@dataclass(frozen=True)
class Probes:
    """The dialogues, each with three answers: the one that fits, an empty one, and the next dialogue's."""

    rows: tuple[Row, ...]
    fitting: tuple[str, ...]
    others: tuple[str, ...]

    def each(self) -> list[tuple[Row, str]]:
        """All fitting answers first, then all empty ones, then the others'."""
        return [
            *zip(self.rows, self.fitting, strict=True),
            *((row, "") for row in self.rows),
            *zip(self.rows, self.others, strict=True),
        ]


def probes(tokenizer: Tokenizer) -> Probes:
    """``tokenizer``: the actor's."""
    answers = tuple(dialogue.answer for dialogue in DIALOGUES)
    return Probes(
        tuple(dialogue.row(tokenizer) for dialogue in DIALOGUES), answers, answers[1:] + answers[:1]
    )


@dataclass
class Findings:
    """What was seen, one line each."""

    failures: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def numbers(self, scores: Tensor, dtype: str) -> bool:
        """Whether the scores of different texts can be compared at all."""
        if not scores.isfinite().all():
            bad = int((~scores.isfinite()).sum())
            self.failures.append(
                f"{bad} of its {len(scores)} scores are no finite numbers{'' if dtype == 'fp32' else '; try dtype fp32'}"
            )
        elif scores.max() - scores.min() <= _EQUAL * scores.abs().max().clamp(min=1.0):
            self.failures.append(
                f"its scores of {len(scores)} different texts are all {scores[0]:.3g}: it teaches nothing"
            )
        return bool(scores.isfinite().all())

    def alone(self, alone: Tensor, together: Tensor, dtype: str, remedy: str) -> bool:
        """Whether a text's score is its own."""
        gap = (alone - together).abs().max()
        if gap <= _tolerance(together, dtype):
            return True
        self.failures.append(
            f"a text alone scores up to {gap:.2g} off from the same text among others: {remedy}"
        )
        return False

    def plausible(self, scores: Tensor) -> None:
        """Scores in the order of Probes.each()."""
        fitting, empty, others = scores.chunk(3)
        above = " and ".join(
            f"above {name} in {int((fitting > other).sum())} of {len(fitting)}"
            for name, other in (("an empty one", empty), ("another's", others))
        )
        self.remarks.append(f"a fitting answer scores {above} dialogues")


def audit_classifier(
    score: Callable[[list[Text], bool], Tensor],
    encode: Callable[[Row, str, bool], Text],
    *,
    tokenizer: Tokenizer,
    eos_id: int | None,
    max_tokens: int | None,
    is_decoder: bool,
    dtype: str,
) -> Findings:
    """``score(texts, left)``: [B], planned into batches, padded on the left or on the right. ``tokenizer``: the actor's; what follows it is the
    reward model's."""
    found, probe = Findings(), probes(tokenizer)
    texts = [encode(row, answer, True) for row, answer in probe.each()]
    fitting = texts[: len(probe.rows)]
    together = score(texts, False)
    if not found.numbers(together, dtype):
        return found
    alone = torch.cat([score([text], False) for text in fitting])
    found.alone(alone, together[: len(fitting)], dtype, "answers would be judged by their neighbours")
    tolerance = _tolerance(together, dtype)
    _padding(found, (score(texts, True) - together).abs().max(), is_decoder, tolerance)
    if eos_id is not None:
        toggled = score([_toggled(text, eos_id, max_tokens) for text in fitting], False)
        _end_token(
            found,
            (toggled - together[: len(fitting)]).abs().max(),
            [text.ids[-1] == eos_id for text in fitting],
            tolerance,
        )
    found.plausible(together)
    return found


def audit_chats(
    score: Callable[[list[list[Message]], bool], Tensor],
    *,
    tokenizer: Tokenizer,
    dtype: str,
    has_batches: bool,
) -> tuple[Findings, bool]:
    """``score(chats, batched)``: [B], by get_scores or by get_score. ``tokenizer``: the actor's. Also: whether get_scores may be used."""
    found, probe = Findings(), probes(tokenizer)
    chats = [[*row["messages"], {"role": "assistant", "content": answer}] for row, answer in probe.each()]
    fitting = chats[: len(probe.rows)]
    scores = score(chats, has_batches)
    if not found.numbers(scores, dtype):
        return found, has_batches
    agreed = has_batches and found.alone(
        score(fitting, False),
        scores[: len(fitting)],
        dtype,
        "get_scores is not used, but get_score one by one",
    )
    found.plausible(scores if agreed or not has_batches else score(chats, False))
    return found, agreed


def _padding(found: Findings, gap: Tensor, is_decoder: bool, tolerance: Tensor) -> None:
    """Left padding is met where a decoder starts a critic: prompts are padded so. An encoder pools at its first place, and never meets it."""
    if gap <= tolerance:
        return
    line = f"padded on the left its scores differ by up to {gap:.2g}"
    if is_decoder:
        found.failures.append(
            f"{line}: rewards are padded on the right, but a critic that starts from it reads prompts padded on the left"
        )
    else:
        found.remarks.append(f"{line}, which does no harm: texts are padded on the right")


def _end_token(found: Findings, gap: Tensor, ends: Sequence[bool], tolerance: Tensor) -> None:
    """``ends``: whether each text ends with the end token. Where it makes no difference the score may be read before it, as transformers does where
    the end token is the pad token too."""
    have = "end with it" if all(ends) else "end without it" if not any(ends) else "end with it in part"
    if gap <= tolerance and all(ends):
        found.remarks.append(
            "its texts end with the end token, which changes no score: the place before it may be what it reads"
        )
    else:
        found.remarks.append(f"the end token moves a score by up to {gap:.2g}; its texts {have}")


def _toggled(text: Text, eos_id: int, max_tokens: int | None) -> Text:
    """Without its end token, or with one and then cut as the encoder cuts."""
    if text.ids[-1] == eos_id:
        return Text(text.ids[:-1], None if text.types is None else text.types[:-1])
    first = 0 if max_tokens is None else max(0, len(text) + 1 - max_tokens)
    return Text(
        [*text.ids, eos_id][first:], None if text.types is None else [*text.types, text.types[-1]][first:]
    )


def _tolerance(scores: Tensor, dtype: str) -> Tensor:
    return _TOLERANCE[dtype] * scores.abs().max().clamp(min=1.0)


def conclude(
    found: Findings,
    audit: Audit,
    *,
    name: str,
    key: str,
    note: Callable[[str], None],
    all_reduce_max: Callable[[int], int],
) -> None:
    """Lines for the banner, or with ``strict`` UserError on every rank where any rank saw a failure. ``name``: the model's key and path."""
    if all_reduce_max(len(found.failures)) and audit == "strict":
        lines = found.failures or ["another rank found it wanting"]
        raise UserError(
            *[f"{name}: {line} ({key}.audit=strict; report goes on with a warning)" for line in lines]
        )
    for line in found.failures:
        note(f"warning    {name}: {line}")
    if found.remarks:
        note(f"audit      {name}: {'; '.join(found.remarks)}")
