"""Checks the settings of rollout.backend=vllm."""

from __future__ import annotations

from collections.abc import Iterator

from ppo_ds.config.schema import PPOConfig
from ppo_ds.config.text import show
from ppo_ds.rollout.keys import VLLM

TEMPERATURES = (0.01, 2.0)  # vLLM changes lower temperatures and rejects higher temperatures


def check_vllm(config: PPOConfig, ranks: int) -> Iterator[str]:
    """Yields an error line for each setting that vLLM does not support."""
    if not isinstance(config.rollout, VLLM):
        return
    settings = config.rollout.vllm
    # a dry run, which decodes without vLLM, may have fewer ranks
    if ranks % settings.tensor_parallel and not config.run.dry_run:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        yield (
            f"rollout.vllm.tensor_parallel={settings.tensor_parallel}: must divide the number of ranks, "
            f"{ranks}; use one of {fits}"
        )
    if config.actor.zero.generation_gather != "auto":
        yield (
            f"actor.zero.generation_gather={config.actor.zero.generation_gather}: has no effect with "
            "rollout.backend=vllm, which has weights of its own; use auto"
        )
    sampling = config.sampling
    low, high = TEMPERATURES
    if not low <= sampling.temperature <= high:
        yield (
            f"sampling.temperature={sampling.temperature:g}: rollout.backend=vllm supports {low:g} to "
            f"{high:g}; choose a temperature in this range, or another rollout.backend"
        )
    neutral = {"min_new_tokens": 0, "top_k": 0, "top_p": 1.0}
    for name, off in neutral.items():
        if sampling.temperature != 1.0 and getattr(sampling, name) != off:
            yield (
                f"sampling.{name}={show(getattr(sampling, name))}: with rollout.backend=vllm and "
                f"sampling.temperature={sampling.temperature:g}, the log-probs would be those of the "
                f"truncated distribution; use sampling.{name}={show(off)}, sampling.temperature=1 or another "
                "rollout.backend"
            )
