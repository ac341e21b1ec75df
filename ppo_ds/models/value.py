"""The critic and the reward model: a trunk with one number per token, or per text.

Departures from ``AutoModelForSequenceClassification``: a decoder is read at the last *attended* place, found
from the mask; transformers looks for the rightmost id that is not the pad: the place before the end token
where pad and end are the same. Position ids are always passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from ppo_ds.errors import UserError
from ppo_ds.models.layout import Layout, lay_out
from ppo_ds.models.loading import (
    from_pretrained,
    load_config,
    refuse_missing,
    torch_dtype,
    user_errors,
    weight_names,
)
from ppo_ds.models.lora import merged_state, without_adapters
from ppo_ds.models.packable import PackableModel
from ppo_ds.models.packed_attention import laid_out
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.types import moved

_HEAD = "score.weight"  # every decoder family of transformers calls its sequence classification head so


class ScoreHead(nn.Linear):
    """A linear head that computes in fp32 whatever the dtype of its weight: values are regressed on returns,
    and bf16 has three digits.

    It can remember what it was, for a model that is trained as a critic and asked as the reward model that it
    began as.
    """

    as_kept = False  # whether it computes with what ``keep`` remembered

    def forward(self, hidden: Tensor) -> Tensor:
        weight, bias = (self.kept_weight, self.kept_bias) if self.as_kept else (self.weight, self.bias)
        return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())

    def keep(self) -> None:
        """Remembers its parameters as they are now; under ZeRO-3 they must be gathered.

        Not in the state dict: they came from a folder.
        """
        self.register_buffer("kept_weight", self.weight.detach().clone(), persistent=False)
        self.register_buffer(
            "kept_bias", None if self.bias is None else self.bias.detach().clone(), persistent=False
        )


def zeroed_head(width: int, dtype: torch.dtype) -> ScoreHead:
    """V(s) = 0 at the start (Ziegler et al. 2019)."""
    head = ScoreHead(width, 1, bias=False, dtype=dtype)
    nn.init.zeros_(head.weight)
    return head


class ScoreModel(PackableModel):
    """A sequence classifier with one label.

    A decoder has a value at each token; an encoder has one for the whole text.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        # an encoder-decoder pools at its own decoder's end, an encoder at its first place: both only through
        # their own forward
        self.is_decoder = hasattr(model, "score") and not model.config.is_encoder_decoder
        self._positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
        self._types = "token_type_ids" in inspect.signature(model.forward).parameters
        if self.is_decoder and isinstance(model.score, nn.Linear):
            model.score = _computing_in_fp32(model.score)

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor,
        response_width: int | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """The only way in for engines, which wrap it. ids, attention_mask [B,T]; fp32 out:

        the values [B,R+1] of the states around the response tokens, column t before token t, 0 beyond the
        last state of a row; or without ``response_width`` the scores [B].
        """
        if response_width is None:
            return self.scores(ids, attention_mask, token_type_ids)
        layout = lay_out(ids, attention_mask, response_width, self.model, packed=self.packed)
        return layout.spread_states(self._head(self._hidden(layout)[layout.state_places]))

    def scores(self, ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """[B] fp32: a decoder's value at its last attended place (padding may be on either side), or an
        encoder's logit.
        """
        if self.is_decoder:
            layout = lay_out(ids, attention_mask, 0, self.model, packed=self.packed)
            return self._head(self._hidden(layout)[layout.last_places])
        device = next(self.model.parameters()).device
        types = (
            {"token_type_ids": moved(token_type_ids, device)}
            if self._types and token_type_ids is not None
            else {}
        )
        return (
            self.model(
                input_ids=moved(ids, device), attention_mask=moved(attention_mask.long(), device), **types
            )
            .logits[:, 0]
            .float()
        )

    def gradient_checkpointing_enable(self) -> None:
        # the reentrant kind gives no gradients where a block's input needs none, which is the case of the
        # first block
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def save(self, directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """A Hugging Face folder that ``AutoModelForSequenceClassification.from_pretrained`` loads;
        ``state_dict`` has the keys of ``self.model``.

        Adapters are merged into it.
        """
        self.model.save_pretrained(
            directory,
            state_dict=merged_state(
                self.model, self.model.state_dict() if state_dict is None else state_dict
            ),
        )

    @property
    def trunk(self) -> PreTrainedModel:
        """The model of transformers."""
        return self.model

    @property
    def max_tokens(self) -> int | None:
        """The longest text that has a position for each token; None where the architecture sets no limit."""
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                return (
                    module.num_embeddings - module.padding_idx - 1
                )  # RoBERTa counts its positions from the pad id on
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding, which token ids must be below."""
        return self.model.get_input_embeddings().num_embeddings

    def _hidden(self, layout: Layout) -> Tensor:
        """[b*t,d]."""
        assert self.is_decoder, f"{type(self.model).__name__} has no value per token"
        with laid_out(self.model, self.packed):
            return self.model.base_model(**layout.arguments(self._positions)).last_hidden_state.flatten(0, 1)

    def _head(self, hidden: Tensor) -> Tensor:
        return self.model.score(hidden).squeeze(-1).float()


@contextmanager
def as_kept(model: ScoreModel) -> Iterator[None]:
    """Inside, a critic with adapters computes what it did when its head was kept: its base, and that head."""
    head = model.model.score
    with without_adapters(model):
        head.as_kept = True
        try:
            yield
        finally:
            head.as_kept = False


def load_critic(
    path: str,
    *,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    attn_implementation: str,
    gradient_checkpointing: bool,
    zero_head: bool,
    key: str = "critic.model.path",
) -> ScoreModel:
    """A critic from a causal LM or a reward model.

    A trained score head is kept. A folder without one gets a head of zeros if ``zero_head``, and is refused
    if not.
    """
    model, info = _load(
        path,
        revision=revision,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        key=key,
    )
    if not hasattr(model, "score") or model.config.is_encoder_decoder:
        kind = type(model).__name__
        raise UserError(
            f"{key}={path}: a critic needs a value at every token, which a {kind} has not; take a decoder, such as the actor"
        )
    headless = _HEAD in info["missing_keys"]
    if not zero_head:
        _refuse_headless(path, model, info["missing_keys"], key)
    refuse_missing(path, info, allowed=[_HEAD], key=key)
    if headless:
        # a new module, not zeros written into the old one: under ZeRO-3 the old weight is a shard
        model.score = zeroed_head(model.score.in_features, torch_dtype(dtype))
    critic = ScoreModel(model)
    if gradient_checkpointing:
        critic.gradient_checkpointing_enable()
    return critic


def load_reward_model(
    path: str,
    *,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    attn_implementation: str,
    key: str = "reward.model.path",
) -> ScoreModel:
    """A frozen reward model: any ``AutoModelForSequenceClassification`` with one label and all of its
    weights.
    """
    model, info = _load(
        path,
        revision=revision,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        key=key,
    )
    _refuse_headless(path, model, info["missing_keys"], key)
    refuse_missing(path, info, key=key)
    return ScoreModel(model).requires_grad_(False).eval()


def expect_reward_model(
    path: str, *, revision: str | None, trust_remote_code: bool, key: str = "reward.model.path"
) -> tuple[int, bool]:
    """UserError for what can be seen of a model that is no reward model without reading a weight: its config,
    and which weights its files have.

    Returns the rows of its embedding and whether it is a decoder.
    """
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code, key=key)
    _expect_one_label(config, path, key)
    with user_errors(path, key, Exception), torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config, trust_remote_code=trust_remote_code)
    names = weight_names(path, revision)
    if names is not None:  # whatever stands before a name: files may have been written by another class
        _refuse_headless(
            path,
            model,
            [name for name in model.state_dict() if not any(there.endswith(name) for there in names)],
            key,
        )
    return model.get_input_embeddings().num_embeddings, hasattr(
        model, "score"
    ) and not config.is_encoder_decoder


def _refuse_headless(path: str, model: Any, missing: Iterable[str], key: str) -> None:
    """``missing``: weights that are not in the files. Those of the trunk are judged by whoever loads them."""
    missing = sorted(name for name in missing if not name.startswith(f"{model.base_model_prefix}."))
    if missing:
        lost = ", ".join(missing[:3])
        raise UserError(
            f"{key}={path}: has no trained score head ({lost} not in its files): give a sequence classifier trained to score"
        )


def _load(
    path: str,
    *,
    revision: str | None,
    dtype: str,
    trust_remote_code: bool,
    attn_implementation: str,
    key: str,
) -> tuple[Any, dict[str, Any]]:
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code, key=key)
    _expect_one_label(config, path, key)
    return from_pretrained(
        AutoModelForSequenceClassification,
        path,
        config=config,
        dtype=torch_dtype(dtype),
        revision=revision,
        trust_remote_code=trust_remote_code,
        attn_implementation=attn_implementation,
        key=key,
    )


def _expect_one_label(config: PreTrainedConfig, path: str, key: str) -> None:
    if config.num_labels == 1:
        return
    if any("Classification" in name for name in config.architectures or []):
        raise UserError(
            f"{key}={path}: has {config.num_labels} labels; a score needs a sequence classifier with one (num_labels=1)"
        )
    config.num_labels = 1  # a language model's 2 is transformers' default and says nothing; whether a head is there, the weights will tell


def _computing_in_fp32(linear: nn.Linear) -> ScoreHead:
    """The same parameters (under ZeRO-3: the same shards) in a module that upcasts."""
    head = ScoreHead(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
    head.weight, head.bias = linear.weight, linear.bias
    return head


def reads_like(
    path: str,
    tokenizer: Tokenizer,
    *,
    revision: str | None,
    trust_remote_code: bool,
    key: str = "reward.model.path",
) -> bool:
    """Whether a model is a decoder with ``tokenizer``'s vocabulary, so that it can start a critic of that
    tokenizer's actor.
    """
    config = load_config(path, revision=revision, trust_remote_code=trust_remote_code, key=key)
    if not _scores_tokens(config, trust_remote_code):
        return False
    return (
        load_tokenizer(path, revision, trust_remote_code, key=key).hf.get_vocab() == tokenizer.hf.get_vocab()
    )


def _scores_tokens(config: PreTrainedConfig, trust_remote_code: bool) -> bool:
    """Whether the sequence classifier of this config is a decoder's. Its parts tell, made without memory for
    them: transformers lists RoBERTa and BERT under causal language models too.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=trust_remote_code
            )
    except ValueError:  # the architecture has no sequence classifier
        return False
    return hasattr(model, "score") and not config.is_encoder_decoder
