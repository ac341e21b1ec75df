"""A reward model that is a sequence classifier with one label and a separate tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal, SupportsInt

import torch
from torch import Tensor

from ppo_ds.compute.batching import plan_forwards, plan_microbatches
from ppo_ds.config.sections.models import FrozenZeroConfig, ModelConfig
from ppo_ds.config.types import Count
from ppo_ds.errors import UserError
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.models.value import ScoreModel, TrainingRecord, expect_reward_model, load_reward_model
from ppo_ds.rewards.audit import AuditMode, audit_classifier, run_audit
from ppo_ds.rewards.base import Responses, RewardError
from ppo_ds.rewards.frozen_model import REPLICA, FrozenModelReward, LoadFrozen
from ppo_ds.rewards.text import EncodedText, Template, TextEncoder, collate
from ppo_ds.types import Row

# transformers sets model_max_length to 1e30 if the tokenizer's files do not define it
_UNKNOWN_LENGTH = 10**9


@dataclass(eq=False)
class ModelReward(FrozenModelReward):
    """Scores responses with a sequence classifier, whose tokenizer encodes the decoded responses."""

    _: KW_ONLY
    encoder: TextEncoder
    pad_id: int  # the reward model's
    all_reduce_max: Callable[[int], int]  # returns the maximum of a number over all ranks
    # (mean, standard deviation): scores become (score - mean) / standard deviation.
    # None: scores do not change.
    statistics: tuple[float, float] | None = None

    def encode(self, row: Row, response: str, finished: bool) -> EncodedText:
        return self.encoder(row, response, finished)

    def score_responses(self, responses: Responses) -> Tensor:
        scores = super().score_responses(responses)
        if self.statistics is None:
            return scores
        mean, std = self.statistics
        return (scores - mean) / std

    def score(self, inputs: Sequence[EncodedText], padding_side: str | None = None) -> Tensor:
        """Scores encoded texts, [B].

        By default, texts are padded on the right and batches are planned for little padding. If the audit
        sets ``padding_side``, each batch is filled up to the token budget, which adds padding.
        """
        lengths = torch.tensor([len(text) for text in inputs])
        if padding_side is None:
            plan = partial(plan_forwards, lengths)
        else:
            plan = partial(plan_microbatches, lengths, torch.zeros_like(lengths))
        # a sharded model gathers weights in each forward, so all ranks must run the same number of forwards
        budget = int(self.token_budget)
        batches = plan(budget)
        if (count := self.all_reduce_max(len(batches))) > len(batches):
            batches = plan(budget, at_least=count)

        def forward(texts: list[EncodedText]) -> Tensor:
            # the scorer moves the tensors to its device
            ids, mask, types = collate(texts, self.pad_id, padding_side or "right")
            with torch.no_grad():
                return self.scorer(ids, mask, token_type_ids=types)

        return self._score_in_batches(inputs, batches, forward)


def model_reward(
    model: ModelConfig,
    template: Literal["auto", "chat", "pair", "concat", "text"] = "auto",
    max_tokens: Count | None = None,
    append_eos: bool | None = None,
    zero: FrozenZeroConfig = REPLICA,
    audit: AuditMode = "report",
    normalize: bool = False,
    *,
    tokenizer: Tokenizer,
    load_frozen: LoadFrozen,
    all_reduce_max: Callable[[int], int],
    score_tokens: SupportsInt,
    note: Callable[[str], None] = lambda line: None,
    key: str = "reward",
) -> ModelReward:
    """Loads a sequence classifier as a reward. All ranks must call this.

    Args:
        model: The reward model.
        template: ``auto`` chooses the format of the training texts for a model of stage=reward_model. For any
            other model it chooses chat if the reward model's tokenizer has a chat template, else pair for
            encoders and concat for decoders; see TextEncoder.
        max_tokens: Longer texts are truncated; None: the smaller limit of the model and its tokenizer.
        append_eos: See TextEncoder.
        zero: Sharding and offloading of the model.
        audit: See audit.py.
        normalize: Whether scores become (score - score_mean) / score_std, with values from config.json.
        tokenizer: The actor's tokenizer; docs/rewards.md, "Your own kind", has the other keyword-only ones.
    """
    path, name = model.path, f"{key}.model.path={model.path}"
    own_tokenizer = load_tokenizer(path, model.revision, model.trust_remote_code, key=f"{key}.model.path")
    module, scorer = load_frozen(load_reward_model, model, zero, f"{key}.model.path")
    record = module.training_record
    _check_vocabulary(own_tokenizer, module.vocab_size, name)
    encoder = TextEncoder(
        own_tokenizer,
        _resolve_template(template, own_tokenizer, module.is_decoder, record),
        _resolve_max_tokens(max_tokens, own_tokenizer, module, key),
        append_eos,
        key,
        actors_vocabulary=own_tokenizer.hf.get_vocab() == tokenizer.hf.get_vocab(),
        chat_template_kwargs=record.chat_template_kwargs,
        joint=record.joint,
    )
    reward = ModelReward(
        scorer,
        encoder=encoder,
        tokenizer=tokenizer,
        pad_id=own_tokenizer.pad_id,
        token_budget=score_tokens,
        all_reduce_max=all_reduce_max,
        key=key,
        name=name,
        statistics=_score_statistics(record, path, key) if normalize else None,
    )
    facts = dict(tokenizer=tokenizer, is_decoder=module.is_decoder, dtype=model.dtype)
    inspect = partial(audit_classifier, reward.score, encoder, **facts)
    run_audit(inspect, audit, name=name, key=key, note=note, all_reduce_max=all_reduce_max)
    return reward


def check_reward_model(
    model: ModelConfig,
    examples: Iterable[tuple[str, Row]],
    template: Literal["auto", "chat", "pair", "concat", "text"] = "auto",
    append_eos: bool | None = None,
    normalize: bool = False,
    key: str = "reward",
) -> None:
    """Raises UserError if the model is no reward model or cannot encode the data.

    With ``normalize``, also if its config.json lacks the mean and standard deviation of scores. Loads no
    weights. ``examples`` (PromptSource.examples) has a (location, row) pair for each sequence of roles in the
    data.
    """
    path = model.path
    own_tokenizer = load_tokenizer(path, model.revision, model.trust_remote_code, key=f"{key}.model.path")
    vocab_size, is_decoder, record = expect_reward_model(model, key=f"{key}.model.path")
    _check_vocabulary(own_tokenizer, vocab_size, f"{key}.model.path={path}")
    if normalize:
        _score_statistics(record, path, key)
    template = _resolve_template(template, own_tokenizer, is_decoder, record)
    encoder = TextEncoder(
        own_tokenizer, template, None, append_eos, key, chat_template_kwargs=record.chat_template_kwargs
    )
    for location, row in examples:
        try:
            encoder(row, "x", True)
        except RewardError as error:
            raise UserError(f"{location}: {error}") from error


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int, name: str) -> None:
    if tokenizer.id_bound > vocab_size:
        raise UserError(
            f"{name}: its tokenizer has ids up to {tokenizer.id_bound - 1}, "
            f"its embedding only {vocab_size} rows"
        )


def _resolve_template(
    template: Literal["auto", "chat", "pair", "concat", "text"],
    tokenizer: Tokenizer,
    is_decoder: bool,
    record: TrainingRecord,
) -> Template:
    if template != "auto":
        return template
    if record.template is not None:
        return record.template
    if tokenizer.has_chat_template:
        return "chat"
    return "concat" if is_decoder else "pair"


def _score_statistics(record: TrainingRecord, path: str, key: str) -> tuple[float, float]:
    """Returns the mean and the standard deviation of the model's scores, as stored in its config.json."""
    if record.mean is None or record.std is None:
        raise UserError(
            f"{key}.normalize=true: config.json of {path} has no score_mean and score_std, which only models "
            f"of stage=reward_model have; set {key}.normalize=false, or algo.reward_shaping"
        )
    return record.mean, record.std


def _resolve_max_tokens(
    max_tokens: int | None, tokenizer: Tokenizer, module: ScoreModel, key: str
) -> int | None:
    """Returns ``max_tokens``, else the smaller limit of model and tokenizer, or None if there is none."""
    if max_tokens is not None and module.max_tokens is not None and max_tokens > module.max_tokens:
        raise UserError(f"{key}.max_tokens={max_tokens}: the reward model has {module.max_tokens} positions")
    limits = [max_tokens, module.max_tokens]
    if max_tokens is None and tokenizer.hf.model_max_length < _UNKNOWN_LENGTH:
        limits.append(tokenizer.hf.model_max_length)
    return min((limit for limit in limits if limit is not None), default=None)
