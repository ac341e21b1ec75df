"""Bytes that models take in memory, by arithmetic alone: engines by ZeRO stage, activations, caches.

What DeepSpeed (0.19.8) keeps and what it makes for a moment was read from its code; activations are those that autograd keeps of a decoder as
transformers writes it: norms in fp32, rotary attention by a fused kernel, a gated MLP. Other families are taken for one of these, without the gate
where theirs has none. docs/reliability.md compares the sums with measured runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ppo_ds.ops.flops import Size

FP32 = 4
BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size, in numbers
PREFETCH = 50_000_000  # stage3_prefetch_bucket_size
REUSE = 1_000_000_000  # stage3_max_reuse_distance


@dataclass(frozen=True)
class Shape:
    """What of a model its memory depends on. A tied parameter counts once."""

    parameters: int
    trained: int  # of them: all, or adapters and a score head
    largest: int  # numbers in the largest tensor that is trained
    tensor: int  # and in the largest of all
    head: (
        int  # of the head of a language model, also where it is the input embedding's own; 0 for a classifier
    )
    tied: bool
    vocabulary: int
    layers: int
    hidden: int
    inner: int  # of the MLP; of experts all that one token passes
    gated: bool
    heads: int
    width: int  # of the queries
    kv_width: int  # of the keys
    fused: bool = True  # attention by a kernel that makes no matrix of tokens x tokens
    head_norms: bool = False  # queries and keys are normalised
    makes_logits: bool = False  # something is done to the logits behind the head, so they have to be made
    idle: int = 0  # parameters of experts that a token does not take

    @property
    def size(self) -> Size:
        """As ops/flops.py counts by."""
        embeddings = self.vocabulary * self.hidden * (1 if self.tied or not self.head else 2)
        return Size(
            self.parameters - embeddings, self.head, self.layers, self.width, self.kv_width, self.idle
        )


@dataclass(frozen=True)
class Engine:
    """Bytes of a trained model on one rank. ``host``: what of the resting part is in CPU memory instead."""

    weights: int
    masters: int
    moments: int
    buffers: int  # for gradients, kept between updates
    bucket: int  # allocated in each backward
    gradients: int  # that have come together when the second micro-batch begins, beyond ``buffers``
    last: int  # beyond ``gradients`` and ``bucket``, when the last backward ends and they are reduced
    step: int  # beyond ``gradients``, in the optimizer's step
    gathered: int  # ZeRO-3: weights that are whole at the same time in a forward and backward
    host: int = 0

    @property
    def resting(self) -> int:
        return self.weights + self.masters + self.moments + self.buffers


def trained_engine(
    shape: Shape,
    *,
    stage: int,
    each: int,
    scaled: bool,
    ranks: int,
    offload_optimizer: bool = False,
    offload_params: bool = False,
    bucket: int = BUCKET,
    separate_host: bool = True,
) -> Engine:
    """``each``: bytes of a weight; ``scaled``: fp16. ``separate_host``: a GPU's host; on a CPU what is offloaded is where it was.

    Stage 0 in 16 bits runs as stage 1 (engine/zero.py).
    """
    n, all_of_it, share = shape.trained, shape.parameters, -(-shape.trained // ranks)
    flat, at_once = (
        min(n, bucket),
        min(n, BUCKET),
    )  # what ZeRO copies to reduce it; and DeepSpeed without it, whatever the bucket
    whole = each * all_of_it
    if stage == 0 and each == FP32:
        engine = Engine(whole, 0, 2 * FP32 * n, 0, 0, FP32 * n, FP32 * at_once, 0, 0)
    elif stage < 2 and each < FP32 and not scaled:  # gradients are added up in a whole fp32 copy that stays
        engine = Engine(
            whole, FP32 * share, 2 * FP32 * share, FP32 * n, 0, 0, each * n + FP32 * at_once, 0, 0
        )
    elif stage < 2:
        gradients = FP32 * n + (0 if each == FP32 else each * n)
        engine = Engine(
            whole,
            FP32 * share,
            2 * FP32 * share,
            0,
            FP32 * bucket,
            gradients,
            FP32 * (flat + share),
            FP32 * share,
            0,
        )
    elif stage == 2:
        engine = Engine(
            whole,
            FP32 * share,
            2 * FP32 * share,
            0,
            each * bucket,
            FP32 * share,
            each * (flat + share),
            FP32 * share,
            0,
        )
    else:
        live = each * min(all_of_it, REUSE // 2 + PREFETCH + shape.tensor)
        weights = each * -(-all_of_it // ranks)
        engine = Engine(
            weights,
            FP32 * share,
            2 * FP32 * share,
            FP32 * share + each * bucket,
            0,
            0,
            each * flat,
            FP32 * share,
            live,
        )
    return (
        _offloaded(engine, shape, stage, each, share, offload_optimizer, offload_params)
        if separate_host
        else engine
    )


def _offloaded(
    engine: Engine, shape: Shape, stage: int, each: int, share: int, optimizer: bool, params: bool
) -> Engine:
    """States and this rank's gradients in CPU memory; what a backward and a gather need stays on the device."""
    if optimizer:
        host = engine.masters + engine.moments + (FP32 + each) * share
        buffers = engine.buffers - FP32 * share if stage == 3 else each * shape.largest
        engine = replace(
            engine,
            masters=0,
            moments=0,
            buffers=buffers,
            gradients=0 if stage > 1 else engine.gradients,
            step=0,
            host=host,
        )
    if params:
        engine = replace(engine, weights=0, host=engine.host + engine.weights)
    return engine


