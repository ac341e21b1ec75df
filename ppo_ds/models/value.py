"""Critics and reward models: a trunk with a scalar head, applied at each token or once to the whole text.

They differ from ``AutoModelForSequenceClassification`` in two points. The score of a decoder is read at the
last *attended* position, which is found from the mask. transformers uses the rightmost id that is not the pad
id; if pad and end tokens are equal, this is the position before the end token. A decoder that accepts
position ids always gets them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.models.deberta_v2 import modeling_deberta_v2

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.distributed.sequence_group import SequenceGroup
from ppo_ds.errors import UserError
from ppo_ds.models.layout import Layout, make_layout
from ppo_ds.models.loading import (
    code_arguments,
    config_of,
    from_pretrained,
    recompute_activations,
    refuse_missing,
    torch_dtype,
    user_errors,
    weight_names,
)
from ppo_ds.models.lora import merged_state, without_adapters
from ppo_ds.models.packed_attention import PackableModel, layout_forward
from ppo_ds.models.tokenizer import Tokenizer, load_tokenizer
from ppo_ds.types import to_device

_HEAD = "score.weight"  # name of the sequence classification head in every decoder family of transformers


class ScoreHead(nn.Linear):
    """Linear head that computes in fp32, for any dtype of its weight.

    Values are regressed on returns, and bf16 has only about three decimal digits. ``keep`` copies the initial
    parameters, so that a critic initialized from a reward model can still compute the reward model's scores.
    """

    as_kept = False  # whether ``forward`` uses the copies that ``keep`` made

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes scores [...,1] in fp32 of hidden [...,H]."""
        weight, bias = (self.kept_weight, self.kept_bias) if self.as_kept else (self.weight, self.bias)
        return F.linear(hidden.float(), weight.float(), None if bias is None else bias.float())

    def keep(self) -> None:
        """Copies the current parameters; under ZeRO-3 they must be gathered.

        The copies are not in the state dict: a resumed run loads them from the model's folder again.
        """
        bias = None if self.bias is None else self.bias.detach().clone()
        self.register_buffer("kept_weight", self.weight.detach().clone(), persistent=False)
        self.register_buffer("kept_bias", bias, persistent=False)


@dataclass(frozen=True)
class TrainingRecord:
    """The entries that stage=reward_model adds to its model's config.json; None or {} in other models."""

    template: Literal["text", "chat"] | None  # score_template, the format of the training texts: text or chat
    chat_template_kwargs: dict[str, Any]  # score_chat_template_kwargs
    joint: str | None  # score_joint, the text between a prompt and an answer
    mean: float | None  # score_mean, the mean score of the held-out texts (or else of training texts)
    std: float | None  # score_std, their standard deviation


def training_record(config: PreTrainedConfig) -> TrainingRecord:
    """Reads the record from a Hugging Face config; invalid entries count as missing."""
    template: Any = getattr(config, "score_template", None)
    kwargs = getattr(config, "score_chat_template_kwargs", None)
    joint = getattr(config, "score_joint", None)
    mean, std = getattr(config, "score_mean", None), getattr(config, "score_std", None)
    known = isinstance(mean, int | float) and isinstance(std, int | float) and 0 < std < math.inf
    return TrainingRecord(
        template=template if template in ("text", "chat") else None,
        chat_template_kwargs=kwargs if isinstance(kwargs, dict) else {},
        joint=joint if isinstance(joint, str) else None,
        mean=mean if known else None,
        std=std if known else None,
    )


def zeroed_head(width: int, dtype: torch.dtype) -> ScoreHead:
    """Makes a head of zeros, so that V(s) = 0 at the start (Ziegler et al. 2019)."""
    head = ScoreHead(width, 1, bias=False, dtype=dtype)
    nn.init.zeros_(head.weight)
    return head


