"""Code shared by all rewards; the ``Reward`` protocol (``Rollout -> Scores``) is defined in ``types.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from ppo_ds.background.pending import Pending
from ppo_ds.background.values import quoted
from ppo_ds.errors import RunError, UserError
from ppo_ds.models.tokenizer import Message, Tokenizer
from ppo_ds.types import Reward, Rollout, Row, Scores


class RewardError(RunError):
    """Raised if a reward cannot score a response, or returns an invalid score."""


@runtime_checkable
class OverlappingReward(Reward, Protocol):
    """A reward that can score in the background while the models compute log-probs and values."""

    def start_scoring(self, rollout: Rollout) -> Pending[Scores]:
        """Starts to score a rollout. The result must have background tasks on all ranks or on none."""
        ...


def start_scoring(reward: Reward, rollout: Rollout) -> Pending[Scores]:
    """Starts to score a rollout. A reward that cannot score in the background scores at once."""
    if isinstance(reward, OverlappingReward):
        return reward.start_scoring(rollout)
    return Pending.of(reward(rollout))


@contextmanager
def reward_errors_as_user_errors() -> Iterator[None]:
    """Converts a RewardError to a UserError; for use before training, when the user can fix the cause."""
    try:
        yield
    except RewardError as error:
        raise UserError(str(error)) from error


@dataclass(frozen=True)
class Responses:
    """B responses as text with their rows: the input of every text-based reward."""

    rows: tuple[Row, ...]  # B raw rows; "prompt_text" is the prompt
    texts: tuple[str, ...]  # B decoded responses, without special tokens
    finished: tuple[bool, ...]  # B; True: the response ended with a stop token or stop string
    # B character offsets of the texts in the decoded responses; None: the texts are whole responses
    starts: tuple[int, ...] | None = None

    @classmethod
    def of(cls, rollout: Rollout, tokenizer: Tokenizer) -> Responses:
        """Decodes the response tokens with response mask = 1; ``tokenizer`` is the actor's."""
        mask = rollout.response_mask.bool()
        actions = rollout.response_ids[mask].split(mask.sum(1).tolist())
        texts = tuple(tokenizer.decode(ids.tolist()) for ids in actions)
        return cls(tuple(rollout.metadata), texts, tuple(rollout.finished.tolist()))

    def inside(self, tag: str) -> Responses:
        """Returns the same rows with each text replaced by the content of its first <tag>...</tag>.

        A response with the tags counts as finished. Without the tags, the text becomes empty.
        """
        spans = [span_inside(text, tag) for text in self.texts]
        return replace(
            self,
            texts=tuple(text[slice(*span or (0, 0))] for text, span in zip(self.texts, spans, strict=True)),
            finished=tuple(done or span is not None for done, span in zip(self.finished, spans, strict=True)),
            starts=tuple(
                start + (0 if span is None else span[0])
                for start, span in zip(self.starts or (0,) * len(spans), spans, strict=True)
            ),
        )


class StepReward(NamedTuple):
    """The reward of one step of a text."""

    end: int  # number of characters of the text up to the end of the step
    reward: float


@dataclass(frozen=True)
class TextScores:
    """Scores of B texts."""

    total: Tensor  # [B]
    steps: tuple[tuple[StepReward, ...], ...] = ()  # B; empty without step rewards
    # name -> [B], see Scores.components
    components: dict[str, Tensor] = field(default_factory=dict)