def kept_by_layers(shape: Shape, tokens: int, length: int, each: int, checkpointing: bool) -> int:
    """Activations that a forward over ``tokens`` places, in rows of ``length``, leaves for its backward; the head's not among them."""
    norm = (
        3 if each == FP32 else 4 / each + 2
    ) * shape.hidden  # the input in fp32, the normalised state, that times the weight
    if shape.trained < shape.parameters:
        norm -= shape.hidden  # a frozen weight asks for no normalised state
    attention = (
        2 * shape.width + 2 * shape.kv_width + shape.width * FP32 / each / 64
    )  # queries, keys, values, what comes out; sums of rows
    if not shape.fused:
        attention += shape.heads * length * (2 + FP32 / each)
    if shape.head_norms:
        attention += norm / shape.hidden * (shape.width + shape.kv_width)
    mlp = (4 if shape.gated else 2) * shape.inner
    layer = 2 * norm + attention + mlp
    ends = norm + shape.hidden  # the last norm, and the embedding's output
    if not checkpointing:
        return int(tokens * each * (shape.layers * layer + ends))
    # the inputs of all layers, all of one that is computed again, and what its backward makes on the way
    return int(tokens * each * (shape.layers * shape.hidden + layer + ends)) + passing(
        shape, tokens, length, each
    )


def passing(shape: Shape, tokens: int, length: int, each: int) -> int:
    """In the middle of a layer of a forward that keeps nothing: the residual stream, and the MLP's or attention's."""
    mlp = (3 if shape.gated else 2) * shape.inner
    attention = 0 if shape.fused else 4 * shape.heads * length
    return tokens * each * (2 * shape.hidden + max(mlp, attention))


def head_forward(shape: Shape, places: int, each: int, block: int) -> int:
    """Log-probs and entropies of ``places`` states. ``block``: numbers of the logits that are there at the same time (ops/linear_logprobs.py)."""
    states = 2 * places * shape.hidden * each
    if shape.makes_logits:
        return states + places * shape.vocabulary * (each + 2 * FP32)
    return states + 3 * FP32 * min(block, places * shape.vocabulary)


def head_backward(shape: Shape, places: int, each: int, block: int, kept: int) -> int:
    """The same with gradients: states, their fp32 gradient, blocks of logits, the kept ones where there are few, and the weight's own gradient."""
    numbers = places * shape.vocabulary
    states = places * shape.hidden * (3 * each + FP32)
    gradient = each * shape.head if shape.trained == shape.parameters else 0
    if shape.makes_logits:
        return states + numbers * (2 * each + 3 * FP32) + gradient
    return states + gradient + (FP32 * numbers if numbers <= kept else 0) + 4 * FP32 * min(block, numbers)


def cache(shape: Shape, tokens: int, each: int) -> int:
    """Keys and values."""
    return 2 * shape.layers * shape.kv_width * each * tokens


def decoding(
    shape: Shape, *, tokens: int, length: int, rows: int, prefill: int, waiting: bool, each: int
) -> int:
    """The static backend's: ``rows`` answers side by side, ``tokens`` places with their prompts in rows of ``length``.

    ``prefill`` places of prompts are read in one forward, whose keys and values are then copied. The first time that is before there is a cache;
    ``waiting``: more prompts are read later, beside it. A step takes logits in the weights' dtype and three times in fp32, to draw from them.
    """
    slots, read = cache(shape, tokens, each), cache(shape, prefill, each)
    reading = read + passing(shape, prefill, length, each)
    return max(
        slots + rows * shape.vocabulary * (each + 3 * FP32), slots + (reading if waiting else read), reading
    )


def room_to_decode(shape: Shape, tokens: int, rows: int, each: int) -> int:
    """What any backend may take at most, which is what the way of generating is chosen by: the cache; one layer's activations where all of it is
    read at once (four hidden states, three of the MLP's); and a row of logits each, as above."""
    activations = (4 * shape.hidden + 3 * shape.inner) * each
    return cache(shape, tokens, each) + tokens * activations + rows * shape.vocabulary * (each + 3 * FP32)
