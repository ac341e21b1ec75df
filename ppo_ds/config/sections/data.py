"""Defines the sections of data and sampling."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from ppo_ds.config.types import Count, Natural, Number, Positive, Section, Text

TASK = "reasoning_gym:"  # a path with this prefix names a task of reasoning-gym, which makes the rows


def is_task(path: str | None) -> bool:
    """Returns whether a task of reasoning-gym generates the rows of a path."""
    return path is not None and path.startswith(TASK)


class SamplingConfig(Section):
    """Sampling of responses."""

    max_new_tokens: Count
    """Limit on the length of a response, in tokens."""

    min_new_tokens: Natural = 0
    """Number of tokens before the first end token can be sampled."""

    temperature: Positive = 1.0
    """Sampling temperature; log-probs are computed at the same temperature."""

    top_p: Annotated[Number, Gt(0), Le(1)] = 1.0
    """Samples from the most probable tokens, as few as have at least this total probability; 1: off."""

    top_k: Natural = 0
    """Samples from the k most probable tokens; 0: off; 1: greedy."""

    stop_token_ids: list[Natural] | None = None
    """Token ids that end a response; null: the model's end tokens; []: none."""

    stop: list[Text] = []
    """Strings that end a response."""


class MixtureConfig(Section):
    """One data set of a mixture; null split and prompt_column inherit the values of the data section."""

    path: Text
    """A Hub data set or a file of prompts."""

    weight: Positive = 1.0
    """Share of the prompts, relative to the other data sets."""

    split: Text | None = None
    """Split of a Hub data set; null: data.split."""

    revision: Text | None = None
    """Branch, tag or commit of a Hub data set."""

    prompt_column: Text | None = None
    """Column of the prompts; null: data.prompt_column."""

    task: dict[Any, Any] = {}
    """Keys of the task, if the path is reasoning_gym:TASK."""


class DataConfig(Section):
    """Rows for training and evaluation: demonstrations or pairs."""

    path: Text | None = None
    """Training rows: a Hub data set, or a JSONL, JSON, Parquet or CSV file."""

    split: Text = "train"
    """Split of a Hub data set."""

    revision: Text | None = None
    """Branch, tag or commit of a Hub data set."""

    prompt_column: Text | None = None
    """Column of the prompts; null: the first of prompt, messages and conversations that exists."""

    system: Text | None = None
    """System message that is added to chats without one."""

    apply_chat_template: bool | None = None
    """Treats a text prompt as a user message and applies the chat template; null: only if the tokenizer has a
    template."""

    max_samples: Count | None = None
    """Largest number of training rows to use from each data set; null: all rows."""

    eval_path: Text | None = None
    """Held-out rows: a Hub data set or a file."""

    eval_split: Text = "test"
    """Split of the Hub data set of held-out rows."""

    shuffle: bool = True
    """Shuffles the training rows anew in each pass."""

    chat_template: Text | None = None
    """Jinja chat template, as a file or as text; null: the tokenizer's template. config.yaml has the text."""

    chat_template_kwargs: dict[Any, Any] = {}
    """Keyword arguments of the chat template."""


class DifficultyConfig(Section):
    """Draws prompts less often while all of their responses have the same score."""

    floor: Annotated[Number, Gt(0), Le(1)] | None = None
    """Sampling frequency of settled prompts (see responses) relative to other prompts; null: off."""

    responses: Annotated[int, Ge(2)] = 8
    """A prompt is settled while its last N responses have the same score; N is this number, or the number of
    responses per prompt in a step if that is larger."""


class PPODataConfig(DataConfig):
    """Rows for training and evaluation: prompts (stage=ppo), demonstrations (sft) or pairs (reward_model).

    Only stage=ppo uses mix, difficulty, task, eval_task, max_prompt_tokens, long_prompts and ptx_*.
    """

    mix: list[MixtureConfig] = []
    """Several data sets mixed by weight, instead of data.path."""

    difficulty: DifficultyConfig = DifficultyConfig()

    task: dict[Any, Any] = {}
    """Keys of the task if data.path is reasoning_gym:TASK, such as size (the number of rows)."""

    eval_task: dict[Any, Any] = {}
    """Keys of the task if data.eval_path is reasoning_gym:TASK. If TASK is also the training task, keys that
    are not set inherit the values of data.task, except the seed."""

    max_prompt_tokens: Count = 512
    """Longest prompt, in tokens."""

    long_prompts: Literal["truncate_left", "drop"] = "truncate_left"
    """Treatment of prompts longer than data.max_prompt_tokens."""

    ptx_path: Text | None = None
    """Texts or demonstrations for the PTX loss: a Hub data set or a file."""

    ptx_split: Text = "train"
    """Split of a Hub data set of PTX texts."""

    ptx_max_tokens: Count = 512
    """Longest PTX text, in tokens; longer texts are truncated on the right."""
