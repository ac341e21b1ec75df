"""LM head that computes log-probs of given tokens without logits, and forwards of causal LMs that use it.

A causal LM of transformers ends with ``logits = head(hidden)``. A policy needs the log-probs of the response
tokens only. The trunk therefore computes the hidden states once, and ``LMHead`` computes log-probs and
entropy at the response positions without materializing logits.

Some model families change the logits after the head, by a soft cap (Gemma 2), a scale (Cohere, Granite) or a
truncation of the vocabulary; ``probe_head`` detects such changes. Other families have a head that is not
linear. In all of these families, the model's own forward computes the logits of the response positions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ppo_ds.compute.linear_logprobs import (
    LabelStatistics,
    has_fp32_products,
    linear_logits,
    linear_statistics,
)
from ppo_ds.models.linear import Linear

_MARK = 1000.1  # replaces all logits in a probe; a soft cap or a scale changes this value


class LMHead(Linear):
    """Linear LM head that returns either logits or statistics of given labels, such as their log-probs.

    One method, ``forward``, serves both, because ZeRO-3's hooks gather the weight only for a module's forward
    and backward.
    """

    def forward(
        self,
        hidden: Tensor,
        labels: Tensor | None = None,
        temperature: float = 1.0,
        with_entropy: bool = False,
        with_mean: bool = False,
    ) -> Tensor | LabelStatistics:
        """Returns the logits [...,V] of hidden [...,H].

        On a GPU, logits of 16-bit hidden states are in fp32, so that tokens are sampled from the same
        distribution that training computes. With labels [K], returns instead the statistics of the labels
        under softmax(logits / temperature) for hidden [K,H], in nats and fp32.
        """
        if labels is None:
            if has_fp32_products(hidden, self.weight):
                return linear_logits(hidden, self.weight, self.bias)
            return super().forward(hidden)
        return linear_statistics(
            hidden,
            self.weight,
            self.bias,
            labels,
            temperature,
            with_entropy=with_entropy,
            with_mean=with_mean,
        )


def install_head(lm: PreTrainedModel) -> None:
    """Converts the linear head of ``lm`` to an ``LMHead`` with the same parameters (ZeRO-3: the same shards).

    A head of another class is left unchanged.
    """
    head = lm.get_output_embeddings()
    if type(head) in (nn.Linear, Linear):
        head.__class__ = LMHead


class HeadProbe(NamedTuple):
    """Result of ``probe_head``: what a causal LM does before and after its head."""

    makes_logits: bool  # the model returns the output of an ``LMHead`` as its logits, unchanged
    reads_trunk: bool  # the input of the head is the last hidden state of ``lm.base_model``, unchanged


def probe_head(lm: PreTrainedModel, arguments: dict[str, Any]) -> tuple[HeadProbe, Tensor, ModelOutput]:
    """Tests what ``lm`` computes before and after its ``LMHead``.

    Runs its own forward once, with the head's output replaced by a constant. Returns the result of the test,
    the hidden states [b*t,H] before the head, and the model's output.
    """
    seen: dict[str, Tensor] = {}

    def keep_states(module: nn.Module, inputs: Any, out: Any) -> None:
        if module is not lm:  # base_model is the model itself in classes without a base model
            seen["trunk"] = out.last_hidden_state.detach().flatten(0, -2).clone()

    def mark(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        seen["marked"] = torch.full_like(logits, _MARK)
        return seen["marked"].clone()

    hooks = [
        lm.base_model.register_forward_hook(keep_states),
        lm.get_output_embeddings().register_forward_hook(mark),
    ]
    try:
        states, out = forward_at(lm, arguments["input_ids"].new_zeros(1), arguments)
    finally:
        for hook in hooks:
            hook.remove()
    reads_trunk = "trunk" in seen and _same(seen["trunk"], states.detach())
    return HeadProbe(_same(out.logits, seen["marked"]), reads_trunk), states, out


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=0.0, atol=0.0, equal_nan=True)


def forward_at(
    lm: PreTrainedModel, positions: Tensor, arguments: dict[str, Any]
) -> tuple[Tensor, ModelOutput]:
    """Runs the model's own forward, but applies the head only at ``positions`` [K] of the flattened [b*t].

    Returns the hidden states [b*t,H] before the head, and the model's output with logits [1,K,V].
    """
    given: list[Tensor] = []

    def pick(module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        given.append(inputs[0].flatten(0, -2))
        return given[0][positions].unsqueeze(0)

    # runs before the hooks of ZeRO-3, so that they see only the picked states as the head's input
    hook = lm.get_output_embeddings().register_forward_pre_hook(pick, prepend=True)
    try:
        out = lm(**arguments)
    finally:
        hook.remove()
    assert len(given) == 1, f"{type(lm).__name__} called its head {len(given)} times"
    return given[0], out
