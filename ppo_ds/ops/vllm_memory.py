"""Memory of a vLLM engine in bytes, on one of the ranks that share its weights by tensor parallelism.

Sharded sizes and the effect of sleeping were read from the code of vLLM 0.32. Sizes of CUDA graphs and
communicators are published figures. Nothing was measured on a GPU with this trainer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ppo_ds.ops.memory import FP32, Shape, kv_cache_bytes

# tokens of the largest block of the KV cache (vLLM's default on a CPU); one block is never used
BLOCK = 128
# Defaults of vLLM on GPUs of at least 70 GiB except the A100, which has 8,192 tokens and 256 sequences
# (engine/arg_utils.py). Both bound the activations of a step.
BATCHED_TOKENS, SEQUENCES = 16_384, 1024
# All captured CUDA graphs. vLLM's pull request 5515 reports 0.6 GiB for Llama 3 70B on 8 GPUs, and its issue
# 47654 1.4 GiB for a larger model on 8 GPUs.
GRAPHS = int(1.5 * 2**30)
# NCCL communicator of a tensor-parallel group: by vLLM's pull requests 46234 and 51485, 0.9 to 1 GiB.
COMMUNICATOR = 2**30


@dataclass(frozen=True)
class VllmMemory:
    """Bytes of a vLLM engine on one rank."""

    weights: int
    kv_cache: int
    activations: int  # at most, of a prefill or of sampling
    kept: int  # CUDA graphs and the communicator, which stay in memory while the engine sleeps

    @property
    def awake(self) -> int:
        """Bytes during generation."""
        return self.weights + self.kv_cache + self.activations + self.kept

    def loading(self, sleep: int, synced: int) -> int:
        """Returns the bytes while new weights arrive, for which ``synced`` further bytes are needed.

        A sleeping engine allocates its KV cache afterwards.
        """
        return self.weights + self.kept + synced + (0 if sleep else self.kv_cache)

    def between(self, sleep: int) -> int:
        """Returns the bytes between two generation phases, by sleep level.

        Levels 1 and 2 free the weights and the KV cache. Level 0 does not sleep and frees neither.
        """
        return self.kept + (0 if sleep else self.weights + self.kv_cache)

    def host(self, sleep: int) -> int:
        """Returns the bytes of CPU memory that the engine takes while it sleeps: level 1 copies weights."""
        return self.weights if sleep == 1 else 0


def sleep_level(setting: int | str, on_gpu: bool) -> int:
    """Resolves rollout.vllm.sleep. The weights are always sent again, so auto frees them on a GPU."""
    if setting == "auto":
        return 2 if on_gpu else 0
    return int(setting)


def kv_heads(shape: Shape) -> int:
    """Returns the number of heads of the keys."""
    return max(1, shape.heads * shape.kv_width // max(1, shape.width))


def parallel_problem(heads: int, keys: int, inner: int, tensor_parallel: int) -> str | None:
    """Returns why vLLM cannot divide a model among this many ranks and which numbers fit; None if it can.

    vLLM divides the attention heads and the ``inner`` neurons of the MLP evenly. The heads of the keys are
    divided too, or repeated if there are fewer of them than ranks.
    """

    def fits(ranks: int) -> bool:
        return not (heads % ranks or inner % ranks or (keys % ranks and ranks % keys))

    if fits(tensor_parallel):
        return None
    smaller = ", ".join(str(ranks) for ranks in range(1, tensor_parallel) if fits(ranks))
    return (
        f"vLLM cannot divide {heads} attention heads, {keys} key-value heads and {inner} neurons of the MLP "
        f"evenly among {tensor_parallel} ranks; use one of {smaller}"
    )


def vllm_weight_bytes(shape: Shape, tensor_parallel: int, each: int) -> int:
    """Computes the weights of one rank. LoRA adapters are merged into them.

    The keys' and values' projections are divided among at most as many ranks as the keys have heads.
    """
    adapters = shape.trained if shape.trained < shape.parameters else 0
    divided = -(-(shape.parameters - adapters) // tensor_parallel)
    keys, projections = kv_heads(shape), 2 * shape.layers * shape.hidden * shape.kv_width
    repeated = projections // keys - projections // tensor_parallel if tensor_parallel > keys else 0
    return each * (divided + repeated)


def vllm_cache_tokens(token_budget: int, longest: int, tensor_parallel: int) -> int:
    """Returns the tokens that each rank of a group brings to the KV cache: its budget, or more.

    A group needs room for one row of ``longest`` tokens at least, without which vLLM does not start.
    """
    least = (-(-longest // BLOCK) + 2) * BLOCK
    return max(token_budget, -(-least // tensor_parallel))


def vllm_cache_bytes(shape: Shape, tokens: int, tensor_parallel: int, each: int) -> int:
    """Computes the share of one rank in the KV cache of a group whose ranks bring ``tokens`` tokens each.

    Each rank has a part of the heads for all tokens of the group. While the keys have at least as many heads
    as the group has ranks, this is as much memory as all heads for the rank's own tokens.
    """
    shards = min(tensor_parallel, kv_heads(shape))
    return kv_cache_bytes(shape, tokens * tensor_parallel, each) // shards


def vllm_activation_bytes(shape: Shape, tensor_parallel: int, each: int, sampled: int) -> int:
    """Computes the peak of a step: a layer of a prefill, or the logits of all sequences while sampling.

    ``sampled`` is the number of bytes per logit that sampling takes beyond the logits
    (ops/memory.py:sampling_bytes). Every rank has the logits of the whole vocabulary.
    """
    layer = 3 * shape.hidden + (3 if shape.gated else 2) * shape.inner // tensor_parallel
    logits = SEQUENCES * shape.vocabulary * (each + FP32 + sampled)
    return max(BATCHED_TOKENS * each * layer, logits)


def vllm_memory(
    shape: Shape,
    *,
    tensor_parallel: int,
    kv_cache: int,
    each: int,
    sampled: int,
    graphs: bool,
    on_gpu: bool,
) -> VllmMemory:
    """Computes the memory of an engine whose KV cache takes ``kv_cache`` bytes of each rank.

    ``graphs`` is whether it records CUDA graphs; for ``sampled`` see vllm_activation_bytes.
    """
    communicator = COMMUNICATOR if on_gpu and tensor_parallel > 1 else 0
    return VllmMemory(
        weights=vllm_weight_bytes(shape, tensor_parallel, each),
        kv_cache=kv_cache,
        activations=vllm_activation_bytes(shape, tensor_parallel, each, sampled),
        kept=(GRAPHS if graphs else 0) + communicator,
    )
