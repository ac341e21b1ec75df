"""Computes the bytes of a vLLM engine on one of the ranks that share its weights by tensor parallelism.

Sharded sizes and the effect of sleeping were read from the code of vLLM 0.32. Sizes of CUDA graphs and
communicators are published figures. Nothing was measured on a GPU with this trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_ds.compute.sizes import Shape
from ppo_ds.config.schema import PPOConfig
from ppo_ds.engine.gather import GATHER_ELEMENTS
from ppo_ds.planning.model_memory import FP32, kv_cache_bytes, sampling_bytes
from ppo_ds.rollout.keys import VLLM
from ppo_ds.rollout.vllm_support import slot_rank

GIB = 2**30

# tokens of the largest block of the KV cache (vLLM's default on a CPU); one block is never used
BLOCK = 128
# Defaults of vLLM on GPUs of at least 70 GiB, except the A100 (8,192 tokens and 256 sequences;
# engine/arg_utils.py). Both limit the activations of a step.
BATCHED_TOKENS, SEQUENCES = 16_384, 1024
# All captured CUDA graphs. vLLM's pull request 5515 reports 0.6 GiB for Llama 3 70B on 8 GPUs, and its issue
# 47654 1.4 GiB for a larger model on 8 GPUs.
GRAPHS = int(1.5 * 2**30)
# NCCL communicator of a tensor-parallel group: 0.9 to 1 GiB according to vLLM's pull requests 46234 and
# 51485.
COMMUNICATOR = 2**30


@dataclass(frozen=True)
class VllmMemory:
    """Bytes of a vLLM engine on one rank."""

    weights: int
    kv_cache: int
    activations: int  # upper bound, of a prefill or of sampling
    kept: int  # CUDA graphs and the communicator, which stay in memory while the engine sleeps
    group: int = 1  # ranks that share the weights
    sleep: int = 0  # level between two generation phases, see VLLMConfig
    eager: bool = False  # decodes without CUDA graphs

    @property
    def awake(self) -> int:
        """Bytes during generation."""
        return self.weights + self.kv_cache + self.activations + self.kept

    def loading(self, synced: int) -> int:
        """Returns the bytes while the engine receives new weights, which needs ``synced`` additional bytes.

        If the engine sleeps between phases, the KV cache is not counted, since it is allocated afterwards.
        """
        return self.weights + self.kept + synced + (0 if self.sleep else self.kv_cache)

    @property
    def between(self) -> int:
        """Bytes between two generation phases: sleep levels 1 and 2 free the weights and the KV cache."""
        return self.kept + (0 if self.sleep else self.weights + self.kv_cache)

    @property
    def host(self) -> int:
        """Bytes of CPU memory of a sleeping engine: level 1 copies the weights there."""
        return self.weights if self.sleep == 1 else 0


def kv_heads(shape: Shape) -> int:
    """Returns the number of key heads."""
    return max(1, shape.heads * shape.kv_width // max(1, shape.width))


def vllm_weight_bytes(shape: Shape, tensor_parallel: int, each: int) -> int:
    """Computes the weights of one rank without LoRA adapters.

    The projections of keys and values are divided among at most as many ranks as there are key heads.
    """
    adapters = shape.trained if shape.trained < shape.parameters else 0
    divided = -(-(shape.parameters - adapters) // tensor_parallel)
    keys, projections = kv_heads(shape), 2 * shape.layers * shape.hidden * shape.kv_width
    repeated = projections // keys - projections // tensor_parallel if tensor_parallel > keys else 0
    return each * (divided + repeated)


def vllm_cache_tokens(token_budget: int, longest: int, tensor_parallel: int) -> int:
    """Returns a rank's part of its group's KV cache in tokens: the budget, or more if that is too little.

    vLLM starts only if the cache of a group has room for at least one row of ``longest`` tokens.
    """
    least = (-(-longest // BLOCK) + 2) * BLOCK
    return max(token_budget, -(-least // tensor_parallel))


def vllm_cache_bytes(shape: Shape, tokens: int, tensor_parallel: int, each: int) -> int:
    """Computes one rank's share of the KV cache of a group in which each rank adds ``tokens`` tokens.

    Each rank has a part of the heads for all tokens of the group. If there are at least as many key heads as
    ranks, this takes as much memory as all heads for the rank's tokens.
    """
    shards = min(tensor_parallel, kv_heads(shape))
    return kv_cache_bytes(shape, tokens * tensor_parallel, each) // shards


def vllm_activation_bytes(shape: Shape, tensor_parallel: int, each: int, sampled: int) -> int:
    """Computes the peak of a step: a layer of a prefill, or the logits of all sequences while sampling.

    ``sampled`` is the number of bytes per logit that sampling takes in addition to the logits
    (sampling_bytes). Every rank has the logits of the whole vocabulary. vLLM's second model runner has a
    count of each token for each sequence (v1/worker/gpu/sample/penalties.py), and one fp32 copy of the
    logits. The counts and this copy take less than ``sampled``.
    """
    layer = 3 * shape.hidden + (3 if shape.gated else 2) * shape.inner // tensor_parallel
    logits = SEQUENCES * shape.vocabulary * (each + FP32 + sampled)
    counts = SEQUENCES * shape.vocabulary * FP32
    return max(BATCHED_TOKENS * each * layer + counts, logits)


def engine_memory(
    config: PPOConfig, shape: Shape, each: int, longest: int, on_gpu: bool
) -> VllmMemory | None:
    """Computes the memory of the engine; None if the decode backend has none.

    ``shape`` is the actor's, with ``each`` bytes per weight. The longest prompt and its response together
    have ``longest`` tokens.
    """
    rollout, sampling = config.rollout, config.sampling
    if not isinstance(rollout, VLLM):
        return None
    settings, group = rollout.vllm, rollout.vllm.tensor_parallel
    if settings.kv_cache_gb is not None:
        cache = int(settings.kv_cache_gb * GIB)
    else:
        tokens = vllm_cache_tokens(int(config.memory.rollout_tokens), longest, group)
        cache = vllm_cache_bytes(shape, tokens, group, each)
    rank = config.actor.lora.rank
    adapters = each * shape.trained * (slot_rank(rank) or 0) // rank if rank else 0
    graphs = GRAPHS if on_gpu and not settings.enforce_eager else 0
    return VllmMemory(
        weights=vllm_weight_bytes(shape, group, each) + adapters,
        kv_cache=cache,
        activations=vllm_activation_bytes(shape, group, each, sampling_bytes(sampling.top_k, sampling.top_p)),
        kept=graphs + (COMMUNICATOR if on_gpu and group > 1 else 0),
        group=group,
        sleep=settings.sleep_level(on_gpu, lora=rank > 0),
        eager=settings.enforce_eager,
    )


def synced_bytes(shape: Shape, each: int, sharded: bool) -> int:
    """Computes the peak bytes of a transfer of all weights to the engine, without the engine's memory.

    Weights are copied layer by layer (HybridActor.weights). If they are ``sharded``, they are also gathered.
    The engine keeps the embedding until it receives the next weight. Adapters are merged in fp32.
    """
    copies, layer = 2 if sharded else 1, shape.body // shape.layers
    merging = FP32 * shape.hidden * shape.inner if shape.trained < shape.parameters else 0
    first_layer = each * (shape.largest_tensor + copies * layer) + merging
    chunk = min(shape.parameters, GATHER_ELEMENTS + max(shape.largest_tensor, layer))
    return max(first_layer, copies * each * chunk)
