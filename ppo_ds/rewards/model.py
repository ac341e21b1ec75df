"""A reward model: any sequence classifier with one label, reading answers with its own tokenizer and template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor

from ppo_ds.config.schema import FrozenZeroConfig, ModelConfig
from ppo_ds.config.typed import Count
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.models.value import ScoreModel, expect_reward_model, load_reward_model
from ppo_ds.ops.batching import plan_forwards, plan_microbatches
from ppo_ds.rewards.audit import Audit, audit_classifier, conclude
from ppo_ds.rewards.base import Answers, RewardError, TextReward, shown
from ppo_ds.rewards.text import Template, Text, TextEncoder, left_padded, right_padded
from ppo_ds.types import Row

_REPLICA = FrozenZeroConfig()


class Scorer(Protocol):
    """A placed ScoreModel, such as engine.frozen.FrozenModel: on one device, perhaps away in CPU memory or sharded between its turns."""

    device: torch.device

    def resident(self) -> AbstractContextManager[None]: ...

    def __call__(self, ids: Tensor, attention_mask: Tensor, *, token_type_ids: Tensor | None) -> Tensor: ...


LoadFrozen = Callable[
    [Callable[..., ScoreModel], ModelConfig, FrozenZeroConfig, str], tuple[ScoreModel, Scorer]
]  # roles.py, RewardModels


class ModelReward(TextReward):
    """Scores texts, not ids: the answer is decoded with the actor's ``tokenizer`` and read by ``encode`` with the reward model's own."""

    def __init__(
        self,
        score: Scorer,
        encode: TextEncoder,
        *,
        tokenizer: Tokenizer,
        pad_id: int,
        token_budget: int,
        all_reduce_max: Callable[[int], int],
        key: str = "reward",
    ):
        """``pad_id``: the reward model's. ``token_budget``: tokens, padding counted, of one forward. ``all_reduce_max``: the largest of all ranks' numbers."""
        super().__init__(tokenizer)
        self._score, self._encode = score, encode
        self._pad_id, self._key = pad_id, key
        self._token_budget, self._all_reduce_max = token_budget, all_reduce_max

    def judge(self, answers: Answers) -> Tensor:
        scores = self.score(
            [self._encode(*each) for each in zip(answers.rows, answers.texts, answers.finished, strict=True)]
        )
        if not scores.isfinite().all():
            row = int((~scores.isfinite()).nonzero()[0])
            response = shown(answers.texts[row])
            raise RewardError(
                f"the reward model scored {scores[row]} for row {row}, response {response}; try {self._key}.model.dtype=fp32"
            )
        return scores

    def score(self, texts: list[Text], left: bool | None = None) -> Tensor:
        """[B], whatever they are. ``left``: whether on that side, for an audit: padded as much as can be. None: as little."""
        scores, plan = torch.zeros(len(texts)), self._plan(texts, sparing=left is None)
        with self._score.resident():
            found = [self._forward([texts[i] for i in rows.tolist()], bool(left)) for rows in plan]
            scores[torch.cat(plan)] = torch.cat(
                found
            ).cpu()  # once: the host waits for the last forward alone
        return scores

    def _plan(self, texts: list[Text], sparing: bool) -> list[Tensor]:
        """Rows of each forward, as many forwards on every rank: a sharded model gathers its weights inside them."""
        lengths = torch.tensor([len(text) for text in texts])
        plan = (
            partial(plan_forwards, lengths)
            if sparing
            else partial(plan_microbatches, lengths, torch.zeros_like(lengths))
        )
        return plan(self._token_budget, at_least=self._all_reduce_max(len(plan(self._token_budget))))

    def _forward(self, texts: list[Text], left: bool) -> Tensor:
        ids, mask, types = (left_padded if left else right_padded)(
            texts, self._pad_id, torch.device("cpu")
        )  # the model takes them over
        with torch.no_grad():
            return self._score(ids, mask, token_type_ids=types)


def model_reward(
    model: ModelConfig,
    template: Literal["auto", "chat", "pair", "concat"] = "auto",
    max_tokens: Count | None = None,
    append_eos: bool | None = None,
    zero: FrozenZeroConfig = _REPLICA,
    audit: Audit = "report",
    *,
    tokenizer: Tokenizer,
    load_frozen: LoadFrozen,
    all_reduce_max: Callable[[int], int],
    score_tokens: int,
    note: Callable[[str], None] = lambda line: None,
    key: str = "reward",
) -> ModelReward:
    """``template``: auto is chat where the reward model's tokenizer has a chat template, else pair for encoders and concat for decoders.

    ``append_eos``: see TextEncoder. ``max_tokens``: longer texts are cut; None: as many as the model has positions for. ``load_frozen`` calls the loader
    (under ZeRO-3 so that each weight is sharded as it is read) and puts the model where it is to run, or gives one that is there already.
    ``audit``: see audit.py; its lines go to ``note``. ``key``: this section's.
    """
    path = model.path
    own = load_tokenizer(path, model.revision, model.trust_remote_code, key=f"{key}.model.path")
    module, score = load_frozen(load_reward_model, model, zero, f"{key}.model.path")
    _expect_ids(own, module.vocab_size, path, key)
    template = _chosen(template, own, module.is_decoder)
    limit = _limit(max_tokens, own, module, key)
    encode = TextEncoder(
        own,
        template,
        limit,
        append_eos,
        key,
        actors_vocabulary=own.hf.get_vocab() == tokenizer.hf.get_vocab(),
    )
    reward = ModelReward(
        score,
        encode,
        tokenizer=tokenizer,
        pad_id=own.pad_id,
        token_budget=score_tokens,
        all_reduce_max=all_reduce_max,
        key=key,
    )
    if audit in ("report", "strict"):
        try:
            found = audit_classifier(
                reward.score,
                encode,
                tokenizer=tokenizer,
                eos_id=own.hf.eos_token_id,
                max_tokens=limit,
                is_decoder=module.is_decoder,
                dtype=model.dtype,
            )
        except RewardError as error:  # before training it is the user's to mend
            raise UserError(str(error)) from error
        conclude(
            found,
            audit,
            name=f"{key}.model.path={path}",
            key=key,
            note=note,
            all_reduce_max=all_reduce_max,
        )
    return reward


def expect_readable(
    model: ModelConfig,
    examples: Sequence[tuple[str, Row]],
    template: Literal["auto", "chat", "pair", "concat"] = "auto",
    append_eos: bool | None = None,
    key: str = "reward",
) -> None:
    """UserError for what can be said of a reward model without its weights: whether it is one, and whether it can read the data.

    ``examples``: places and rows, one for each order of roles (PromptSource.examples).
    """
    path = model.path
    own = load_tokenizer(path, model.revision, model.trust_remote_code, key=f"{key}.model.path")
    vocab_size, is_decoder = expect_reward_model(
        path, revision=model.revision, trust_remote_code=model.trust_remote_code, key=f"{key}.model.path"
    )
    _expect_ids(own, vocab_size, path, key)
    encode = TextEncoder(own, _chosen(template, own, is_decoder), None, append_eos, key)
    for place, row in examples:
        try:
            encode(row, "x", True)
        except RewardError as error:
            raise UserError(f"{place}: {error}") from error


def _expect_ids(own: Tokenizer, vocab_size: int, path: str, key: str) -> None:
    if own.id_bound > vocab_size:
        raise UserError(
            f"{key}.model.path={path}: its tokenizer has ids up to {own.id_bound - 1}, its embedding only {vocab_size} rows"
        )


def _chosen(
    template: Literal["auto", "chat", "pair", "concat"], own: Tokenizer, is_decoder: bool
) -> Template:
    if template == "auto":
        return "chat" if own.has_chat_template else "concat" if is_decoder else "pair"
    return template


def _limit(asked: int | None, tokenizer: Tokenizer, module: ScoreModel, key: str) -> int | None:
    if asked is not None and module.max_tokens is not None and asked > module.max_tokens:
        raise UserError(f"{key}.max_tokens={asked}: the reward model has {module.max_tokens} positions")
    limits = [asked, module.max_tokens]
    if asked is None and tokenizer.hf.model_max_length < 10**9:  # transformers writes 1e30 for "not known"
        limits.append(tokenizer.hf.model_max_length)
    return min((limit for limit in limits if limit is not None), default=None)
