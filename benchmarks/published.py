"""Compares published times of DeepSpeed-Chat and OpenRLHF with the doctor's estimate of time.

    python benchmarks/published.py      # prints the tables of docs/dev/scaling.md

The estimate is that of this trainer on the same GPUs, models, batch sizes and lengths. It reads no weights
and needs no GPU.

Sources: DeepSpeed, blogs/deepspeed-chat/README.md (tables 1 and 2), and DeepSpeedExamples,
applications/DeepSpeed-Chat/training/step3_rlhf_finetuning/BenckmarkSetting.md and training_scripts/opt;
OpenRLHF, README.md, section Performance, and its example command for the lengths, which the table does not
state.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [
    str(ROOT),
    *(entry for entry in sys.path if Path(entry or ".").resolve() != ROOT / "benchmarks"),
]

from launch.cli import load_config
from ppo_ds.compute.sizes import Shape
from ppo_ds.config.sections.models import LoraConfig, ModelConfig
from ppo_ds.models.size import planned_shape
from ppo_ds.planning.budgets import resolve, with_numbers
from ppo_ds.planning.ppo_memory import Models, estimate
from ppo_ds.planning.run_memory import FrozenModel, Hardware
from ppo_ds.tools.doctor.gpus import GPUS
from ppo_ds.tools.doctor.step_time import Machine, PhaseTime, PPOTime, read_assumptions

GIB = 2**30


def _opt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=4 * hidden)
    return dict(model_type="opt", vocab_size=50272, word_embed_proj_dim=hidden) | sizes


def _llama(hidden: int, layers: int, heads: int, kv: int, inner: int) -> dict[str, Any]:
    sizes = dict(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads)
    return dict(model_type="llama", vocab_size=32000, num_key_value_heads=kv, intermediate_size=inner) | sizes


MODELS = {
    "OPT-350M": _opt(1024, 24, 16) | {"word_embed_proj_dim": 512},
    "OPT-6.7B": _opt(4096, 32, 32),
    "OPT-13B": _opt(5120, 40, 40),
    "OPT-30B": _opt(7168, 48, 56),
    "OPT-66B": _opt(9216, 64, 72),
    "OPT-175B": _opt(12288, 96, 96),
    "Llama 2 7B": _llama(4096, 32, 32, 32, 11008),
    "Llama 2 13B": _llama(5120, 40, 40, 40, 13824),
    "CodeLlama 34B": _llama(8192, 48, 64, 8, 22016),
    "Llama 2 70B": _llama(8192, 80, 64, 8, 28672),
}
DAY = 24.0
# actor, GPU, number of GPUs, hours for 131.9 thousand prompts
DEEPSPEED_CHAT = [
    ("OPT-6.7B", "a100-40gb", 8, 5.7),
    ("OPT-13B", "a100-40gb", 8, 10.8),
    ("OPT-30B", "a100-40gb", 8, 1.85 * DAY),
    ("OPT-6.7B", "a100", 8, 4.1),
    ("OPT-13B", "a100", 8, 9.0),
    ("OPT-30B", "a100", 8, 18.0),
    ("OPT-66B", "a100", 8, 2.1 * DAY),
    ("OPT-13B", "a100", 64, 1.25),
    ("OPT-30B", "a100", 64, 4.0),
    ("OPT-66B", "a100", 64, 7.5),
    ("OPT-175B", "a100", 64, 20.0),
]
# actor, number of A800s, seconds for 1024 prompts of the optimized DeepSpeed-Chat and of OpenRLHF
OPENRLHF = [
    ("Llama 2 7B", 16, 855.09, 471.11),
    ("Llama 2 13B", 32, 1528.93, 608.93),
    ("CodeLlama 34B", 32, 3634.98, 1526.4),
    ("Llama 2 70B", 32, 10407.0, 4488.53),
]
PROMPTS = 131_900  # of DeepSpeed-Chat's tables


@dataclass(frozen=True)
class Recomputed:
    """The estimated phases of one step, and how generation holds the weights."""

    phases: dict[str, PhaseTime]
    generation: str

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())

    @property
    def longest(self) -> str:
        name = max(self.phases, key=lambda phase: self.phases[phase].seconds)
        return f"{name}, {self.phases[name].bound}"


def main() -> int:
    print("\n".join([*deepspeed_chat(), "", *openrlhf()]))
    return 0


def deepspeed_chat() -> list[str]:
    """Returns the table of DeepSpeed-Chat: steps of 1024 prompts of 256 tokens, and 256 new tokens each."""
    lines = [
        "| actor | GPUs | published, h | estimated, h | ratio | weights in generation | longest phase |",
        "|---|---|--:|--:|--:|---|---|",
    ]
    for actor, gpu, gpus, hours in DEEPSPEED_CHAT:
        found = recompute(actor, "OPT-350M", gpu, gpus, 256, 1024, "zero=stage3", "actor.lora.rank=128")
        estimated = found.seconds * PROMPTS / 1024 / 3600
        cells = (actor, f"{gpus} x {gpu}", f"{hours:.3g}", f"{estimated:.3g}", f"{estimated / hours:.2f}")
        lines.append(f"| {' | '.join((*cells, found.generation, found.longest))} |")
    return lines


def openrlhf() -> list[str]:
    """Returns the table of OpenRLHF: a step of 1024 prompts of 1024 tokens, and 1024 new tokens each."""
    lines = [
        "| models | A800s | DeepSpeed-Chat, s | OpenRLHF, s | estimated, s | ratio to each | "
        "weights in generation | longest phase |",
        "|---|--:|--:|--:|--:|---|---|---|",
    ]
    for actor, gpus, chat, other in OPENRLHF:
        found = recompute(actor, actor, "a800", gpus, 1024, 128, "zero=stage3_offload")
        seconds = found.seconds
        cells = (actor, str(gpus), f"{chat:.0f}", f"{other:.0f}", f"{seconds:.0f}")
        ratios = f"{seconds / chat:.2f}, {seconds / other:.2f}"
        lines.append(f"| {' | '.join((*cells, ratios, found.generation, found.longest))} |")
    return lines


def recompute(
    actor: str, other: str, gpu: str, gpus: int, tokens: int, minibatch: int, *more: str
) -> Recomputed:
    """Estimates a step of 1024 prompts and responses of ``tokens`` tokens each, in one epoch.

    ``other`` is the model of the critic and of the reward; the reference has the size of the actor.
    """
    arguments = [
        "actor.model.path=actor",
        "actor.model.gradient_checkpointing=true",
        "reward=function",
        "reward.path=a:b",
        "data.path=prompts",
        f"data.max_prompt_tokens={tokens}",
        f"sampling.max_new_tokens={tokens}",
        "rollout.prompts_per_step=1024",
        "run.steps=1",
        "algo.epochs=1",
        f"algo.minibatch_size={minibatch}",
        *more,
    ]
    config = load_config(arguments, world_size=gpus)
    lora = config.actor.lora
    trained, critic = shape(actor, lora=lora), shape(other, classifier=True)
    reference = (
        None if lora.rank else FrozenModel(shape(actor), 2, True, config.reference.zero.offload_params)
    )
    models = Models(
        trained, critic, reference, {"reward.model.path": FrozenModel(critic, 2, True, False)}, 2 * tokens
    )
    device = GPUS[gpu]
    hardware = Hardware(gpus, int(device.memory_gib * GIB))
    of = partial(estimate, models=models, hardware=hardware, longest_prompt=tokens)
    config = with_numbers(config, resolve(config, of, hardware.usable or 0, True).numbers)
    memory = of(config)
    machine = Machine(device, read_assumptions([], on_gpu=True), gpus, device.per_node, on_gpu=True)
    step = PPOTime(config, machine, memory, models=models, mean_prompt=tokens, longest=tokens)
    return Recomputed(step.phases(), "layer by layer" if memory.layerwise else "whole")


def shape(name: str, classifier: bool = False, lora: LoraConfig | None = None) -> Shape:
    """Returns the shape of a model of MODELS."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
        section = ModelConfig(path=folder)
        return planned_shape(section, classifier=classifier, trained=True, lora=lora, key=name)


if __name__ == "__main__":
    sys.exit(main())
