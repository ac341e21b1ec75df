"""Rewards made of rewards: a weighted sum of any, and one reward of the whole answer and of the part that is the answer proper."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from ppo_ds.config.targets import NESTED
from ppo_ds.config.typed import Positive
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ops.running import RunningMoments
from ppo_ds.rewards.base import (
    Answers,
    RewardError,
    TextReward,
    both_tags,
    expect_writable,
    sequence_scores,
    shown,
    text_inside,
)
from ppo_ds.rewards.rules import Tag
from ppo_ds.types import Reward, Rollout, Row, Scores


@dataclass(frozen=True)
class Part:
    """One reward of a mixture, and what happens to its score before it is added."""

    reward: Annotated[Reward, NESTED]  # a section with a `_target_` of its own
    weight: float = 1.0  # 0: computed and logged only
    normalize: Literal["none", "running"] = (
        "none"  # by mean and std of all its scores so far, this batch included, over all ranks
    )
    clip: Positive | None = None  # to [-clip, clip], after normalising; null: off
    inside: Tag | None = (
        None  # the reward reads only what stands between <tag> and </tag>; an empty text where there is none
    )


class _Some:
    def __contains__(self, parts: dict[str, Part]) -> bool:
        return bool(parts)

    def __str__(self) -> str:
        return "one part or more, as NAME: {weight: 1, reward: {_target_: ...}}"


class WeightedReward:
    """total = sum of weight x clip(normalize(score of the part)).

    ``Scores.components`` has each part's score under its name as it is before the weight, so that weight x component adds up to the total, and
    for a normalised part also ``<name>_raw``, as the part gave it. A part's own components follow as ``<name>/<component>``, its per-token
    scores are added with the weight and nothing else.
    """

    def __init__(
        self,
        parts: Annotated[dict[str, Part], _Some()],
        *,
        tokenizer: Tokenizer,
        reduce: Callable[[Tensor], Tensor],
        key: str = "reward",
    ):
        """``reduce``: sums a tensor over all ranks."""
        self._parts, self._tokenizer, self._reduce, self._key = parts, tokenizer, reduce, f"{key}.parts"
        self._moments = {
            name: RunningMoments() for name, part in parts.items() if part.normalize == "running"
        }
        if not any(part.weight for part in parts.values()):
            raise UserError(
                f"{self._key}: every weight is 0: nothing would be rewarded; give one part another weight"
            )
        wrong = [line for name, part in parts.items() for line in _unfit(part, f"{self._key}.{name}")]
        if wrong:
            raise UserError(*wrong)
        for name, part in parts.items():
            expect_writable(both_tags(part.inside), tokenizer, f"{self._key}.{name}.inside={part.inside}")

    def __call__(self, rollout: Rollout) -> Scores:
        """A collective where a part is normalised."""
        return self._mixed(rollout, training=True)

    def evaluate(self, rollout: Rollout) -> Scores:
        """For held-out answers: a normalised part counts as it gave its score, so that evaluations compare; running moments stay as they are."""
        return self._mixed(rollout, training=False)

    def expect(self, row: Row) -> None:
        """As a TextReward's, of each part."""
        for name, part in self._parts.items():
            if isinstance(part.reward, TextReward):
                with _naming(f"{self._key}.{name}"):
                    part.reward.expect(row)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, alike on every rank."""
        return {"moments": {name: moments.state_dict() for name, moments in self._moments.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["moments"].keys() != self._moments.keys():
            before, now = (", ".join(sorted(names)) or "none" for names in (state["moments"], self._moments))
            raise UserError(
                f"{self._key}: normalised with running moments are {now}, in the checkpoint {before}; resume with the same ones"
            )
        for name, moments in self._moments.items():
            moments.load_state_dict(state["moments"][name])

    def _mixed(self, rollout: Rollout, training: bool) -> Scores:
        answers = Answers.of(rollout, self._tokenizer)
        mixed = sequence_scores(torch.zeros(len(rollout)), rollout)
        total, per_token, components = mixed.total, mixed.per_token, {}
        for name, part in self._parts.items():
            with _naming(f"{self._key}.{name}"):
                given = _given(part, rollout, answers)
            score = self._shaped(name, part, given.total, training)
            total = total + part.weight * score
            per_token = per_token + part.weight * given.per_token
            components[name] = score
            if name in self._moments:
                components[f"{name}_raw"] = given.total
            components |= {f"{name}/{inner}": column for inner, column in given.components.items()}
        return Scores(total, per_token, components)

    def _shaped(self, name: str, part: Part, score: Tensor, training: bool) -> Tensor:
        if name in self._moments:
            if not training:
                return score
            self._moments[name].update(score, self._reduce)
            score = self._moments[name].normalize(score)
        return score if part.clip is None else score.clamp(-part.clip, part.clip)


def _unfit(part: Part, key: str) -> Iterator[str]:
    if part.inside and not isinstance(part.reward, TextReward):
        yield f"{key}.inside={part.inside}: {type(part.reward).__name__} does not read text alone; make it null"
    if isinstance(part.reward, WeightedReward):
        yield f"{key}.reward: is a mixture itself; put its parts beside the others"


def _given(part: Part, rollout: Rollout, answers: Answers) -> Scores:
    if not isinstance(part.reward, TextReward):
        given = part.reward(rollout)
    else:  # reads what has been decoded once for all parts
        given = sequence_scores(
            part.reward.judge(answers.inside(part.inside) if part.inside else answers), rollout
        )
    bad = ~(given.total.isfinite() & given.per_token.isfinite().all(1))  # a weight of 0 would not hide it
    if bad.any():
        row = int(bad.nonzero()[0])
        raise RewardError(
            f"a score is not finite: {given.total[row]} for row {row}, prompt {shown(answers.rows[row]['prompt_text'])}"
        )
    return given


@contextmanager
def _naming(part: str) -> Iterator[None]:
    """What a part raises goes on as it is, with the part's name at its end."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {part}")
        raise


class AnswerMix(TextReward):
    """MiniMind's score of reasoning: ``whole`` x score of all the text + ``answer`` x score of what stands inside the tag.

    The score of all the text alone where an answer has no such pair of tags. Each score is clipped to [-clip, clip] first. The second pass has as
    many texts as the first on every rank, since a sharded model needs that.
    """

    def __init__(
        self,
        reward: Annotated[TextReward, NESTED],
        whole: float = 0.4,
        answer: float = 0.6,
        clip: Positive | None = None,
        tag: Tag = "answer",
        *,
        tokenizer: Tokenizer,
        key: str = "reward",
    ):
        super().__init__(tokenizer)
        if not isinstance(reward, TextReward):
            raise UserError(
                f"{key}.reward: {type(reward).__name__} does not read text alone; put the mix of whole and answer around its parts"
            )
        expect_writable(both_tags(tag), tokenizer, f"{key}.tag={tag}")
        self._reward, self._whole, self._answer, self._clip, self._tag = reward, whole, answer, clip, tag

    def expect(self, row: Row) -> None:
        self._reward.expect(row)

    def judge(self, answers: Answers) -> Tensor:
        whole, answer = (
            self._clipped(self._reward.judge(read)) for read in (answers, answers.inside(self._tag))
        )
        found = torch.tensor(
            [text_inside(text, self._tag) is not None for text in answers.texts], dtype=torch.bool
        )
        return torch.where(found, self._whole * whole + self._answer * answer, whole)

    def _clipped(self, scores: Tensor) -> Tensor:
        return scores if self._clip is None else scores.clamp(-self._clip, self._clip)