class ScoreModel(PackableModel):
    """Sequence classifier with one label.

    A decoder computes a value at each token; an encoder computes one score for the whole text.
    """

    def __init__(self, model: PreTrainedModel, new_head: bool = False):
        super().__init__()
        self.model = model
        self.new_head = new_head  # True if weights of the head were not in the model's files
        # Classifiers that are not decoders run their own forward: an encoder is scored at its first token, an
        # encoder-decoder at the last token of its decoder.
        self.is_decoder = _is_decoder(model)
        self._positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
        self._types = "token_type_ids" in inspect.signature(model.forward).parameters
        if model.config.model_type == "deberta-v2":
            modeling_deberta_v2.make_log_bucket_position = log_bucket_positions  # for the whole process
        if self.is_decoder and isinstance(model.score, nn.Linear):
            model.score.__class__ = ScoreHead  # the parameters, shards under ZeRO-3, do not change

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor,
        response_width: int | None = None,
        token_type_ids: Tensor | None = None,
        sequence: SequenceGroup | None = None,
    ) -> Tensor:
        """Returns values [B,R+1] in fp32, or scores [B] without ``response_width``, for ids and mask [B,T].

        Column t holds the value of the state before response token t. The column after a row's last token
        holds the value of its final state, and all later columns are 0. All ranks of ``sequence`` must pass
        identical rows; each computes a part of the tokens.
        """
        if response_width is None:
            return self.scores(ids, attention_mask, token_type_ids)
        layout = make_layout(
            ids, attention_mask, response_width, self.model, packed=self.packed, sequence=sequence
        )
        return layout.scatter_states(self._head(self._hidden(layout)[layout.state_positions]))

    def scores(self, ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        """Returns scores [B] in fp32: a decoder's value at a row's last attended token or an encoder's logit.

        Padding may be on either side.
        """
        if self.is_decoder:
            layout = make_layout(ids, attention_mask, 0, self.model, packed=self.packed)
            return self._head(self._hidden(layout)[layout.last_positions])
        device = next(self.model.parameters()).device
        types = {}
        if self._types and token_type_ids is not None:
            types = {"token_type_ids": to_device(token_type_ids, device)}
        mask = to_device(attention_mask.long(), device)
        out = self.model(input_ids=to_device(ids, device), attention_mask=mask, **types)
        return out.logits[:, 0].float()

    def save(
        self,
        directory: str | Path,
        state_dict: dict[str, Tensor] | None = None,
        settings: dict[str, Any] | None = None,
        pad_id: int | None = None,
    ) -> None:
        """Writes the model, with adapters merged, for ``AutoModelForSequenceClassification.from_pretrained``.

        ``state_dict`` has the keys of ``self.model`` and is changed in place (see ``merged_state``).
        ``settings`` are added to config.json. ``pad_id`` becomes the pad_token_id of a decoder, by which
        transformers finds the last token of a text. An encoder's is kept: its position ids may depend on it.
        """
        plain = merged_state(self.model, self.model.state_dict() if state_dict is None else state_dict)
        self.model.config.update(settings or {})
        if pad_id is not None and self.is_decoder:
            self.model.config.get_text_config().pad_token_id = pad_id
        self.model.save_pretrained(directory, state_dict=plain)

    @property
    def trunk(self) -> PreTrainedModel:
        """The wrapped transformers model."""
        return self.model

    @property
    def training_record(self) -> TrainingRecord:
        """The entries of config.json that stage=reward_model adds to its model."""
        return training_record(self.model.config)

    @property
    def max_tokens(self) -> int | None:
        """The maximum number of tokens of a text, or None if the architecture has no limit."""
        for name, module in self.model.named_modules():
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                # RoBERTa numbers positions from padding_idx + 1 on
                return module.num_embeddings - module.padding_idx - 1
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    def _hidden(self, layout: Layout) -> Tensor:
        """Computes the last hidden states [b*t,H]."""
        assert self.is_decoder, f"{type(self.model).__name__} has no value per token"
        with layout_forward(self.model, self.packed):
            return self.model.base_model(**layout.arguments(self._positions)).last_hidden_state.flatten(0, 1)

    def _head(self, hidden: Tensor) -> Tensor:
        return self.model.score(hidden).squeeze(-1).float()


@contextmanager
def as_kept(model: ScoreModel) -> Iterator[None]:
    """Disables the adapters of a critic and uses the kept copy of its head inside the block.

    The critic then computes the same values as when ``keep`` was called on its head.
    """
    head = model.model.score
    with without_adapters(model):
        head.as_kept = True
        try:
            yield
        finally:
            head.as_kept = False


def load_critic(section: ModelConfig, *, zero_head: bool, key: str = "critic.model.path") -> ScoreModel:
    """Loads a critic from a causal LM or a reward model.

    A trained score head is kept. If the folder has no score head, ``zero_head`` creates a head of zeros;
    without ``zero_head``, UserError is raised. A model other than a decoder always raises UserError. Errors
    name ``key``.
    """
    path = section.path
    model, info = _load_classifier(section, key)
    if not _is_decoder(model):
        kind = type(model).__name__
        raise UserError(
            f"{key}={path}: a critic needs a value at every token, which a {kind} has not; "
            "take a decoder, such as the actor"
        )
    if not zero_head:
        _refuse_headless(path, model, info["missing_keys"], key)
    refuse_missing(path, info, allowed=[_HEAD], key=key)
    if _HEAD in info["missing_keys"]:
        # the head is replaced instead of filled with zeros, because under ZeRO-3 its weight is a shard
        model.score = zeroed_head(model.score.in_features, torch_dtype(section.dtype))
    recompute_activations(model, section)
    return ScoreModel(model)


def load_scorer(
    section: ModelConfig, *, head_init: Literal["zero", "normal"], seed: int, key: str = "scorer.model.path"
) -> ScoreModel:
    """Loads a reward model to train, from a language model, an encoder or an earlier reward model.

    A trained head is kept. If the files have no head, a new one is created. ``head_init`` selects the weights
    of its last layer: zeros, or normal with standard deviation 1 / sqrt(d + 1) for d inputs (Stiennon et al.
    2020). The weights of its other layers are normal with the config's ``initializer_range`` as standard
    deviation; biases are zero. ``seed`` is the seed of all random weights.
    """
    path = section.path
    model, info = _load_classifier(section, key)
    trunk = f"{model.base_model_prefix}."
    # masked language models have no pooler, which belongs to the trunk of some classifiers
    new = [name for name in info["missing_keys"] if not name.startswith(trunk) or ".pooler." in name]
    refuse_missing(path, info, allowed=new, key=key)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name in sorted({name.rpartition(".")[0] for name in new}):
            _replace_linear(model, name, head_init, torch_dtype(section.dtype), path, key)
    recompute_activations(model, section)
    return ScoreModel(model, new_head=bool(new))


def _replace_linear(
    model: PreTrainedModel, name: str, head_init: str, dtype: torch.dtype, path: str, key: str
) -> None:
    """Replaces a linear layer of a head by one with new weights.

    The old weights are not overwritten, because under ZeRO-3 they are shards.
    """
    old = model.get_submodule(name)
    if not isinstance(old, nn.Linear):
        raise UserError(
            f"{key}={path}: its head has a {type(old).__name__} without weights ({name}); give a model whose "
            "head consists of linear layers, or one with a trained head"
        )
    final = old.out_features == 1
    std = (old.in_features + 1) ** -0.5 if final else getattr(model.config, "initializer_range", 0.02)
    linear = (ScoreHead if name == "score" else nn.Linear)(
        old.in_features, old.out_features, bias=old.bias is not None, dtype=torch.float32, device="cpu"
    )
    nn.init.normal_(linear.weight, std=0.0 if final and head_init == "zero" else std)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    model.set_submodule(name, linear.to(dtype))


def load_reward_model(section: ModelConfig, *, key: str = "reward.model.path") -> ScoreModel:
    """Loads a frozen reward model.

    The files must contain all weights of an ``AutoModelForSequenceClassification`` with one label.
    """
    model, info = _load_classifier(section, key)
    _refuse_headless(section.path, model, info["missing_keys"], key)
    refuse_missing(section.path, info, key=key)
    return ScoreModel(model).requires_grad_(False).eval()


def expect_reward_model(
    section: ModelConfig, *, key: str = "reward.model.path"
) -> tuple[int, bool, TrainingRecord]:
    """Raises UserError if the config or the names of the weights show that a model is not a reward model.

    Reads no weights. Returns the number of rows of its embedding, whether it is a decoder, and its training
    record.
    """
    path = section.path
    config = _one_label_config(section, key)
    with user_errors(path, key, Exception), torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(
            config, trust_remote_code=section.trust_remote_code, **code_arguments(section, config)
        )
    names = weight_names(path, section.revision)
    if names is not None:
        # only suffixes are compared, since the files may come from another class, which has other prefixes
        missing = [name for name in model.state_dict() if not any(stored.endswith(name) for stored in names)]
        _refuse_headless(path, model, missing, key)
    return model.get_input_embeddings().num_embeddings, _is_decoder(model), training_record(config)


def _is_decoder(model: Any) -> bool:
    """Returns whether a sequence classifier is a decoder, which has a value at every token.

    The module ``score`` identifies it, since transformers registers RoBERTa and BERT as causal models too.
    """
    return hasattr(model, "score") and not model.config.is_encoder_decoder


def _refuse_headless(path: str, model: Any, missing: Iterable[str], key: str) -> None:
    """Raises UserError if weights of the head are among the weights ``missing`` from the files.

    ``refuse_missing`` checks the weights of the trunk.
    """
    missing = sorted(name for name in missing if not name.startswith(f"{model.base_model_prefix}."))
    if missing:
        lost = ", ".join(missing[:3])
        raise UserError(
            f"{key}={path}: has no trained score head ({lost} not in its files): "
            "give a sequence classifier trained to score"
        )


def _load_classifier(section: ModelConfig, key: str) -> tuple[Any, dict[str, Any]]:
    """Loads a sequence classifier with one label; returns it with its loading info (``from_pretrained``)."""
    config = _one_label_config(section, key)
    return from_pretrained(AutoModelForSequenceClassification, section, config=config, key=key)


def _one_label_config(section: ModelConfig, key: str) -> PreTrainedConfig:
    """Loads the Hugging Face config with num_labels=1; raises UserError for a classifier with more labels."""
    config = config_of(section, key)
    if config.num_labels != 1 and any("Classification" in name for name in config.architectures or []):
        raise UserError(
            f"{key}={section.path}: has {config.num_labels} labels; "
            "a score needs a sequence classifier with one (num_labels=1)"
        )
    # a language model has 2 labels by default in transformers; its weights show whether it has a score head
    config.num_labels = 1
    return config


def can_start_critic(section: ModelConfig, tokenizer: Tokenizer, *, key: str = "reward.model.path") -> bool:
    """Returns whether a critic can start from a reward model: a decoder with ``tokenizer``'s vocabulary."""
    config = config_of(section, key)
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(
                config, trust_remote_code=section.trust_remote_code, **code_arguments(section, config)
            )
    except ValueError:  # the architecture has no sequence classifier
        return False
    if not _is_decoder(model):
        return False
    own = load_tokenizer(section.path, section.revision, section.trust_remote_code, key=key)
    return own.hf.get_vocab() == tokenizer.hf.get_vocab()


def log_bucket_positions(relative_pos: Tensor, bucket_size: int, max_position: int) -> Tensor:
    """Computes the same as ``make_log_bucket_position`` of transformers, without a copy to the device.

    transformers creates a constant on the CPU and copies it to the device of ``relative_pos``. On a GPU the
    host would wait for this copy in every forward.
    """
    middle = bucket_size // 2
    near = (relative_pos < middle) & (relative_pos > -middle)
    distance = torch.where(near, middle - 1, relative_pos.abs())
    scale = torch.log(torch.tensor((max_position - 1) / middle))
    far = torch.ceil(torch.log(distance / middle) / scale * (middle - 1)) + middle
    return torch.where(distance <= middle, relative_pos.type_as(far), far * torch.sign(relative_pos))
