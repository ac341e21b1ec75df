"""A reward model that scores chats with Python code of its own, such as InternLM2's: see models/chat_scorer.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ppo_ds.config.schema import FrozenZeroConfig, ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.chat_scorer import Chat, ChatScorer, load_chat_scorer
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.ops.batching import plan_microbatches
from ppo_ds.rewards.audit import Audit, audit_chats, conclude
from ppo_ds.rewards.base import Answers, RewardError, TextReward, shown
from ppo_ds.types import Row

_REPLICA = FrozenZeroConfig()


class Scorer(Protocol):
    """A placed ChatScorer, such as engine.frozen.FrozenModel: perhaps away in CPU memory between its turns, but never sharded."""

    def resident(self) -> AbstractContextManager[None]: ...

    def __call__(self, chats: list[Chat], batched: bool) -> Tensor: ...


LoadFrozen = Callable[
    [Callable[..., ChatScorer], ModelConfig, FrozenZeroConfig, str], tuple[ChatScorer, Scorer]
]  # roles.py, RewardModels


class GetScoreReward(TextReward):
    """Scores the row's messages (or its prompt as the user's one message) and the answer. Ranks do not wait for each other."""

    def __init__(
        self,
        score: Scorer,
        length: Callable[[Chat], int],
        *,
        tokenizer: Tokenizer,
        token_budget: int,
        batched: bool,
        key: str,
        name: str,
    ):
        """``length``: of a chat in tokens. ``token_budget``: of one get_scores, padding counted. ``batched``: by get_scores, else one by one.

        ``name``: the model as errors name it.
        """
        super().__init__(tokenizer)
        self._score, self._length = score, length
        self._token_budget, self._batched = token_budget, batched
        self._key, self._name = key, name

    def judge(self, answers: Answers) -> Tensor:
        scores = self.score(
            [_chat(row, text) for row, text in zip(answers.rows, answers.texts, strict=True)], self._batched
        )
        if not scores.isfinite().all():
            row = int((~scores.isfinite()).nonzero()[0])
            response = shown(answers.texts[row])
            raise RewardError(
                f"the reward model scored {scores[row]} for row {row}, response {response}; try {self._key}.model.dtype=fp32"
            )
        return scores

    def score(self, chats: list[Chat], batched: bool) -> Tensor:
        """[B], whatever they are."""
        scores = torch.zeros(len(chats))
        lengths = torch.tensor([self._length(chat) for chat in chats])
        with self._score.resident():
            for rows in plan_microbatches(lengths, torch.zeros_like(lengths), self._token_budget):
                part = self._scored([chats[i] for i in rows.tolist()], batched)
                if len(part) != len(rows):
                    raise RewardError(f"{self._name}: its code gave {len(part)} scores for {len(rows)} chats")
                scores[rows] = part
        return scores

    def _scored(self, chats: list[Chat], batched: bool) -> Tensor:
        try:
            return self._score(chats, batched)
        except torch.OutOfMemoryError:  # says itself what to do
            raise
        except Exception as error:  # foreign code raises anything
            called = "get_scores" if batched else "get_score"
            raise RewardError(
                f"{self._name}: its {called} fails: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}"
            ) from error


def get_score_reward(
    model: ModelConfig,
    zero: FrozenZeroConfig = _REPLICA,
    audit: Audit = "report",
    *,
    tokenizer: Tokenizer,
    load_frozen: LoadFrozen,
    all_reduce_max: Callable[[int], int],
    score_tokens: int,
    note: Callable[[str], None] = lambda line: None,
    key: str = "reward",
) -> GetScoreReward:
    """``load_frozen`` calls the loader and puts the model where it is to run, or gives one that is there. ``key``: this section's.

    ``audit``: see audit.py; its lines go to ``note``. It also finds out whether the model's get_scores says the same as its get_score: if not,
    answers are scored one by one. Without an audit get_scores is trusted where it is there.
    """
    if zero.stage == 3:
        raise UserError(
            f"{key}.zero.stage=3: the code of a get_score model runs on one rank alone; use stage 0 (offload_params keeps it off the GPU)"
        )
    module, scorer = load_frozen(load_chat_scorer, model, zero, f"{key}.model")
    name = f"{key}.model.path={model.path}"

    def made(batched: bool) -> GetScoreReward:
        return GetScoreReward(
            scorer,
            module.length,
            tokenizer=tokenizer,
            token_budget=score_tokens,
            batched=batched,
            key=key,
            name=name,
        )

    reward = made(module.scores_batches)
    if audit not in ("report", "strict"):
        return reward
    try:
        found, usable = audit_chats(
            reward.score, tokenizer=tokenizer, dtype=model.dtype, has_batches=module.scores_batches
        )
    except RewardError as error:  # before training it is the user's to mend
        raise UserError(str(error)) from error
    conclude(found, audit, name=name, key=key, note=note, all_reduce_max=all_reduce_max)
    return made(batched=not all_reduce_max(int(not usable)))  # alike on all ranks


def _chat(row: Row, response: str) -> Chat:
    asked = row.get("messages") or [{"role": "user", "content": row["prompt_text"]}]
    return [*asked, {"role": "assistant", "content": response}]
