"""Computes the memory of models in bytes from their sizes: engines by ZeRO stage, activations, KV caches.

The persistent and temporary buffers of DeepSpeed (0.19.8) were read from its code. Activations are those that
autograd keeps for a decoder of the transformers library: norms in fp32, fused attention, a gated MLP. Other
families are treated like such a decoder, but without a gate if they have none. docs/dev/scaling.md compares
the sums with measured runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppo_ds.compute.sizes import Shape

FP32 = 4
BUCKET = 500_000_000  # reduce_bucket_size of DeepSpeed, in elements
PREFETCH = 50_000_000  # stage3_prefetch_bucket_size
REUSE = 1_000_000_000  # stage3_max_reuse_distance
SUB_GROUP = 1_000_000_000  # sub_group_size, in elements of one rank


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of a trained model on one rank."""

    # resident between phases
    weights: int
    masters: int
    moments: int
    buffers: int = 0  # persistent buffers for gradients
    # temporary
    bucket: int = 0  # allocated in each backward
    gradients: int = 0  # accumulated when the second micro-batch begins, beyond ``buffers``
    # when the last backward ends and gradients are reduced, beyond ``gradients`` and ``bucket``
    reduction: int = 0
    step: int = 0  # in the optimizer step, beyond ``gradients``
    gathered: int = 0  # ZeRO-3: weights that are gathered at once in a forward and backward
    host: int = 0  # upper bound of the resident bytes in CPU memory instead of on the device

    @property
    def resident(self) -> int:
        return self.weights + self.masters + self.moments + self.buffers


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Settings of a DeepSpeed engine that determine its memory.

    Stage 0 in 16 bits runs as stage 1 (engine/zero.py).
    """

    stage: int
    each: int  # bytes of a weight
    communication: int  # bytes of a gradient in the dtype in which ranks sum it (engine/zero.py)
    scaled: bool  # uses loss scaling (fp16)
    ranks: int
    moment: int = FP32  # bytes of each of AdamW's two moments
    offload_optimizer: bool = False
    offload_params: bool = False
    bucket: int = BUCKET  # reduce_bucket_size in elements
    # whether the device has its own memory, as a GPU does; if not, offloading saves nothing
    separate_host: bool = True

    def memory(self, shape: Shape) -> EngineMemory:
        """Computes the memory of the engine of a model."""
        engine, each, share = self._on_device(shape), self.each, -(-shape.trained // self.ranks)
        if not self.separate_host or (self.stage == 0 and each == FP32):  # nothing is offloaded without ZeRO
            return engine
        # offloads the states and this rank's gradients; a backward needs the other gradients on the device
        weights = engine.weights
        if self.offload_optimizer:
            engine = replace(
                engine,
                masters=0,
                moments=0,
                buffers=engine.buffers - FP32 * share if self.stage == 3 else each * shape.largest_trained,
                gradients=0 if self.stage > 1 else engine.gradients,
                step=0,
                host=engine.moments + self._offloaded(share),
            )
        if self.offload_params:
            # DeepSpeed page-locks the weights twice: each tensor, which takes at most twice its size, and all
            # trained tensors together (stage3.py: _create_param_groups_fp16_flat_cpu_memory). torch does not
            # free the memory of the first.
            engine = replace(engine, weights=0, host=engine.host + 2 * weights + locked_bytes(each * share))
        return engine

    def _offloaded(self, share: int) -> int:
        """Computes the CPU memory of offloaded master weights and gradients, ``share`` elements of each.

        ZeRO-3 has two copies of the gradients, one of them split into sub-groups, and does not page-lock the
        master weights (stage3.py: grad_partitions_flat_buffer, initialize_optimizer_states). The other stages
        page-lock the master weights, the gradients, the new weights and, with several micro-batches, the
        gradients of each tensor, which take at most twice their size (stage_1_and_2.py:
        buffer_to_accumulate_to_in_cpu).
        """
        if self.stage == 3:
            whole, rest = divmod(share, SUB_GROUP)
            groups = whole * locked_bytes(FP32 * SUB_GROUP) + locked_bytes(FP32 * rest)
            return FP32 * share + locked_bytes(FP32 * share) + groups
        return 2 * locked_bytes(FP32 * share) + locked_bytes(self.each * share) + 2 * self.each * share

    def _on_device(self, shape: Shape) -> EngineMemory:
        """Computes the memory of the engine if it offloads nothing.

        If gradients are not in the communication dtype, DeepSpeed copies a bucket to this dtype
        (``allreduce_bucket`` in runtime/engine.py and runtime/zero/stage_1_and_2.py). ZeRO-3 keeps its
        persistent bucket in this dtype (runtime/zero/stage3.py).
        """
        each, trained, share = self.each, shape.trained, -(-shape.trained // self.ranks)
        flat = min(trained, self.bucket)  # elements that ZeRO copies in order to reduce them
        weights = shape.weight_bytes(each)
        # bytes per copied fp32 gradient
        copied_fp32 = 0 if self.communication == FP32 else self.communication
        if self.stage == 0 and each == FP32:  # DeepSpeed ignores reduce_bucket_size
            reduction = (FP32 + copied_fp32) * min(trained, BUCKET)
            moments = 2 * self.moment * trained
            return EngineMemory(weights, 0, moments, gradients=FP32 * trained, reduction=reduction)
        engine = EngineMemory(weights, masters=FP32 * share, moments=2 * self.moment * share)
        # a persistent fp32 buffer accumulates the gradients of all trained parameters
        if self.stage < 2 and each < FP32 and not self.scaled:
            reduction = each * trained + FP32 * min(trained, BUCKET)
            return replace(engine, buffers=FP32 * trained, reduction=reduction)
        engine = replace(engine, step=FP32 * share)
        if self.stage < 2:
            return replace(
                engine,
                bucket=FP32 * self.bucket,
                gradients=FP32 * trained + (0 if each == FP32 else each * trained),
                reduction=FP32 * (flat + share) + copied_fp32 * flat,
            )
        if self.stage == 2:
            copied = 0 if self.communication == each else self.communication
            return replace(
                engine,
                bucket=each * self.bucket,
                gradients=FP32 * share,
                reduction=each * (flat + share) + copied * flat,
            )
        return replace(
            engine,
            weights=each * -(-shape.parameters // self.ranks),
            buffers=FP32 * share + self.communication * self.bucket,
            reduction=self.communication * flat,
            gathered=each * min(shape.parameters, REUSE // 2 + PREFETCH + shape.largest_tensor),
        )


def locked_bytes(size: int) -> int:
    """Returns the bytes that torch allocates for a page-locked tensor of ``size``: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


