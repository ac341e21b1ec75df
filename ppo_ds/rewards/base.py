"""What every kind of reward shares. The protocol itself, ``Reward: Rollout -> Scores``, is in types.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppo_ds.errors import RunError, UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.types import Rollout, Row, Scores


class RewardError(RunError):
    """A reward gave something that is no score, while training. What a reward function raises itself is none: that keeps its traceback."""


@dataclass(frozen=True)
class Answers:
    """B answers as text: all that a reward which reads text may judge by."""

    rows: tuple[Row, ...]  # B raw rows; "prompt_text" is the prompt
    texts: tuple[str, ...]  # B, without special tokens
    finished: tuple[bool, ...]  # B: ended with a stop

    @classmethod
    def of(cls, rollout: Rollout, tokenizer: Tokenizer) -> Answers:
        """``tokenizer``: the actor's."""
        return cls(
            tuple(rollout.metadata),
            tuple(decoded_responses(rollout, tokenizer)),
            tuple(rollout.finished.tolist()),
        )

    def inside(self, tag: str) -> Answers:
        """The same rows, each with what stands between its first <tag> and </tag>: a finished text, and an empty one where they are not there."""
        found = [text_inside(text, tag) for text in self.texts]
        return replace(
            self,
            texts=tuple(text or "" for text in found),
            finished=tuple(done or text is not None for done, text in zip(self.finished, found, strict=True)),
        )


class TextReward(ABC):
    """A reward that reads text alone. Kinds define ``judge``; whoever has other texts for the same rows may call it on those as well.

    Where ranks work together (a sharded model), each must be given as many texts as it has rows, the same number of times.
    """

    def __init__(self, tokenizer: Tokenizer):
        """``tokenizer``: the actor's."""
        self._tokenizer = tokenizer

    def __call__(self, rollout: Rollout) -> Scores:
        return sequence_scores(self.judge(Answers.of(rollout, self._tokenizer)), rollout)

    def expect(self, row: Row) -> None:
        """RewardError for a raw row without what its answers are to be judged by. All rows are shown to it before anything is loaded."""
        return

    @abstractmethod
    def judge(self, answers: Answers) -> Tensor:
        """One finite score each, [B]."""


def expect_writable(tags: Iterable[str], tokenizer: Tokenizer, key: str) -> None:
    """UserError where a tag is lost between ids and text, as special tokens are: no answer would ever show it."""
    for tag in tags:
        back = tokenizer.decode(tokenizer.encode_many([tag], special_tokens=False)[0])
        if tag not in back:
            raise UserError(
                f"{key}: the actor's tokenizer reads {tag} back as {shown(back)}; it must be a token that is not special, or other text"
            )


def both_tags(name: str | None) -> list[str]:
    """answer -> <answer>, </answer>; None has none."""
    return [] if name is None else [f"<{name}>", f"</{name}>"]


def text_inside(text: str, tag: str) -> str | None:
    """What stands between the first <tag> and the next </tag>, stripped; None without them. By find: a lazy regex takes quadratic time."""
    start = text.find(f"<{tag}>")
    end = text.find(f"</{tag}>", start)
    return text[start + len(tag) + 2 : end].strip() if 0 <= start < end else None


def decoded_responses(rollout: Rollout, tokenizer: Tokenizer) -> list[str]:
    """The B answers as text, without special tokens: the tokens under the response mask, whatever their ids are."""
    ids = rollout.ids[:, rollout.prompt_width :]
    return [
        tokenizer.decode(row[mask].tolist())
        for row, mask in zip(ids, rollout.response_mask.bool(), strict=True)
    ]


def sequence_scores(total: Tensor, rollout: Rollout) -> Scores:
    """One score for each answer as a whole; ``total`` [B]."""
    device = rollout.ids.device
    return Scores(total.float().to(device), torch.zeros(rollout.response_mask.shape, device=device), {})


def shown(text: str) -> str:
    """A text as error messages quote it: short, on one line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
