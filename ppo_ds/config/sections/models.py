"""Defines the sections of the models: weights, ZeRO, optimizer, adapters and averaged weights."""

from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from ppo_ds.config.types import (
    FROM_LIST,
    Fraction,
    Natural,
    NonNegative,
    Number,
    OneOf,
    Positive,
    Section,
    Text,
)

Dtype = Literal["bf16", "fp16", "fp32"]
Quantization = Literal["none", "nf4"]


class ModelConfig(Section):
    """Weights and architecture of a model."""

    path: Text
    """A Hub id or a model folder."""

    revision: Text | None = None
    """Branch, tag or commit of a Hub id."""

    dtype: Dtype = "bf16"
    """Type of the weights in a forward."""

    trust_remote_code: bool = False
    """Runs Python code that comes with the model."""

    gradient_checkpointing: bool = False
    """Recomputes activations in the backward pass: less memory, more time."""

    attn_implementation: Text = "sdpa"
    """Attention implementation of transformers."""

    quantization: Quantization = "none"
    """Keeps the frozen linear layers in 4 bits with bitsandbytes (nf4); a trained model needs LoRA."""


class InheritedModelConfig(Section):
    """A model whose null keys inherit the actor's values.
    A model with a path does not inherit revision and trust_remote_code. The critic does not inherit
    quantization, and critic.init selects its weights."""

    path: Text | None = None
    """A Hub id or a model folder."""

    revision: Text | None = None
    """Branch, tag or commit of a Hub id."""

    dtype: Dtype | None = None
    """Type of the weights in a forward; null: the actor's."""

    trust_remote_code: bool | None = None
    """Runs Python code that comes with the model; null: the actor's value if path is null too, else
    false."""

    gradient_checkpointing: bool | None = None
    """Recomputes activations in the backward pass; null: the actor's value."""

    attn_implementation: Text | None = None
    """Attention implementation of transformers; null: the actor's."""

    quantization: Quantization | None = None
    """Keeps the frozen linear layers in 4 bits with bitsandbytes (nf4); null: the actor's for the reference,
    none for the critic."""


class ZeroConfig(Section):
    """DeepSpeed ZeRO of a trained model."""

    stage: Annotated[int, OneOf((0, 1, 2, 3))] = 2
    """Shards nothing (0), optimizer states (1), also gradients (2), or also weights (3)."""

    offload_optimizer: bool = False
    """Keeps the optimizer states in CPU memory; needs stage 1, 2 or 3."""

    offload_params: bool = False
    """Keeps the weights in CPU memory; needs stage 3."""


class ActorZeroConfig(ZeroConfig):
    """DeepSpeed ZeRO of a trained model."""

    generation_gather: Literal["auto", "whole", "layers"] = "auto"
    """At stage 3, gathers the weights for generation once (whole) or layer by layer in each forward (layers);
    auto: whole if memory suffices."""

    offload_states: Literal["auto", "always", "never"] = "auto"
    """Moves optimizer states to CPU memory during generation; auto: if GPU memory is short."""


class FrozenZeroConfig(Section):
    """DeepSpeed ZeRO of a model that is not trained: stage 0 (a replica per rank) or 3 (sharded weights)."""

    stage: Annotated[int, OneOf((0, 3))] = 0
    """Keeps a replica on each rank (0) or shards the weights (3)."""

    offload_params: bool = False
    """Keeps the weights in CPU memory."""


class OptimConfig(Section):
    """AdamW and its learning rate schedule."""

    name: Literal["adamw", "adamw_8bit"] = "adamw"
    """AdamW with its moments in fp32 (adamw), or in 8 bits with bitsandbytes (adamw_8bit)."""

    lr: Positive = 1e-6
    """Learning rate after the warm-up."""

    betas: Annotated[tuple[Fraction, Fraction], FROM_LIST] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""

    eps: Positive = 1e-8
    """Epsilon in AdamW's denominator."""

    weight_decay: NonNegative = 0.0
    """Weight decay; norms and biases are exempt."""

    schedule: Literal["cosine", "cosine_annealing", "linear", "constant"] = "cosine"
    """Shape of the learning rate after the warm-up; cosine and linear reach the final rate in the last step,
    cosine_annealing (torch's CosineAnnealingLR) one step later."""

    warmup_ratio: Fraction = 0.03
    """Share of all optimizer steps in which the rate rises from 0."""

    warmup_steps: Natural | None = None
    """Optimizer steps in which the rate rises from 0; null: set by warmup_ratio."""

    min_lr_ratio: Fraction = 0.1
    """Final learning rate as a share of lr; unused if schedule=constant."""

    grad_clip: NonNegative = 1.0
    """Clips the global gradient norm to this value; 0: off."""


class CriticOptimConfig(OptimConfig):
    """AdamW and its learning rate schedule."""

    lr: Positive = 5e-6
    """Learning rate after the warm-up."""


class LoraConfig(Section):
    """Low-rank adapters on frozen weights (Hu et al. 2021)."""

    rank: Natural = 0
    """Rank of the adapters; 0: off, all weights are trained."""

    alpha: Positive | None = None
    """The update is scaled by alpha / rank; null: twice the rank."""

    targets: list[Text] | None = None
    """Names of the linear layers to adapt, such as q_proj; null: all but the LM head."""

    lr: Positive | Literal["auto"] | None = "auto"
    """Learning rate of the adapters; auto: 10 times optim.lr; null: optim.lr."""


class EmaConfig(Section):
    """Exponential moving average of the weights in fp32, updated after each optimizer step."""

    decay: Annotated[Number, Ge(0), Lt(1)] | None = None
    """Decay of the average, which is also written to model_ema/; null: no average."""

    evaluate: bool = False
    """Evaluates the averaged weights instead of the trained ones, also to select the best checkpoint."""


class ActorConfig(Section):
    """The policy that is trained."""

    model: ModelConfig
    zero: ZeroConfig
    optim: OptimConfig
    lora: LoraConfig
    ema: EmaConfig

    deepspeed: dict[Any, Any] = {}
    """Raw DeepSpeed settings, merged last."""


class PPOActorConfig(ActorConfig):
    """The policy that is trained."""

    zero: ActorZeroConfig


class CriticConfig(Section):
    """The value model."""

    model: InheritedModelConfig
    zero: ZeroConfig
    optim: CriticOptimConfig
    lora: LoraConfig

    init: Literal["auto", "reward", "actor", "path"] = "auto"
    """Initial weights: of the reward model, of the actor, or of critic.model.path; auto: the reward model if
    it is a decoder with the actor's tokenizer, else the actor."""

    share_trunk: bool = False
    """Uses a value head on the actor instead of a separate model; optim, zero and lora are the actor's."""

    deepspeed: dict[Any, Any] = {}
    """Raw DeepSpeed settings, merged last."""


class ScorerOptimConfig(OptimConfig):
    """AdamW and its learning rate schedule."""

    lr: Positive = 1e-5
    """Learning rate after the warm-up."""


class ScorerConfig(ActorConfig):
    """The reward model that stage=reward_model trains."""

    optim: ScorerOptimConfig


class ReferenceConfig(Section):
    """The frozen policy that the KL is measured against; by default the actor's initial weights."""

    model: InheritedModelConfig
    zero: FrozenZeroConfig
