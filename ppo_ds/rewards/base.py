"""Code shared by all rewards; the ``Reward`` protocol (``Rollout -> Scores``) is defined in ``types.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ppo_ds.errors import RunError, UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.types import Rollout, Row, Scores

_MAX_SCORE = torch.finfo(torch.float32).max


class RewardError(RunError):
    """Raised during training when a reward returns something that is not a valid score.

    Exceptions raised inside a user's reward function are passed on unchanged, with their traceback.
    """


@contextmanager
def reward_errors_as_user_errors() -> Iterator[None]:
    """Turns a RewardError into a UserError, because the user can correct its cause before training."""
    try:
        yield
    except RewardError as error:
        raise UserError(str(error)) from error


@dataclass(frozen=True)
class Responses:
    """B responses as text together with their rows: the input of every text-based reward."""

    rows: tuple[Row, ...]  # B raw rows; "prompt_text" is the prompt
    texts: tuple[str, ...]  # B decoded responses, without special tokens
    finished: tuple[bool, ...]  # B; True: the response ended with a stop token or stop string

    @classmethod
    def of(cls, rollout: Rollout, tokenizer: Tokenizer) -> Responses:
        """Decodes the response tokens that the response mask selects; ``tokenizer`` is the actor's."""
        ids = rollout.response_ids
        texts = tuple(
            tokenizer.decode(row[mask].tolist())
            for row, mask in zip(ids, rollout.response_mask.bool(), strict=True)
        )
        return cls(tuple(rollout.metadata), texts, tuple(rollout.finished.tolist()))

    def inside(self, tag: str) -> Responses:
        """Returns the same rows with each text reduced to the content of its first <tag>...</tag>.

        A response with the tags counts as finished. A response without them becomes an empty text.
        """
        contents = [text_inside(text, tag) for text in self.texts]
        return replace(
            self,
            texts=tuple(content or "" for content in contents),
            finished=tuple(
                done or content is not None for done, content in zip(self.finished, contents, strict=True)
            ),
        )


class TextReward(ABC):
    """Base class of rewards that read only text.

    Subclasses implement ``score_responses``, which other rewards may call with modified texts of the same
    rows. If the model of a reward is sharded over ranks, every rank must call the reward the same number of
    times, each time with one text per row.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Stores the actor's ``tokenizer``, which decodes the responses."""
        self._tokenizer = tokenizer

    def __call__(self, rollout: Rollout) -> Scores:
        return sequence_scores(self.score_responses(Responses.of(rollout, self._tokenizer)), rollout)

    def check_row(self, row: Row) -> None:
        """Raises RewardError if a raw row lacks what the reward needs.

        All rows are checked before any model is loaded.
        """
        return

    @abstractmethod
    def score_responses(self, responses: Responses) -> Tensor:
        """Returns one finite score for each response, [B]."""


def check_tags_decodable(tags: Iterable[str], tokenizer: Tokenizer, key: str) -> None:
    """Raises UserError if a tag is lost when it is encoded and decoded again, as special tokens are.

    A decoded response can never contain such a tag.
    """
    for tag in tags:
        decoded = tokenizer.decode(tokenizer.encode_many([tag], special_tokens=False)[0])
        if tag not in decoded:
            raise UserError(
                f"{key}: the actor's tokenizer decodes {tag} to {quoted(decoded)}; "
                "use a tag that is not a special token, or other text"
            )


def tag_pair(name: str | None) -> list[str]:
    """Returns the opening and the closing tag of ``name``, or an empty list for None."""
    return [] if name is None else [f"<{name}>", f"</{name}>"]


def text_inside(text: str, tag: str) -> str | None:
    """Returns the stripped text between the first <tag> and the next </tag>, or None without these tags.

    It uses ``str.find`` because a lazy regular expression takes quadratic time on adversarial texts.
    """
    start = text.find(f"<{tag}>")
    end = text.find(f"</{tag}>", start)
    return text[start + len(tag) + 2 : end].strip() if 0 <= start < end else None


def conversation(row: Row) -> list[Message]:
    """Returns the row's messages, or its prompt as a single user message."""
    return row.get("messages") or [{"role": "user", "content": row["prompt_text"]}]


def sequence_scores(total: Tensor, rollout: Rollout) -> Scores:
    """Builds Scores from one score per response; ``total`` is [B], the per-token scores are zero."""
    device = rollout.ids.device
    return Scores(total.float().to(device), torch.zeros(rollout.response_mask.shape, device=device), {})


def is_float32(value: Any) -> bool:
    """Returns whether ``value`` is a finite number in the range of float32."""
    return isinstance(value, Real) and abs(value) <= _MAX_SCORE  # False for NaN


def quoted(text: str) -> str:
    """Quotes a text for an error message, shortened and on one line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
