"""Memory that the inference engine of rollout.backend=vllm takes on each rank."""

from __future__ import annotations

from ppo_ds.config.schema import Config
from ppo_ds.engine.gather import GATHER_ELEMENTS
from ppo_ds.ops.memory import Shape, sampling_bytes
from ppo_ds.ops.vllm_memory import (
    VllmMemory,
    sleep_level,
    vllm_cache_bytes,
    vllm_cache_tokens,
    vllm_memory,
)

GIB = 2**30


def engine_memory(config: Config, shape: Shape, each: int, longest: int, on_gpu: bool) -> VllmMemory | None:
    """Computes the memory of the engine; None if the decode backend has none.

    Args:
        shape: The shape of the actor.
        each: Bytes per weight.
        longest: Tokens of the longest prompt with its response.
    """
    settings, sampling = config.rollout.vllm, config.sampling
    if config.rollout.backend != "vllm":
        return None
    group = settings.tensor_parallel
    if settings.kv_cache_gb is not None:
        cache = int(settings.kv_cache_gb * GIB)
    else:
        tokens = vllm_cache_tokens(int(config.memory.rollout_tokens), longest, group)
        cache = vllm_cache_bytes(shape, tokens, group, each)
    return vllm_memory(
        shape,
        tensor_parallel=group,
        kv_cache=cache,
        each=each,
        sampled=sampling_bytes(sampling.top_k, sampling.top_p),
        graphs=on_gpu and not settings.enforce_eager,
        on_gpu=on_gpu,
    )


def synced_bytes(shape: Shape, each: int, sharded: bool) -> int:
    """Computes what a transfer of all weights to the engine takes at its peak, besides the engine.

    Weights are copied layer by layer (HybridActor.weights). If they are ``sharded``, they are also gathered.
    """
    largest = max(shape.largest_tensor, shape.size.body // shape.layers)
    return (2 if sharded else 1) * each * min(shape.parameters, GATHER_ELEMENTS + largest)


def asleep(config: Config, on_gpu: bool) -> int:
    """Returns the sleep level of the engine between two generation phases."""
    return sleep_level(config.rollout.vllm.sleep, on_gpu)