def activation_bytes(shape: Shape, tokens: int, length: int, each: int, checkpointing: bool) -> int:
    """Computes the activations that a forward keeps for its backward, except those of the head.

    The ``tokens`` include padding and are in rows of ``length``; an activation has ``each`` bytes.
    """
    # the input in fp32, the normalised state, and its product with the weight
    norm = (3 if each == FP32 else 4 / each + 2) * shape.hidden
    if shape.trained < shape.parameters:
        norm -= shape.hidden  # a frozen weight needs no normalised state
    # queries, keys, values and output; row sums of the softmax
    attention = 2 * shape.width + 2 * shape.kv_width + shape.width * FP32 / each / 64
    if not shape.fused:
        attention += shape.heads * length * (2 + FP32 / each)
    if shape.head_norms:
        attention += norm / shape.hidden * (shape.width + shape.kv_width)
    mlp = (4 if shape.gated else 2) * shape.inner
    layer = 2 * norm + attention + mlp
    ends = norm + shape.hidden  # the last norm, and the output of the embedding
    if not checkpointing:
        return int(tokens * each * (shape.layers * layer + ends))
    # the inputs of all layers, all activations of the layer being recomputed, and the temporaries of its
    # backward
    kept = int(tokens * each * (shape.layers * shape.hidden + layer + ends))
    return kept + inference_activation_bytes(shape, tokens, length, each)


def inference_activation_bytes(shape: Shape, tokens: int, length: int, each: int) -> int:
    """Computes a layer's peak without gradients: residual stream, and the larger of MLP and attention."""
    mlp = (3 if shape.gated else 2) * shape.inner
    attention = 0 if shape.fused else 4 * shape.heads * length
    return tokens * each * (2 * shape.hidden + max(mlp, attention))


def output_bytes(each: int, on_gpu: bool) -> int:
    """Returns the bytes per logit of a causal LM. On a GPU, logits are in fp32 (models/lm_head.py)."""
    return FP32 if on_gpu else each