class TextReward(ABC):
    """Base class of rewards that read only text.

    With a sharded model, all ranks must call ``score_responses`` equally often, with one text for each row of
    the rollout.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer  # the actor's, which decodes the responses

    def __call__(self, rollout: Rollout) -> Scores:
        return self.start_scoring(rollout).result()

    def start_scoring(self, rollout: Rollout) -> Pending[Scores]:
        """Starts to score a rollout; the scores may be computed in the background."""
        responses = Responses.of(rollout, self.tokenizer)
        return self.start_responses(responses).then(
            lambda scores: token_scores(scores, responses, rollout, self.tokenizer)
        )

    def start_responses(self, responses: Responses) -> Pending[TextScores]:
        """Starts to score texts. By default, computes the scores at once."""
        return Pending.of(TextScores(self.score_responses(responses)))

    def check_row(self, row: Row) -> None:
        """Raises RewardError if a raw row lacks data that the reward needs.

        All rows are checked before models are loaded.
        """
        return

    @abstractmethod
    def score_responses(self, responses: Responses) -> Tensor:
        """Returns one finite score for each response, [B]."""


class SlowTextReward(TextReward):
    """Base class of text rewards that score in the background; subclasses implement ``start_responses``."""

    @abstractmethod
    def start_responses(self, responses: Responses) -> Pending[TextScores]:
        """Starts to score texts in the background."""

    def score_responses(self, responses: Responses) -> Tensor:
        """Waits for the scores. The rewards of a response's steps are added to its score."""
        scores = self.start_responses(responses).result()
        sums = [sum(step.reward for step in steps) for steps in scores.steps]
        return scores.total + torch.tensor(sums) if sums else scores.total


def check_tags_decodable(tags: Iterable[str], tokenizer: Tokenizer, key: str) -> None:
    """Raises UserError if a tag is lost by encoding and decoding, as special tokens are.

    A decoded response could never contain such a tag.
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
    """Returns the stripped text between the first <tag> and the next </tag>, or None if these are missing."""
    span = span_inside(text, tag)
    return None if span is None else text[slice(*span)]


def span_inside(text: str, tag: str) -> tuple[int, int] | None:
    """Returns start and end of the stripped text between the first <tag> and the next </tag>, or None.

    It uses ``str.find``, because a lazy regular expression takes quadratic time on adversarial texts.
    """
    start = text.find(f"<{tag}>")
    end = text.find(f"</{tag}>", start)
    if not 0 <= start < end:
        return None
    start += len(tag) + 2
    content = text[start:end]
    return start + len(content) - len(content.lstrip()), start + len(content.rstrip())


def conversation(row: Row) -> list[Message]:
    """Returns the row's messages, or its prompt as a single user message."""
    return row.get("messages") or [{"role": "user", "content": row["prompt_text"]}]


def token_scores(scores: TextScores, responses: Responses, rollout: Rollout, tokenizer: Tokenizer) -> Scores:
    """Converts scores of texts to Scores of the rollout whose responses contain the texts.

    The reward of a step belongs to the token that completes the step, even if this token also begins the next
    step. For the last step of a response, this is the last token, which may be the stop token.
    """
    per_token = torch.zeros(rollout.response_mask.shape)
    starts = responses.starts or (0,) * len(rollout)
    for row, (start, steps) in enumerate(zip(starts, scores.steps, strict=False)):
        columns = rollout.response_mask[row].nonzero()[:, 0]
        ids = rollout.response_ids[row, columns].tolist()
        tokens = token_ends([start + step.end for step in steps], ids, tokenizer)
        for token, step in zip(tokens, steps, strict=True):
            per_token[row, columns[token]] += step.reward
    device = rollout.ids.device
    return Scores(scores.total.float().to(device), per_token.to(device), scores.components)


def token_ends(ends: Sequence[int], ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """Returns, for each of the increasing offsets ``ends``, the index of the token that completes it.

    An offset counts characters of the decoded ``ids``. The end of the text belongs to the last token.
    """
    text, tokens, count = tokenizer.decode(ids), [], 1  # number of tokens up to the end of the last step
    for end in ends:
        if end == len(text):
            tokens.append(len(ids) - 1)
            continue
        # The search decodes only tokens from shortly before the step on, because the time would otherwise
        # grow with the square of the length. The first characters may differ from those of the whole text (a
        # missing space, a broken character), but the number of characters after ``end`` is the same.
        start = max(0, count - 4)
        rest = tokenizer.decode(ids[start:])
        wanted = rest[: len(rest) - len(text) + end]

        def is_complete(count: int, start: int = start, wanted: str = wanted) -> bool:
            return tokenizer.decode(ids[start:count]).startswith(wanted)

        low = high = count
        while high < len(ids) and not is_complete(high):
            low, high = high + 1, 2 * high - count + 1
        count = bisect_left(range(len(ids)), True, lo=low, hi=min(high, len(ids)), key=is_complete)
        tokens.append(count - 1)
    return tokens
