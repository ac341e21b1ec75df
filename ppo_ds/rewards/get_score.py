"""A reward model that scores chats with its own Python code, such as InternLM2's (models/chat_scorer.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import SupportsInt

import torch
from torch import Tensor

from ppo_ds.compute.batching import plan_microbatches
from ppo_ds.config.sections.models import FrozenZeroConfig, ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.chat_scorer import Chat, load_chat_scorer
from ppo_ds.models.tokenizer import Tokenizer
from ppo_ds.rewards.audit import AuditMode, audit_chat_scorer, run_audit
from ppo_ds.rewards.base import RewardError, conversation
from ppo_ds.rewards.frozen_model import REPLICA, FrozenModelReward, LoadFrozen
from ppo_ds.types import Row


@dataclass(eq=False)
class GetScoreReward(FrozenModelReward):
    """Scores the chat of a row's messages and the response, using the model's own code.

    The model is never sharded, so ranks score their responses independently.
    """

    _: KW_ONLY
    num_tokens: Callable[[Chat], int]  # returns the number of tokens of a chat
    batched: bool  # whether to call get_scores, which scores several chats together, instead of get_score

    def encode(self, row: Row, response: str, finished: bool) -> Chat:
        return [*conversation(row), {"role": "assistant", "content": response}]

    def score(self, inputs: Sequence[Chat], batched: bool | None = None) -> Tensor:
        """Scores chats, [B]; ``batched`` replaces the setting of the reward, for the audit only."""
        batched = self.batched if batched is None else batched
        lengths = torch.tensor([self.num_tokens(chat) for chat in inputs])
        batches = plan_microbatches(lengths, torch.zeros_like(lengths), int(self.token_budget))

        def forward(chats: list[Chat]) -> Tensor:
            try:
                scores = self.scorer(chats, batched)
            except torch.OutOfMemoryError:  # PhaseTimer adds a remedy to this error
                raise
            except Exception as error:  # the model's own code may raise any exception
                function = "get_scores" if batched else "get_score"
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise RewardError(f"{self.name}: its {function} fails: {reason}") from error
            if len(scores) != len(chats):
                raise RewardError(
                    f"{self.name}: its code returned {len(scores)} scores for {len(chats)} chats"
                )
            return scores

        return self._score_in_batches(inputs, batches, forward)


def get_score_reward(
    model: ModelConfig,
    zero: FrozenZeroConfig = REPLICA,
    audit: AuditMode = "report",
    *,
    tokenizer: Tokenizer,
    load_frozen: LoadFrozen,
    all_reduce_max: Callable[[int], int],
    score_tokens: SupportsInt,
    note: Callable[[str], None] = lambda line: None,
    key: str = "reward",
) -> GetScoreReward:
    """Loads a model that has a method get_score, for use as a reward; for the arguments see ``model_reward``.

    If get_scores disagrees with get_score or fails on any rank, all ranks score responses one by one. Without
    an audit, get_scores is used unchecked if it exists. All ranks must call this.
    """
    if zero.stage == 3:
        raise UserError(
            f"{key}.zero.stage=3: the code of a get_score model runs on each rank alone; "
            "use stage 0 (offload_params keeps it off the GPU)"
        )
    module, scorer = load_frozen(load_chat_scorer, model, zero, f"{key}.model")
    name, batched = f"{key}.model.path={model.path}", module.scores_batches
    reward = GetScoreReward(
        scorer,
        batched=batched,
        num_tokens=module.length,
        tokenizer=tokenizer,
        token_budget=score_tokens,
        key=key,
        name=name,
    )
    inspect = partial(
        audit_chat_scorer,
        reward.score,
        tokenizer=tokenizer,
        dtype=model.dtype,
        has_get_scores=batched,
        name=name,
    )
    findings = run_audit(inspect, audit, name=name, key=key, note=note, all_reduce_max=all_reduce_max)
    if findings is not None:
        reward.batched = not all_reduce_max(int(not findings.batches_agree))
    return reward
