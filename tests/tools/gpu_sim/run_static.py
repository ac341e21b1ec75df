"""Decodes with the static backend on a simulated GPU: python tests/tools/gpu_sim/run_static.py"""

import sys

from simulated_cuda import SIZES, failed, fake_cuda, reported, show, torch  # isort: skip
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

import ppo_ds.rollout.static as static
from ppo_ds.rollout.base import SamplingParams
from ppo_ds.types import Prompts

torch.cuda.get_device_capability = lambda device=None: (9, 0)
ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES),
    "llama3": LlamaConfig(**SIZES, rope_parameters=ROPE),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma2": Gemma2Config(**SIZES, sliding_window=4096, head_dim=16),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen3moe": Qwen3MoeConfig(
        **SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=4, head_dim=16, sliding_window=512),
    "granite": GraniteConfig(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
}


class IdTokenizer:
    pad_id = 0

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(map(str, ids))


class SimulatedRecorder:
    """Replaces the recorder of CUDA graphs and checks each capture for waits and uploads."""

    def __init__(self, mode):
        self.mode, self.recorded, self.warmed_up = mode, 0, 0

    def warm_up(self, step):
        self.warmed_up += 1
        step()

    def record(self, step):
        self.recorded += 1
        self.mode.capturing = True
        try:
            step()
        finally:
            self.mode.capturing = False
        return lambda: None


def mostly_unfinished():
    """Makes the flags of unfinished rows that the host reads: all True, and all False at each eighth read."""
    looks = 0

    def answer(shape, dtype):
        nonlocal looks
        if dtype != torch.bool:
            return torch.zeros(shape, dtype=dtype)
        looks += 1
        return torch.ones(shape, dtype=dtype) if looks % 8 else torch.zeros(shape, dtype=dtype)

    return answer


for name, config in CONFIGS.items():
    with reported(name), fake_cuda(mostly_unfinished()) as mode:
        with torch.device("cuda"):
            lm = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        mode.clear()
        recorder = SimulatedRecorder(mode)
        static.recorder_for = lambda device, recorder=recorder: recorder
        generator = static.StaticGenerator(lambda lm=lm: lm, tokenizer=IdTokenizer(), token_budget=4 * 150)
        prompts = Prompts(
            ids=torch.randint(1, 500, (6, 10)),
            mask=torch.ones(6, 10, dtype=torch.bool),
            limits=torch.full((6,), 128),
            metadata=({},) * 6,
        )
        out = generator(prompts, SamplingParams(128, 4, 0.8, 0.95, 40, (2,), ("7 7 7",)))
        print(name, tuple(out.ids.shape), f"recorded {recorder.recorded}, warmed up {recorder.warmed_up}")
        show(mode)

sys.exit(bool(failed))
