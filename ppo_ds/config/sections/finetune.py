"""Defines the sections of supervised fine-tuning and of the training of a reward model."""

from typing import Annotated, Literal

from annotated_types import Ge, Lt
from pydantic import Field

from ppo_ds.config.types import Count, Natural, NonNegative, Number, Section, Text


class SFTConfig(Section):
    """Supervised fine-tuning of the actor on demonstrations. One step is one optimizer step."""

    batch_size: Count = Field(64, description="Rows of one optimizer step, over all ranks.")
    max_tokens: Count = Field(1024, description="Longest row, in tokens; longer rows are cut on the right.")
    learn: Literal["answer", "assistant", "all"] = Field(
        "assistant",
        description="Learned tokens; answer: the last assistant turn, assistant: every assistant turn, all: "
        "every token.",
    )
    label_smoothing: Annotated[Number, Ge(0), Lt(1)] = Field(
        0.0, description="Share of each target's probability that is spread over the whole vocabulary."
    )
    neftune_alpha: NonNegative = Field(
        0.0, description="Scale of the uniform noise on the embeddings (NEFTune, Jain et al. 2023); 0: none."
    )
    samples: Natural = Field(4, description="Held-out prompts that are answered greedily at each evaluation.")
    sample_tokens: Count = Field(128, description="Limit on the length of such an answer, in tokens.")


class RewardModelConfig(Section):
    """Training of a reward model on pairs of answers. One step is one optimizer step."""

    batch_size: Count = Field(64, description="Pairs of one optimizer step, over all ranks.")
    max_tokens: Count = Field(1024, description="Longest text, prompt and answer together, in tokens.")
    joint: Text | None = Field(
        None,
        description="Text between a prompt and an answer that are texts and have no white space there; null: "
        "a space, or nothing if the tokenizer has no space. The model keeps it for its use as a reward.",
    )
    centering: NonNegative = Field(
        0.01, description="Coefficient of the squared sum of a pair's scores, which keeps them around 0."
    )
    label_smoothing: Annotated[Number, Ge(0), Lt(1)] = Field(
        0.0, description="Assumed share of pairs whose label is wrong."
    )
    margin: bool = Field(
        True, description="Requires a difference of scores of at least the row's margin, where it has one."
    )
    head_init: Literal["zero", "normal"] = Field(
        "normal",
        description="Initial weights of a new score head: zero, or normal with standard deviation "
        "1/sqrt(hidden size + 1).",
    )
