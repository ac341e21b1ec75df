"""Computes the table of docs/dev/scaling.md: python -m tests.tools.scaling_rows prints it.

The models are folders with the sizes of those on the Hub (tests/support/hub_models.py), so that no network is
needed; with network, launch/doctor.py prints the same numbers for the same command line.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

from ppo_ds.config.schema import Config, reward_models
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.planning.budgets import resolve, with_numbers
from ppo_ds.planning.ppo_memory import Models, estimate
from ppo_ds.planning.run_memory import Hardware
from ppo_ds.tools.doctor.gpus import GPUS
from ppo_ds.tools.doctor.model_shapes import plan_models
from ppo_ds.tools.doctor.report import Report
from ppo_ds.tools.doctor.step_time import Machine, PhaseTime, PPOTime, read_assumptions
from tests.config.commands import compose
from tests.support.hub_models import hub_folders

GIB = 2**30
LORA = ("actor.lora.rank=64", "critic.lora.rank=64")
VLLM = ("rollout.backend=vllm", "rollout.vllm.tensor_parallel=8")
# experiment, number of GPUs, what it changes
ROWS: list[tuple[str, int, tuple[str, ...]]] = [
    ("rlhf", 1, ("zero=stage1",)),
    ("rlhf", 8, ("zero=stage1", "rollout.prompts_per_step=256")),
    ("rlhf", 8, ("zero=stage3", "rollout.prompts_per_step=256")),
    ("rlhf", 64, ("zero=stage1", "rollout.prompts_per_step=1024")),
    ("rlhf", 512, ("zero=stage1", "rollout.prompts_per_step=4096")),
    ("rlhf_7b", 1, ("zero=stage2", *LORA)),
    ("rlhf_7b", 8, ()),
    ("rlhf_7b", 64, ("rollout.prompts_per_step=1024",)),
    ("rlhf_7b", 512, ("rollout.prompts_per_step=4096",)),
    ("rlhf_70b_lora", 8, ()),
    ("rlhf_70b_lora", 8, ("rollout.backend=auto", "rollout.vllm.tensor_parallel=1")),
    ("rlhf_70b", 64, ()),
    ("rlhf_70b", 64, VLLM),
    ("rlhf_70b", 512, ("rollout.prompts_per_step=4096",)),
]


def planned(
    experiment: str, gpus: int, more: tuple[str, ...], folders: dict[str, str]
) -> tuple[Config, Models]:
    """Returns the config of an experiment, and the shapes of its models."""
    arguments = [f"+experiment={experiment}", *more]
    config = compose(*arguments, ranks=gpus)
    models = {"actor.model": config.actor.model.path}
    models |= {} if config.critic.model.path is None else {"critic.model": config.critic.model.path}
    models |= {key: model["path"] for key, model in reward_models(config.reward)}
    paths = [f"{key}.path={folders[path]}" for key, path in models.items()]
    config, report = compose(*arguments, *paths, ranks=gpus), Report()
    shapes = plan_models(config, load_tokenizer(config.actor.model.path, key="actor.model.path"), report)
    assert shapes is not None, report.lines
    return config, shapes


def phases_of(config: Config, models: Models, gpus: int) -> tuple[dict[str, PhaseTime], float]:
    """Returns the phases of a step on H100s, and the peak memory of a GPU in GiB."""
    device, longest = GPUS["h100"], config.data.max_prompt_tokens
    hardware = Hardware(gpus, int(device.memory_gib * GIB))
    of = partial(estimate, models=models, hardware=hardware, longest_prompt=longest)
    config = with_numbers(config, resolve(config, of, hardware.usable or 0, True).numbers)
    memory = of(config)
    machine = Machine(
        device, read_assumptions([], on_gpu=True), gpus, min(gpus, device.per_node), on_gpu=True
    )
    step = PPOTime(config, machine, memory, models=models, mean_prompt=longest, longest=longest)
    return step.phases(), memory.peak / GIB


def rows(folders: dict[str, str]) -> list[str]:
    """Returns the rows of the table."""
    lines = []
    for experiment, gpus, more in ROWS:
        config, models = planned(experiment, gpus, more, folders)
        phases, peak = phases_of(config, models, gpus)
        step = sum(phase.seconds for phase in phases.values())
        generate = phases["generate"].seconds
        name = max(phases, key=lambda phase: phases[phase].seconds)
        changed = f" {' '.join(more)}" if more else ""
        usable = Hardware(gpus, int(GPUS["h100"].memory_gib * GIB)).usable
        assert usable is not None
        fits = "" if peak <= usable / GIB else ", too much"
        lines.append(
            f"| `{experiment}{changed}` | {gpus} | {config.actor.zero.stage} | {peak:.0f}{fits} | "
            f"{generate:.1f} | {step - generate:.1f} | {config.rollout.prompts_per_step / step / gpus:.2f} | "
            f"{name}, {phases[name].bound} |"
        )
    return lines


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        print("\n".join(rows(hub_folders(Path(root)))))
    sys.exit(0)
