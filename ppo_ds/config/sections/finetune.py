"""Defines the sections of supervised fine-tuning and of the training of a reward model."""

from typing import Annotated, Literal

from annotated_types import Ge, Lt

from ppo_ds.config.types import Count, Natural, NonNegative, Number, Section, Text


class SFTConfig(Section):
    """Supervised fine-tuning of the actor on demonstrations."""

    batch_size: Count = 64
    """Rows of one optimizer step, over all ranks."""

    max_tokens: Count = 1024
    """Longest row, in tokens; longer rows are truncated on the right."""

    learn: Literal["answer", "assistant", "all"] = "assistant"
    """Learned tokens; answer: the last assistant turn, assistant: every assistant turn, all: every token."""

    label_smoothing: Annotated[Number, Ge(0), Lt(1)] = 0.0
    """Share of each target's probability that is spread over the whole vocabulary."""

    neftune_alpha: NonNegative = 0.0
    """Scale of the uniform noise on the embeddings (NEFTune, Jain et al. 2023); 0: none."""

    samples: Natural = 4
    """Number of held-out prompts answered greedily at each evaluation."""

    sample_tokens: Count = 128
    """Length limit of the answers to sft.samples prompts, in tokens."""


class RewardModelConfig(Section):
    """Training of a reward model on pairs of answers."""

    batch_size: Count = 64
    """Pairs of one optimizer step, over all ranks."""

    max_tokens: Count = 1024
    """Longest text, prompt and answer together, in tokens."""

    joint: Text | None = None
    """Text inserted between a prompt and an answer if there is no white space; null: a space, or nothing if
    the tokenizer has no space."""

    centering: NonNegative = 0.01
    """Coefficient of the squared sum of a pair's scores, which keeps them around 0."""

    label_smoothing: Annotated[Number, Ge(0), Lt(1)] = 0.0
    """Assumed share of pairs whose label is wrong."""

    margin: bool = True
    """Subtracts the row's margin, if it has one, from the difference of the scores in the loss."""

    head_init: Literal["zero", "normal"] = "normal"
    """Initial weights of a new score head; normal: with standard deviation 1/sqrt(hidden size + 1)."""
