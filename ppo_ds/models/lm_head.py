"""The head of a language model where it counts: on the states that are asked about, and without logits where it can be.

A causal LM of transformers ends with ``logits = head(hidden)``. While a question is put, the head gets the asked states alone, and a linear head
answers with their log-probs and entropy themselves, which the model hands on as if they were logits. All of it happens within the head's own
forward, so that under ZeRO-3 the engine gathers the head's weight before it, and again before its backward.

Some families do something to their logits behind the head: a soft cap (Gemma 2), a scale (Cohere, Granite), a cut of the vocabulary. Then what
comes out is not what the head gave; that is seen at the first forward, and such a model makes the logits of the asked states ever after.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils import ModelOutput

from ppo_ds.ops.linear_logprobs import linear_logprobs_and_entropy
from ppo_ds.ops.logprobs import logprobs_and_entropy_from_logits

_MARK = 1000.1  # what a cap, a scale or a narrower dtype changes


class Question(NamedTuple):
    """What is asked of a forward."""

    places: Tensor  # [K] into the states [b,t], flattened
    labels: Tensor  # [K] the token after each
    temperature: float
    with_entropy: bool
    entropy_gradient: bool  # whether the entropy is differentiable, which costs more


class Answer(NamedTuple):
    logprobs: Tensor  # [K] fp32, nats
    entropy: Tensor | None  # [K] fp32, nats
    states: Tensor  # [b*t,H] what the head was given, before any were picked
    out: ModelOutput  # the rest of what the model says


class ScoringHead(nn.Linear):
    """A linear head that answers a question with log-probs in place of logits; without one it is what it was."""

    question: Question | None = None
    untouched: bool | None = None  # whether the model hands on what its head gives; None: not known yet

    def forward(self, hidden: Tensor) -> Tensor:
        """[...,H] -> logits [...,V]; asked, [1,K,H] -> rows [1,n,V] of numbers: K log-probs, K entropies, and marks, a row of them or more."""
        if self.question is None:
            return super().forward(hidden)
        asked, width = self.question, self.out_features
        logprobs, entropy = linear_logprobs_and_entropy(
            hidden[0],
            self.weight,
            self.bias,
            asked.labels,
            asked.temperature,
            with_entropy=asked.with_entropy,
        )
        if entropy is not None:
            logprobs = torch.cat([logprobs, entropy if asked.entropy_gradient else entropy.detach()])
        # rows as wide as logits, so that whatever a model does to logits it can do to these, and be seen to do it
        return F.pad(logprobs, (0, 2 * width - logprobs.numel() % width), value=_MARK).view(1, -1, width)


def install(lm: nn.Module) -> None:
    """Makes a linear head a ``ScoringHead``: the same module, with the same parameters and hooks."""
    head = lm.get_output_embeddings()
    if type(head) is nn.Linear:
        head.__class__ = ScoringHead


def ask(lm: nn.Module, question: Question, arguments: dict[str, Any]) -> Answer:
    """One forward of ``lm`` with ``arguments``."""
    head = lm.get_output_embeddings()
    fused = isinstance(head, ScoringHead) and head.untouched is not False
    given: list[Tensor] = []

    def pick(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        given.append(inputs[0].flatten(0, -2))
        return given[0][question.places].unsqueeze(0)

    hook = head.register_forward_pre_hook(pick)
    if fused:
        head.question = question
    try:
        out = lm(**arguments)
    finally:
        hook.remove()
        if fused:
            head.question = None
    assert len(given) == 1, f"{type(lm).__name__} has called its head {len(given)} times"
    if fused and head.untouched is None:
        head.untouched = out.logits.shape[-1] == head.out_features and bool(
            (out.logits[0, -1] == _MARK).all()
        )
        if not head.untouched:
            return ask(lm, question, arguments)
    logprobs, entropy = (_read if fused else _from_logits)(out.logits, question)
    return Answer(
        logprobs, entropy if entropy is None or question.entropy_gradient else entropy.detach(), given[0], out
    )


def _from_logits(logits: Tensor, question: Question) -> tuple[Tensor, Tensor | None]:
    return logprobs_and_entropy_from_logits(
        logits[0], question.labels, question.temperature, with_entropy=question.with_entropy
    )


def _read(rows: Tensor, question: Question) -> tuple[Tensor, Tensor | None]:
    """What ``ScoringHead`` has written."""
    numbers, count = rows.flatten(), len(question.labels)
    return numbers[:count], numbers[count : 2 * count] if question.with_entropy else None