def sampling_bytes(top_k: int, top_p: float) -> int:
    """Returns the peak bytes per logit of sampling, without the logits themselves (ops/token_sampling.py).

    Without filters these are fp32 copies of the logits, their log-probs, and the probabilities or a padded
    copy. ``top_k`` > 1 also needs filtered logits and a mask; 1 is greedy. ``top_p`` < 1 also needs sorted
    logits, their softmax, the running sum of the softmax, and the order of the logits in int64. Workspaces of
    the kernels, such as those of a sort on a GPU, are not counted.
    """
    filtered = FP32 + 1 if top_k > 1 else 0
    ordered = 3 * FP32 + 8 if top_p < 1.0 else 0
    return 3 * FP32 + filtered + ordered


def logit_bytes(each: int, on_gpu: bool, top_k: int, top_p: float) -> int:
    """Returns the bytes per logit of a decode step, for the model's output and for sampling."""
    return output_bytes(each, on_gpu) + sampling_bytes(top_k, top_p)


def head_forward_bytes(shape: Shape, positions: int, each: int, output: int, block: int) -> int:
    """Computes the memory for the log-probs and entropies of ``positions`` hidden states.

    ``output`` is the number of bytes per logit of the model's output (``output_bytes``). ``block`` is the
    number of logits that are in memory at the same time (compute/linear_logprobs.py).
    """
    states = 2 * positions * shape.hidden * each
    if shape.makes_logits:
        return states + positions * shape.vocabulary * (output + 2 * FP32)
    return states + 3 * FP32 * min(block, positions * shape.vocabulary)


def head_backward_bytes(shape: Shape, positions: int, each: int, output: int, block: int, kept: int) -> int:
    """Computes the memory of the head's forward and backward; see head_forward_bytes for ``output``.

    It includes the hidden states, their fp32 gradient, blocks of logits (or all logits if shape.makes_logits)
    and the gradient of the weight, if it is trained. If there are at most ``kept`` logits, all of them are
    also kept for the backward.
    """
    logits = positions * shape.vocabulary
    states = positions * shape.hidden * (3 * each + FP32)
    gradient = each * shape.head if shape.trained == shape.parameters else 0
    if shape.makes_logits:
        return states + logits * (2 * output + 3 * FP32) + gradient
    return states + gradient + (FP32 * logits if logits <= kept else 0) + 4 * FP32 * min(block, logits)


def kv_cache_bytes(shape: Shape, tokens: int, each: int) -> int:
    return 2 * shape.layers * shape.kv_width * each * tokens


def static_decode_bytes(
    shape: Shape,
    *,
    tokens: int,
    length: int,
    rows: int,
    prefill: int,
    waiting: bool,
    each: int,
    logit: int,
    recorded: bool,
) -> int:
    """Computes the peak memory of the static decode backend, without the weights.

    Args:
        tokens: Cached positions, prompts included.
        length: Cached positions of one row.
        rows: Rows that are decoded at the same time.
        prefill: Prompt positions of one forward, whose keys and values are then copied to the cache. The
            first prefill runs before the cache is allocated.
        waiting: True if more prompts are prefilled after the cache is allocated.
        logit: Bytes per logit of a decode step (logit_bytes).
        recorded: True if steps are CUDA graphs. Their pool keeps the logits of a step. The first step of a
            later shape needs a second set of logits outside of the pool (rollout/graphs.py).
    """
    slots, prompt_cache = kv_cache_bytes(shape, tokens, each), kv_cache_bytes(shape, prefill, each)
    prefilling = prompt_cache + inference_activation_bytes(shape, prefill, length, each)
    logits = rows * shape.vocabulary * logit
    pool = logits if recorded else 0
    return max(slots + pool + logits, slots + (pool + prefilling if waiting else prompt_cache), prefilling)


def decode_bytes_bound(
    shape: Shape,
    tokens: int,
    rows: int,
    each: int,
    logit: int,
    prefill: int | None = None,
    recorded: bool = False,
) -> int:
    """Computes an upper bound of the memory of decoding, used to choose the generation plan.

    It includes the KV cache of ``tokens`` positions, the prefill of ``prefill`` tokens, and the logits of
    ``rows`` sequences. If ``prefill`` is None, all tokens are prefilled at once, which is an upper bound for
    any backend. Otherwise keys and values of the prefilled tokens are in memory twice, as in the static
    backend. See static_decode_bytes for ``logit`` and ``recorded``.

    A prefill needs the activations of one layer: four hidden states and three MLP states.
    """
    activations = (4 * shape.hidden + 3 * shape.inner) * each
    logits = rows * shape.vocabulary * logit * (2 if recorded else 1)
    if prefill is None:
        return kv_cache_bytes(shape, tokens, each) + tokens * activations + logits
    return kv_cache_bytes(shape, tokens + prefill, each) + prefill * activations + logits
