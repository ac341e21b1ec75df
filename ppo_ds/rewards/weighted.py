"""Rewards that combine others: a weighted sum of rewards, and a mix of two scores from one reward.

The mix combines the scores of the whole response and of its part inside a tag, such as <answer>.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from ppo_ds.background.pending import Pending, all_of, start_all
from ppo_ds.background.values import quoted
from ppo_ds.config.targets import NESTED
from ppo_ds.config.types import Must, Number, Positive, Section
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ops.moments import RunningMoments
from ppo_ds.rewards.base import (
    Responses,
    RewardError,
    SlowTextReward,
    TextReward,
    TextScores,
    check_tags_decodable,
    start_scoring,
    tag_pair,
    text_inside,
    token_scores,
)
from ppo_ds.rewards.rules import Tag
from ppo_ds.types import Reward, Rollout, Row, Scores


class Part(Section):
    """One reward of a weighted sum, with the transformation of its score."""

    reward: Annotated[Reward, NESTED]  # a section with a `_target_`
    weight: Number = 1.0  # 0: the score is computed and logged only
    # running: subtracts the mean of this part's scores so far, this batch included, and divides by their
    # std; both are over all ranks
    normalize: Literal["none", "running"] = "none"
    clip: Positive | None = None  # limits the score to [-clip, clip] after normalization; null: no limit
    # tag name: the reward reads only the text between <tag> and </tag>, or an empty text without these
    inside: Tag | None = None


class WeightedReward:
    """Computes total = sum of weight x clip(normalize(score of the part)).

    ``Scores.components`` maps each part's name to its clipped score, without the weight, plus the sum of its
    per-token scores. A normalized part also has ``<name>_raw``, its score before normalization. A part's
    components are ``<name>/<component>``. Per-token scores of a part are weighted, but neither normalized nor
    clipped.
    """

    def __init__(
        self,
        parts: Annotated[
            dict[str, Part], Must(bool, "one part or more, as NAME: {weight: 1, reward: {_target_: ...}}")
        ],
        *,
        tokenizer: Tokenizer,
        reduce: Callable[[Tensor], Tensor],
        key: str = "reward",
    ):
        """Checks the parts; ``reduce`` sums a tensor over all ranks."""
        self._parts, self._tokenizer, self._reduce, self._key = parts, tokenizer, reduce, f"{key}.parts"
        self._moments = {
            name: RunningMoments() for name, part in parts.items() if part.normalize == "running"
        }
        if not any(part.weight for part in parts.values()):
            raise UserError(
                f"{self._key}: every weight is 0, so every total is 0; give one part another weight"
            )
        problems = []
        for name, part in parts.items():
            part_key = f"{self._key}.{name}"
            if part.inside and not isinstance(part.reward, TextReward):
                problems.append(
                    f"{part_key}.inside={part.inside}: {type(part.reward).__name__} does not read text "
                    "alone; set it to null"
                )
            if isinstance(part.reward, WeightedReward):
                problems.append(
                    f"{part_key}.reward: is a weighted reward itself; put its parts beside the others"
                )
        if problems:
            raise UserError(*problems)
        for name, part in parts.items():
            check_tags_decodable(tag_pair(part.inside), tokenizer, f"{self._key}.{name}.inside={part.inside}")

    def __call__(self, rollout: Rollout) -> Scores:
        return self.start_scoring(rollout).result()

    def start_evaluation(self, rollout: Rollout) -> Pending[Scores]:
        """Starts to score held-out responses; parts with normalize=running give raw, unclipped scores here.

        Their moments change during training, so normalized scores of two evaluations could not be compared.
        """
        return self.start_scoring(rollout, training=False)

    def check_row(self, row: Row) -> None:
        """Calls ``check_row`` of every part that is a TextReward."""
        for name, part in self._parts.items():
            if isinstance(part.reward, TextReward):
                with _name_in_errors(f"{self._key}.{name}"):
                    part.reward.check_row(row)

    def state_dict(self) -> dict[str, Any]:
        """Returns the running moments, which are equal on all ranks."""
        return {"moments": {name: moments.state_dict() for name, moments in self._moments.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["moments"].keys() != self._moments.keys():
            before, now = (", ".join(sorted(names)) or "none" for names in (state["moments"], self._moments))
            raise UserError(
                f"{self._key}: the parts with normalize=running are {now}, but {before} in "
                "the checkpoint; resume with those of the checkpoint"
            )
        for name, moments in self._moments.items():
            moments.load_state_dict(state["moments"][name])

    def start_scoring(self, rollout: Rollout, training: bool = True) -> Pending[Scores]:
        """Starts to score with all parts.

        In ``training``, the result of a normalized part is a collective, so all ranks must wait for it. Parts
        that score in the background start first, and overlap with the others.
        """
        responses = Responses.of(rollout, self._tokenizer)  # decoded once for all parts
        names = sorted(self._parts, key=lambda name: not isinstance(self._parts[name].reward, SlowTextReward))
        pending = start_all(self._start_part(name, rollout, responses) for name in names)
        started = dict(zip(names, pending, strict=True))
        parts = all_of([started[name] for name in self._parts])
        return parts.then(lambda scores: self._combine(rollout, scores, training))

    def _start_part(self, name: str, rollout: Rollout, responses: Responses) -> Pending[Scores]:
        """Starts to score a rollout with one part. A TextReward gets the already decoded ``responses``."""
        part, key = self._parts[name], f"{self._key}.{name}"
        texts = responses.inside(part.inside) if part.inside else responses

        def place(scores: TextScores) -> Scores:
            return token_scores(scores, texts, rollout, self._tokenizer)

        def check(scores: Scores) -> Scores:
            """Raises RewardError for a non-finite score, even of a part with weight 0."""
            bad = ~(scores.total.isfinite() & scores.per_token.isfinite().all(1))
            if bad.any():
                row = int(bad.nonzero()[0])
                prompt = quoted(responses.rows[row]["prompt_text"])
                with _name_in_errors(key):
                    raise RewardError(
                        f"a score is not finite: {scores.total[row]} for row {row}, prompt {prompt}"
                    )
            return scores

        with _name_in_errors(key):
            if isinstance(part.reward, TextReward):
                started = part.reward.start_responses(texts).then(place)
            else:
                started = start_scoring(part.reward, rollout)
        return started.then(check)

    def _combine(self, rollout: Rollout, scores: list[Scores], training: bool) -> Scores:
        device, components = rollout.ids.device, {}
        total = torch.zeros(len(rollout), device=device)
        per_token = torch.zeros(rollout.response_mask.shape, device=device)
        for (name, part), raw in zip(self._parts.items(), scores, strict=True):
            score = raw.total
            if name not in self._moments:
                score = _clip(score, part.clip)
            elif training:
                self._moments[name].update(score, self._reduce)
                score = _clip(self._moments[name].normalize(score), part.clip)
            total = total + part.weight * score
            per_token = per_token + part.weight * raw.per_token
            components[name] = score + raw.per_token.sum(1)
            if name in self._moments:
                components[f"{name}_raw"] = raw.sums
            components |= {f"{name}/{inner}": column for inner, column in raw.components.items()}
        return Scores(total, per_token, components)


@contextmanager
def _name_in_errors(part: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in {part}")
        raise


@dataclass(eq=False)
class AnswerMix(SlowTextReward):
    """Mixes the scores of the whole response and of its tagged answer, like MiniMind's reasoning reward.

    The score is ``whole`` x score of the whole text + ``answer`` x score of the text inside the tag, each
    clipped to [-clip, clip]. Without the tags, it is the clipped score of the whole text. An empty text is
    then scored too, because a sharded model needs equally many texts in both passes on every rank.
    """

    reward: Annotated[TextReward, NESTED]
    whole: float = 0.4
    answer: float = 0.6
    clip: Positive | None = None
    tag: Tag = "answer"
    _: KW_ONLY
    tokenizer: Tokenizer
    key: str = "reward"

    def __post_init__(self) -> None:
        if not isinstance(self.reward, TextReward):
            raise UserError(
                f"{self.key}.reward: {type(self.reward).__name__} does not read text alone; "
                "put an AnswerMix around each of its parts"
            )
        check_tags_decodable(tag_pair(self.tag), self.tokenizer, f"{self.key}.tag={self.tag}")

    def check_row(self, row: Row) -> None:
        self.reward.check_row(row)

    def start_responses(self, responses: Responses) -> Pending[TextScores]:
        inside = responses.inside(self.tag)

        def mix(scores: list[TextScores]) -> TextScores:
            if any(any(of_texts.steps) for of_texts in scores):
                raise RewardError(
                    f"{self.key}.reward returned step rewards, which an AnswerMix cannot mix; let the "
                    "function return one float per response, or use a part of a mixture with inside=TAG"
                )
            whole, answer = (_clip(of_texts.total, self.clip) for of_texts in scores)
            tagged = torch.tensor(
                [text_inside(text, self.tag) is not None for text in responses.texts], dtype=torch.bool
            )
            return TextScores(torch.where(tagged, self.whole * whole + self.answer * answer, whole))

        both = start_all(self.reward.start_responses(texts) for texts in (responses, inside))
        return all_of(both).then(mix)


def _clip(scores: Tensor, limit: float | None) -> Tensor:
    return scores if limit is None else scores.clamp(-limit, limit)
