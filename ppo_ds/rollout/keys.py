"""Defines the config section rollout, and the decode backends by name.

To add a backend, write a class that implements `ppo_ds.rollout.base.Generator`. Then add a subclass of
RolloutConfig here, with the dotted name of that class and the keys that only this backend uses.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt
from pydantic import Field

from ppo_ds.config.types import Count, Number, OneOf, Positive, Section, Text, Variants

BACKENDS: dict[str, type[RolloutConfig]] = {}


class EnvironmentConfig(Section):
    """Environment of multi-turn responses: it answers each turn of the policy until the episode is done."""

    path: Text | None = Field(
        None,
        description="Class of the environment, as pkg.mod:Class or file.py:Class; null: responses have a "
        "single turn.",
    )
    arguments: dict[Any, Any] = Field({}, description="Keyword arguments of the class.")
    max_turns: Count = Field(8, description="Limit on the turns of the policy in one response.")
    timeout_seconds: Positive = Field(60.0, description="Time limit of one call of reset or step.")
    workers: Count = Field(8, description="Simultaneous calls of environments on each rank.")
    trial: bool = Field(
        True, description="Tries the environment on one row of the data before models are loaded."
    )


class RolloutConfig(Variants):
    """Responses of a PPO step, and the decode backend that generates them."""

    tag = "backend"
    variants = BACKENDS
    code = "generator"
    # Dotted name of a class that implements `ppo_ds.rollout.base.Generator`, which documents its constructor
    generator: ClassVar[str]
    # Dotted name of a function (model, tokens of the longest sequence) that returns the reason why the
    # backend cannot decode the model, or None. It is called with the model in memory. Without a function the
    # backend decodes every model that the checks before loading accept (assemble/preflight.py).
    refusal: ClassVar[str | None] = None
    # True if measurements show that the backend is faster than the backends below. auto tries such backends
    # in order.
    in_auto: ClassVar[bool] = False
    # True if the backend has separate weights, which it receives at each switch to generation
    own_weights: ClassVar[bool] = False

    prompts_per_step: Count = Field(description="Number of prompts in one PPO step, over all ranks.")
    samples_per_prompt: Count = Field(1, description="Responses to each prompt.")
    backend: Annotated[str, OneOf(BACKENDS)] = Field(
        "auto", description="Decode backend, or package.module.Name of your own."
    )
    environment: EnvironmentConfig


class Auto(RolloutConfig):
    """Uses static if it can decode the model and agrees with training, otherwise hf."""

    backend: Literal["auto"] = "auto"


class PartialRollouts(RolloutConfig):
    """A backend that implements `ppo_ds.rollout.base.PartialGenerator`."""

    partial: bool = Field(
        False,
        description="Generates responses to more prompts than a step needs; unfinished responses continue in "
        "later steps, with newer weights.",
    )
    oversample: Annotated[Number, Gt(1)] = Field(
        2.0, description="With rollout.partial, prompts in progress, relative to rollout.prompts_per_step."
    )
    max_versions: Annotated[int, Ge(2)] = Field(
        8,
        description="With rollout.partial, most versions of the policy that sample one response; the step of "
        "the last version waits for it.",
    )


class Static(PartialRollouts):
    """A preallocated key-value cache of fixed shape, with CUDA graphs on a GPU."""

    backend: Literal["static"] = "static"
    generator = "ppo_ds.rollout.static.StaticGenerator"
    refusal = "ppo_ds.rollout.decoding.refusal"
    in_auto = True


class HF(RolloutConfig):
    """The generate of transformers; supports every model."""

    backend: Literal["hf"] = "hf"
    generator = "ppo_ds.rollout.hf.HFGenerator"
    in_auto = True


class VLLMConfig(Section):
    """Settings of rollout.backend=vllm."""

    tensor_parallel: Count = Field(
        1, description="Ranks that share one copy of the weights and generate together."
    )
    kv_cache_gb: Positive | None = Field(
        None, description="GiB of the KV cache on each rank; null: enough for memory.rollout_tokens."
    )
    sleep: Annotated[int | str, OneOf((0, 1, 2), also=("auto",))] = Field(
        "auto",
        description="During training, 0: weights and cache stay on the GPU; 1: weights move to CPU memory; "
        "2: both are freed; auto: 2 on a GPU (1 with LoRA, whose base stays), 0 on a CPU.",
    )
    enforce_eager: bool = Field(
        False, description="Decodes without compilation and CUDA graphs; always so on a CPU."
    )

    def sleep_level(self, on_gpu: bool, lora: bool = False) -> int:
        """Returns ``sleep`` as a number; auto is 1 with LoRA on a GPU, since the base is not sent again."""
        return int(self.sleep) if self.sleep != "auto" else (1 if lora else 2) if on_gpu else 0


class VLLM(PartialRollouts):
    """An engine of vLLM in the trainer's process, with separate weights (rollout.vllm)."""

    backend: Literal["vllm"] = "vllm"
    generator = "ppo_ds.rollout.vllm.VLLMGenerator"
    own_weights = True
    vllm: VLLMConfig
