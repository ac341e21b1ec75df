"""Policies (the actor and the reference): causal LMs that return log pi(a|s) of the response tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

from ppo_ds.compute.linear_logprobs import LabelStatistics
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.distributed.sequence_group import SequenceGroup
from ppo_ds.models.layout import make_layout
from ppo_ds.models.linear import install_linears
from ppo_ds.models.lm_head import HeadProbe, LMHead, forward_at, install_head, probe_head
from ppo_ds.models.loading import config_of, from_pretrained, recompute_activations, refuse_missing
from ppo_ds.models.lora import adapter_layers, merge_saved_adapter, merged_state, plain_modules, save_adapter
from ppo_ds.models.neftune import EmbeddingNoise, noisy_embeddings
from ppo_ds.models.packed_attention import PackableModel, layout_forward
from ppo_ds.models.value import zeroed_head
from ppo_ds.ops.logprobs import logprobs_and_entropy_from_logits, mean_logprobs_from_logits
from ppo_ds.storage.drafts import draft_directory


class PolicyOutput(NamedTuple):
    """Output of a policy for given responses; fp32 and differentiable."""

    logprobs: Tensor  # [B,R]
    entropy: Tensor | None  # [B,R] exact, nats; None unless requested
    values: Tensor | None  # [B,R+1] values of the states; None without a value head
    aux: Tensor | None  # 0-dim: the load-balancing loss of a mixture of experts; None unless requested
    # [B,R] mean of log p over the vocabulary, for label smoothing; None unless requested
    mean_logprobs: Tensor | None = None
    correct: Tensor | None = None  # [B,R] bool: the token is the most likely one; None unless requested


class Policy(PackableModel):
    """Causal LM as a policy over the response tokens.

    Log-probs are computed for the sampling distribution: the logits are divided by ``temperature``.
    """

    def __init__(self, lm: PreTrainedModel, temperature: float, value_head: bool = False):
        """Wraps ``lm``. ``value_head`` adds a value head of zeros for a critic that shares the trunk."""
        super().__init__()
        self.lm = lm
        install_head(lm)
        head = lm.get_output_embeddings()
        self.value_head = zeroed_head(head.in_features, lm.dtype) if value_head else None
        self.temperature = temperature
        # generate() takes options that the caller does not set from the model's own file (Qwen2.5-Instruct:
        # top_k 20, repetition penalty), so the model gets an empty config. The settings of the file are kept
        # for the saved model.
        self.generation_config = saveable(lm.generation_config)
        lm.generation_config = GenerationConfig()
        # None until the first forward has probed the head. Without an LMHead, logits are always computed.
        self.head_probe: HeadProbe | None = None if isinstance(head, LMHead) else HeadProbe(False, False)
        self._positions = "position_ids" in inspect.signature(lm.forward).parameters

    def forward(
        self,
        ids: Tensor,
        attention_mask: Tensor,
        response_width: int,
        with_entropy: bool = False,
        with_aux: bool = False,
        temperature: float | None = None,
        entropy_gradient: bool = True,
        label_mask: Tensor | None = None,
        with_mean: bool = False,
        with_correct: bool = False,
        noise: EmbeddingNoise | None = None,
        sequence: SequenceGroup | None = None,
    ) -> PolicyOutput:
        """Returns the log-probs of the last ``response_width`` tokens of ids [B,T], 0 after each response.

        ``with_entropy``, ``with_aux``, ``with_mean`` and ``with_correct`` add their outputs. ``temperature``
        replaces the sampling temperature. ``entropy_gradient=False`` detaches the entropy, which makes the
        backward cheaper. With ``label_mask`` [B,R] the head runs only for the selected tokens, and all other
        columns are 0. ``noise`` is added to the embeddings. All ranks of ``sequence`` must pass identical
        rows; each computes a part of the tokens.
        """
        layout = make_layout(
            ids,
            attention_mask,
            response_width,
            self.lm,
            packed=self.packed,
            label_mask=label_mask,
            sequence=sequence,
        )
        arguments = layout.arguments(self._positions, masked=with_aux)
        temperature = self.temperature if temperature is None else temperature
        with layout_forward(self.lm, self.packed), noisy_embeddings(self.lm, layout, noise):
            states, logits, aux = self.states_and_logits(layout.label_positions, arguments, with_aux)
            if logits is None:
                found = self.lm.get_output_embeddings()(
                    states[layout.label_positions], layout.labels, temperature, with_entropy, with_mean
                )
            else:
                found = statistics_from_logits(
                    logits[0], layout.labels, temperature, with_entropy, with_mean, with_correct
                )
        entropy = found.entropy
        if entropy is not None:
            entropy = layout.scatter(entropy if entropy_gradient else entropy.detach())
        values = None
        if self.value_head is not None:
            values = layout.scatter_states(self.value_head(states[layout.state_positions]).squeeze(-1))
        return PolicyOutput(
            layout.scatter(found.logprobs),
            entropy,
            values,
            aux,
            layout.scatter(found.mean_logprobs) if with_mean else None,
            layout.scatter(found.correct) if with_correct else None,
        )

    def states_and_logits(
        self, positions: Tensor, arguments: dict[str, Any], with_aux: bool
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Runs one forward of the model.

        Returns the hidden states [b*t,H] before the head, the logits [1,K,V] at ``positions``, and the
        load-balancing loss if requested. The logits are None if an ``LMHead`` can compute the log-probs.
        """
        if with_aux:
            arguments = arguments | {"output_router_logits": True}
        states = out = None
        if self.head_probe is None:
            self.head_probe, states, out = probe_head(self.lm, arguments)
        makes_logits, reads_trunk = self.head_probe
        if not makes_logits:
            states, out = forward_at(self.lm, positions, arguments)
        elif states is None and reads_trunk and not with_aux:
            states = self.lm.base_model(**arguments).last_hidden_state.flatten(0, -2)
        elif states is None:  # only the whole model computes the states or the load-balancing loss
            states, out = forward_at(self.lm, positions[:1], arguments)
        logits = None if makes_logits or out is None else out.logits
        return states, logits, out.aux_loss if with_aux and out is not None else None

    @property
    def trunk(self) -> PreTrainedModel:
        """The wrapped transformers model."""
        return self.lm

    @property
    def balance_coef(self) -> float | None:
        """The model's own coefficient of its load-balancing loss; None unless it is a mixture of experts."""
        if "output_router_logits" not in inspect.signature(self.lm.forward).parameters:
            return None
        return getattr(self.lm.config.get_text_config(), "router_aux_loss_coef", 0.0)

    @property
    def max_tokens(self) -> int | None:
        """The maximum number of positions, or None if the config has no limit."""
        return getattr(self.lm.config.get_text_config(), "max_position_embeddings", None)

    def save(self, directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Writes a Hugging Face folder for ``AutoModelForCausalLM.from_pretrained``, with adapters merged.

        ``state_dict`` has the keys of ``self.lm`` and is changed in place (see ``merged_state``).
        """
        plain = merged_state(self.lm, self.lm.state_dict() if state_dict is None else state_dict)
        cleared, self.lm.generation_config = self.lm.generation_config, self.generation_config
        try:
            self.lm.save_pretrained(directory, state_dict=plain)
        finally:
            self.lm.generation_config = cleared

    def save_adapter(self, directory: Path, state_dict: dict[str, Tensor]) -> None:
        """Writes only the adapter, which peft can add to the base; without an adapter, writes nothing."""
        if adapter_layers(self.lm):
            with draft_directory(directory) as draft:
                save_adapter(self.lm, draft, state_dict)


def statistics_from_logits(
    logits: Tensor,
    labels: Tensor,
    temperature: float,
    with_entropy: bool,
    with_mean: bool,
    with_correct: bool,
) -> LabelStatistics:
    """Computes the statistics of logits [K,V] and labels [K]; those that are not requested are None."""
    logprobs, entropy = logprobs_and_entropy_from_logits(
        logits, labels, temperature, with_entropy=with_entropy
    )
    mean = mean_logprobs_from_logits(logits, labels, logprobs, temperature) if with_mean else None
    return LabelStatistics(logprobs, entropy, mean, logits.argmax(-1) == labels if with_correct else None)


def saveable(config: GenerationConfig) -> GenerationConfig:
    """Sets do_sample in a generation config that is invalid without it, and returns the config.

    The configs of many models have a temperature without do_sample. transformers up to 5.17 does not write
    such a config, so saving the model at the end of training would fail.
    """
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True
    return config


def load_policy(
    model: ModelConfig, *, temperature: float, key: str, value_head: bool = False, adapter: Path | None = None
) -> Policy:
    """Loads a policy from a local folder or the Hub, and merges the LoRA adapter in the folder ``adapter``.

    Raises UserError with ``key`` if the folder does not contain a complete causal LM.
    """
    lm, info = from_pretrained(AutoModelForCausalLM, model, config=config_of(model, key), key=key)
    refuse_missing(model.path, info, key=key)
    if adapter is not None:
        merge_saved_adapter(lm, adapter, key)
    recompute_activations(lm, model)
    return Policy(lm, temperature, value_head)


@contextmanager
def sharded_loading(deepspeed_config: dict[str, Any]) -> Iterator[None]:
    """Makes ``from_pretrained`` shard each weight over the ranks as it is read (ZeRO-3).

    No rank ever holds a whole model. transformers shards models as long as an HfDeepSpeedConfig exists; this
    object is deleted at the end, so that later models are not sharded.
    """
    alive = HfDeepSpeedConfig(deepspeed_config)
    try:
        yield
    finally:
        del alive


def unsharded_twin(lm: nn.Module, device: torch.device) -> nn.Module:
    """Copies the architecture and the buffers of ``lm``; the copied parameters are empty and filled later.

    ``lm`` may be sharded, but not its buffers (RoPE's inverse frequencies). Parameters tied in ``lm`` are
    tied in the copy. The copy has no adapters: it is filled with the ``plain_weights`` of ``lm``.
    """
    with torch.device("meta"):
        twin = type(lm)(lm.config)
    empty: dict[int, nn.Parameter] = {}  # by identity of the source parameter
    for source, target in zip(plain_modules(lm), twin.modules(), strict=True):
        for key, buffer in source._buffers.items():
            target._buffers[key] = None if buffer is None else buffer.detach().to(device, copy=True)
        for key, parameter in source._parameters.items():
            if parameter is not None:
                hollow = nn.Parameter(
                    torch.empty(0, device=device, dtype=parameter.dtype), requires_grad=False
                )
                target._parameters[key] = empty.setdefault(id(parameter), hollow)
    install_linears(twin)
    install_head(twin)
    twin.eval()
    twin.generation_config = lm.generation_config
    return twin


def rope_length_limit(config: PreTrainedConfig) -> tuple[str, int] | None:
    """Returns the RoPE type and the row length up to which its frequencies are constant; None: any length.

    If a batch has a longer row, "longrope" switches to its other set of frequencies and "dynamic" scales the
    frequencies, for all rows. The log-probs of a row would then depend on the other rows of the batch, and
    would differ between decoding, where rows end one by one, and training.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    # some families have parameters for each kind of layer
    kinds: list[dict[str, Any]] = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    found = []
    for kind in kinds:
        name = str(kind.get("rope_type", "default"))
        if name == "longrope":
            found.append((int(kind["original_max_position_embeddings"]), name))
        elif "dynamic" in name:
            found.append((int(text.max_position_embeddings), name))
    return min(found)[::-1] if found else None
