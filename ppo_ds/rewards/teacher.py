"""On-policy distillation: a frozen teacher scores each token of the policy's responses.

Agarwal et al. 2024 (GKD), with the reverse KL; Lu and Thinking Machines Lab 2025.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, SupportsInt

import torch

from ppo_ds.background.values import quoted
from ppo_ds.compute.batching import plan_forwards
from ppo_ds.config.sections.models import FrozenZeroConfig, ModelConfig
from ppo_ds.errors import UserError
from ppo_ds.models.policy import Policy, load_policy
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.rewards.base import RewardError
from ppo_ds.rewards.frozen_model import REPLICA, LoadFrozen
from ppo_ds.types import Rollout, Scores


class TeacherReward:
    """Rewards each token with log p_teacher - log p_policy.

    The sum over a response is an unbiased estimate of minus the reverse KL. Both log-probs are those of the
    whole distribution at the sampling ``temperature``; those of the policy come from the decode backend.
    """

    def __init__(
        self,
        model: ModelConfig,
        zero: FrozenZeroConfig = REPLICA,
        *,
        tokenizer: Tokenizer,
        temperature: float,
        load_frozen: LoadFrozen,
        all_reduce_max: Callable[[int], int],
        score_tokens: SupportsInt,
        key: str = "reward",
    ):
        """Loads ``model`` as frozen teacher, a causal language model with the policy's ``tokenizer``."""
        check_teacher(model, tokenizer, key)
        _, self._teacher = load_frozen(load_teacher, model, zero, f"{key}.model.path")
        self._temperature, self._token_budget = temperature, score_tokens
        self._all_reduce_max, self._name = all_reduce_max, f"{key}.model.path={model.path}"

    def __call__(self, rollout: Rollout) -> Scores:
        lengths, budget = rollout.attention_mask.sum(1), int(self._token_budget)
        # a sharded teacher gathers weights in each forward, so all ranks must run the same number of forwards
        plan = plan_forwards(lengths, budget, self._all_reduce_max(len(plan_forwards(lengths, budget))))
        logprobs = torch.zeros(rollout.response_mask.shape)
        with self._teacher.resident():
            for rows in plan:
                micro = rollout.select(rows).trimmed()
                width = micro.response_width
                out: Any = self._teacher(
                    micro.ids, micro.attention_mask, width, temperature=self._temperature
                )
                logprobs[rows, :width] = out.logprobs.float().cpu()
        rewards = (logprobs - rollout.logprobs.cpu()).masked_fill(~rollout.response_mask.cpu(), 0.0)
        if not rewards.isfinite().all():
            raise RewardError(f"{self._name}: a log-prob of the teacher is not finite; try model.dtype=fp32")
        return Scores(torch.zeros(len(rollout)), rewards, {})


def load_teacher(model: ModelConfig, *, key: str) -> Policy:
    return load_policy(model, temperature=1.0, key=key)


def check_teacher(model: ModelConfig, tokenizer: Tokenizer, key: str) -> None:
    """Raises UserError unless the tokenizers of teacher and policy assign the same ids to all tokens."""
    name = f"{key}.model.path"
    own = load_tokenizer(model.path, model.revision, model.trust_remote_code, key=name)
    differing = own.hf.get_vocab().items() ^ tokenizer.hf.get_vocab().items()
    if differing:
        tokens = sorted({token for token, _ in differing})
        raise UserError(
            f"{name}={model.path}: its tokenizer differs from the policy's, {tokenizer.hf.name_or_path}, in "
            f"{len(tokens)} tokens such as {quoted(tokens[0])}; a teacher reads the token ids of the policy, "
            "so choose a model of the same family"
        )
