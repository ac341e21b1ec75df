"""Makes parts of drives: tiny models, rows, a world of one rank, and a stub of the training engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from ppo_ds.distributed.world import Waiting, World
from ppo_ds.engine.trained import StepInfo
from ppo_ds.models.lora import add_adapters
from ppo_ds.types import Experience
from tests.gpu_sim.fake_cuda import CUDA, FakeCuda

VOCABULARY = 512
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SIZES: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    max_position_embeddings=1024,
)
# gemma2 and gpt_oss have two kinds of layers, one of each
GROUPED = SIZES | {"num_key_value_heads": 2}
# family -> class of its config and its arguments
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", GROUPED | {"head_dim": 16}),
    "mistral": ("MistralConfig", GROUPED | {"sliding_window": None}),
    "gemma2": ("Gemma2Config", GROUPED | {"num_hidden_layers": 2, "head_dim": 16, "sliding_window": 1024}),
    "gpt2": ("GPT2Config", dict(vocab_size=VOCABULARY, n_embd=64, n_layer=1, n_head=4)),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
    "opt": (
        "OPTConfig",
        dict(
            vocab_size=VOCABULARY,
            hidden_size=64,
            ffn_dim=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            word_embed_proj_dim=64,
        ),
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        GROUPED | dict(head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    ),
    "mixtral": ("MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "gpt_oss": (
        "GptOssConfig",
        GROUPED | dict(num_hidden_layers=2, num_local_experts=4, head_dim=16, sliding_window=1024),
    ),
    "deberta": (
        "DebertaV2Config",
        SIZES
        | dict(
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=32,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            position_biased_input=False,
        ),
    ),
    "roberta": ("RobertaConfig", SIZES),
    "bert": ("BertConfig", SIZES),
}


def config(family: str) -> Any:
    name, arguments = FAMILIES[family]
    return getattr(transformers, name)(**arguments)


def language_model(family: str, dtype: str = "bf16", *, adapters: bool = False) -> PreTrainedModel:
    """Makes a causal LM on the device, with ``adapters`` also LoRA adapters and gradient checkpointing."""
    return moved(AutoModelForCausalLM.from_config(config(family), dtype=DTYPES[dtype]), adapters)


def classifier(family: str, dtype: str = "bf16", *, adapters: bool = False) -> PreTrainedModel:
    """Makes a sequence classifier with one label on the device; see ``language_model``."""
    settings = config(family)
    settings.num_labels = 1
    return moved(AutoModelForSequenceClassification.from_config(settings, dtype=DTYPES[dtype]), adapters)


def moved(model: PreTrainedModel, adapters: bool) -> PreTrainedModel:
    """Moves a model to the device, as the engine does after the model is complete."""
    if adapters:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        add_adapters(model, rank=4, alpha=8.0, targets=None, seed=0, key="actor.lora")
    return model.train().to(CUDA)


def experience(rows: int = 4, prompt: int = 5, width: int = 7) -> Experience:
    """Makes an experience on the CPU with all columns. Rows have different lengths."""
    attention = torch.ones(rows, prompt + width, dtype=torch.bool)
    attention[0, :2] = False
    attention[1, -3:] = False
    actions = attention[:, prompt:].clone()
    tokens, states = torch.zeros(rows, width), torch.zeros(rows, width + 1)
    return Experience(
        ids=torch.randint(5, VOCABULARY, attention.shape),
        attention_mask=attention,
        response_mask=actions,
        finished=torch.ones(rows, dtype=torch.bool),
        decode_logprobs=tokens,
        weights=torch.ones(rows, width),
        scores=torch.zeros(rows),
        rewards=states,
        advantages=tokens,
        logprobs=tokens,
        old_logprobs=tokens,
        ref_logprobs=tokens,
        values=states,
        returns=states,
        value_mask=pad(actions, (0, 1)),
    )


@contextmanager
def one_rank(device: FakeCuda) -> Iterator[World]:
    """Provides the real World of a run with one rank, whose collectives do nothing on the device.

    torch's collectives of objects read their sizes from the device, which counts as one wait.
    """

    def gather_objects(out: list[Any], item: Any, group: Any = None) -> None:
        device.note_wait("all_gather_object")
        out[0] = item

    replaced = {
        "all_reduce": lambda *args, **kwargs: None,
        "all_gather": lambda out, x, **kwargs: out[0].copy_(x),
        "all_gather_object": gather_objects,
        "barrier": lambda *args, **kwargs: None,
    }
    with mock.patch.multiple(dist, **replaced):
        yield World(0, 1, 0, CUDA, None, Waiting(CUDA))


def timer(phase: str) -> Any:
    """Stands in for PhaseTimer."""
    return nullcontext()


class Engine:
    """Stands in for TrainedModel, whose DeepSpeed engine the simulation cannot run. It never waits itself."""

    steps = 0

    loss_scale_can_decrease = False

    def __init__(self, module: nn.Module, world: World):
        self.module, self.world = module, world
        self.backwards: list[bool] = []
        self.forwards = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += 1
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, last: bool) -> None:
        assert loss.is_cuda
        self.backwards.append(last)
        loss.backward()

    def local_squared_grad_norm(self) -> Tensor:
        norms = [p.grad.float().norm().double() for p in self.module.parameters() if p.grad is not None]
        return torch.stack(norms).square().sum()

    def step(self) -> StepInfo:
        self.module.zero_grad()
        return StepInfo(0.0, 1e-6, False, 1.0)

    @contextmanager
    def generation_mode(self) -> Iterator[None]:
        self.module.eval()
        yield
        self.module.train()


Case = Callable[[FakeCuda], None]
