"""Tests the doctor: hand-computed and measured memory, suggestions, messages, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from launch import doctor
from ppo_ds.compute import matmul
from ppo_ds.compute.linear_logprobs import GPU_BLOCK, KEPT
from ppo_ds.config.schema import Config
from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.models import tiny
from ppo_ds.models.lora import add_adapters
from ppo_ds.models.size import planned_shape, shape_of
from ppo_ds.models.tokenizer import load_tokenizer
from ppo_ds.ops.token_sampling import draw
from ppo_ds.planning.budgets import with_cpu_limits
from ppo_ds.planning.finetune_memory import FinetuneMemory
from ppo_ds.planning.model_memory import (
    Engine,
    EngineMemory,
    Shape,
    activation_bytes,
    decode_bytes_bound,
    head_backward_bytes,
    head_forward_bytes,
    inference_activation_bytes,
    output_bytes,
    sampling_bytes,
    static_decode_bytes,
)
from ppo_ds.planning.ppo_memory import Models, PPOMemory, estimate
from ppo_ds.planning.run_memory import Estimate, FrozenModel, Hardware, RunMemory
from ppo_ds.planning.vllm_memory import COMMUNICATOR, GRAPHS
from ppo_ds.rollout import vllm_support
from ppo_ds.tools.doctor.cluster import Cluster
from ppo_ds.tools.doctor.finetune import plan_finetuning
from ppo_ds.tools.doctor.model_shapes import plan_models
from ppo_ds.tools.doctor.ppo import plan_ppo
from ppo_ds.tools.doctor.report import Report, check_host
from ppo_ds.tools.doctor.suggest import format_settings, suggest_reductions, with_setting, with_settings
from tests.config.commands import MINIMAL, compose

WORKER = Path(__file__).with_name("memory_worker.py")
ROOT = Path(__file__).parents[2]
GIB = 2**30
# two layers and 1000 parameters, of which the head has 100
LAYERS = {"layers": 2, "width": 4, "kv_width": 2, "heads": 2, "inner": 12, "gated": True}
SIZES = {"head": 100, "vocabulary": 20, "hidden": 5, "largest_trained": 100, "largest_tensor": 100} | LAYERS
SMALL = Shape(body=800, parameters=1000, trained=1000, **SIZES)
BIG = Shape(
    body=8 * 10**8,
    parameters=10**9,
    trained=10**9,
    largest_trained=10**8,
    largest_tensor=10**8,
    head=10**8,
    vocabulary=10**5,
    layers=10,
    hidden=1000,
    inner=4000,
    gated=True,
    heads=10,
    width=1000,
    kv_width=1000,
)
CRITIC = replace(SMALL, head=0)
ADAPTED = Shape(body=900, parameters=1100, trained=100, **SIZES | {"largest_trained": 10})


def engine(shape: Shape = SMALL, stage: int = 2, each: int = 2, ranks: int = 4, **more: bool) -> EngineMemory:
    settings = Engine(
        stage=stage, each=each, communication=each, scaled=False, ranks=ranks, bucket=400, **more
    )
    return settings.memory(shape)


# Master weights, each of the two moments, and gradients take 4 bytes per parameter in fp32. With a quarter of
# them, each of four ranks has 1000 bytes of master weights, 2000 of moments and 1000 of gradients.
@pytest.mark.parametrize(
    ("found", "weights", "masters", "moments", "buffers", "update", "host"),
    [
        (engine(stage=0, each=4), 4000, 0, 8000, 0, 4000, 0),
        (engine(stage=0), 2000, 1000, 2000, 4000, 0, 0),  # the same as stage 1
        (engine(stage=1), 2000, 1000, 2000, 4000, 0, 0),  # all gradients in fp32, always allocated
        (engine(stage=1, each=4), 4000, 1000, 2000, 0, 4000 + 4 * 400, 0),  # all gradients, and a bucket
        (engine(stage=2), 2000, 1000, 2000, 0, 1000 + 2 * 400, 0),
        (engine(stage=3), 500, 1000, 2000, 1000 + 2 * 400, 0, 0),
        (engine(stage=3, each=4), 1000, 1000, 2000, 1000 + 4 * 400, 0, 0),
        # Offloaded: the host has moments, and page-locked, each in 2^n bytes: master weights, gradients and
        # the new weights in 16 bits, and at most twice the gradients in 16 bits of single tensors; the device
        # has a buffer for one tensor.
        (engine(stage=2, offload_optimizer=True), 2000, 0, 0, 200, 800, 2000 + 2 * 1024 + 512 + 2 * 500),
        # moments and master weights, gradients twice in 2^10 bytes; weights twice, and in 2^9 bytes
        (
            engine(stage=3, offload_optimizer=True, offload_params=True),
            *(0, 0, 0, 800, 0),
            2000 + 1000 + 2 * 1024 + 2 * 500 + 512,
        ),
        # on a CPU, offloaded states are in the same memory
        (engine(stage=2, offload_optimizer=True, separate_host=False), 2000, 1000, 2000, 0, 1000 + 800, 0),
        # adapters: 1100 weights, of which 100 are trained and have gradients and optimizer states
        (engine(ADAPTED, stage=0, each=4), 4400, 0, 800, 0, 400, 0),
        (engine(ADAPTED, stage=2), 2200, 100, 200, 0, 100 + 2 * 400, 0),
        (engine(ADAPTED, stage=3), 550, 100, 200, 100 + 2 * 400, 0, 0),
        (engine(ADAPTED, stage=2, offload_optimizer=True), 2200, 0, 0, 20, 800, 200 + 2 * 128 + 64 + 2 * 50),
    ],
)
def test_engine_memory_by_zero_stage(
    found: EngineMemory, weights: int, masters: int, moments: int, buffers: int, update: int, host: int
) -> None:
    resident = (found.weights, found.masters, found.moments, found.buffers)
    assert resident == (weights, masters, moments, buffers)
    assert (found.gradients + found.bucket, found.host) == (update, host)


def test_logits_by_hand() -> None:
    # logits, fp32 copies, log-probs, probabilities; on a GPU, logits of 16-bit weights are in fp32 too
    assert [output_bytes(each, on_gpu) for each in (2, 4) for on_gpu in (False, True)] == [2, 4, 4, 4]
    assert sampling_bytes(0, 1.0) == sampling_bytes(1, 1.0) == 12
    # Filtered logits and a mask. For top_p, the copy, log-probs, logits / temperature, sorted logits, their
    # softmax and its running sum in fp32, and the order in int64.
    assert (sampling_bytes(50, 1.0), sampling_bytes(0, 0.9)) == (12 + 5, 6 * 4 + 8)
    by_hand = 24 * 16 + 3 * 20 * 36  # 24 tokens of 16 bytes in the cache; 20 logits of each of 3 rows
    arguments = {"tokens": 24, "length": 8, "rows": 3, "prefill": 4, "waiting": False, "each": 2}
    logits = {"logit": output_bytes(2, True) + 32}
    assert static_decode_bytes(SMALL, **arguments, **logits, recorded=False) == by_hand
    # the pool of the graphs has logits of its own, also while the next prompts are prefilled
    assert static_decode_bytes(SMALL, **arguments, **logits, recorded=True) == by_hand + 3 * 20 * 36
    waiting = arguments | {"waiting": True, "prefill": 400}
    prefilled, kept = (static_decode_bytes(SMALL, **waiting, **logits, recorded=i) for i in (False, True))
    assert prefilled > by_hand and kept - prefilled == 3 * 20 * 36
    with_prefill, without = (decode_bytes_bound(SMALL, 24, 3, 2, logit) for logit in (36, 0))
    assert with_prefill - without == 3 * 20 * 36
    assert decode_bytes_bound(SMALL, 24, 3, 2, 36, recorded=True) - with_prefill == 3 * 20 * 36
    # models that make logits hold them once in their own dtype and twice in fp32 in a forward; in a backward
    # they and their gradient, and three times in fp32
    capped = replace(SMALL, makes_logits=True)
    forwards = [head_forward_bytes(capped, 10, 2, output, GPU_BLOCK) for output in (2, 4)]
    assert forwards == [2 * 10 * 5 * 2 + 10 * 20 * 10, 2 * 10 * 5 * 2 + 10 * 20 * 12]
    backwards = [head_backward_bytes(capped, 10, 2, output, GPU_BLOCK, KEPT) for output in (2, 4)]
    assert backwards == [10 * 5 * 10 + 10 * 20 * each + 2 * 100 for each in (16, 20)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.9), (3, 0.9)])
def test_sampling_takes_at_most_the_estimated_bytes(dtype: torch.dtype, top_k: int, top_p: float) -> None:
    logits = torch.randn(64, 4096).to(dtype)
    uniforms = torch.rand(64, dtype=torch.float64)
    with torch.profiler.profile(profile_memory=True) as profile:
        draw(logits, uniforms, temperature=0.9, top_k=top_k, top_p=top_p)
    peak = held = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    allowed = sampling_bytes(top_k, top_p) * logits.numel()
    assert 0.6 * allowed < peak < 1.1 * allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "adapters"])
def test_activations_are_those_that_autograd_keeps(kind: str, dtype: torch.dtype) -> None:
    common = dict(vocab_size=50, hidden_size=64, intermediate_size=176, num_hidden_layers=6)
    common |= dict(num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**common))
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(**common, head_dim=16))
    model = model.to(dtype)
    if kind == "adapters":
        add_adapters(model, rank=2, alpha=1.0, targets=None, seed=0, key="actor.lora")
    each = dtype.itemsize
    ids = torch.arange(512).view(4, 128) % 50
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            kept[tensor.untyped_storage().data_ptr()] = tensor  # kept alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model(input_ids=ids, use_cache=False)
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert activation_bytes(shape_of(model), 512, 128, each, False) == pytest.approx(found, rel=0.1)


# -- memory by role and phase


def test_the_estimate_counts_fp32_logits_on_a_gpu_and_the_filters_of_sampling() -> None:
    def memory(gpu_memory: int | None, *arguments: str) -> RunMemory:
        shapes = {"actor": replace(SMALL, makes_logits=True)}
        return RunMemory(plan(*arguments), Hardware(1, gpu_memory), shapes, {}, length=10, rows=1)

    # 10 positions with 20 logits in bf16; a forward has them once, a backward with their gradient
    gpu, cpu = memory(80 * GIB), memory(None)
    shape = gpu.shapes["actor"]
    assert gpu.forward(shape, 10, 10, 2) - cpu.forward(shape, 10, 10, 2) == 10 * 20 * 2
    checked = "actor.deepspeed.zero_optimization.reduce_bucket_size=400", "actor.zero.stage=3"
    gpu, cpu = memory(80 * GIB, *checked), memory(None, *checked)
    assert gpu.backward("actor") - cpu.backward("actor") == 10 * 20 * 2 * 2
    # decoding needs most memory for its million logits per row
    wide = Models(replace(SMALL, vocabulary=10**6), None, None, {}, 0)
    plain, ordered, filtered = (
        estimate(plan(f"sampling.top_p={top_p}", f"sampling.top_k={top_k}"), wide, GPU).phases["generate"]
        for top_p, top_k in ((1.0, 0), (0.9, 0), (1.0, 50))
    )
    rows = (filtered - plain) // (5 * 10**6)
    assert rows > 0 and (filtered - plain, ordered - plain) == (rows * 5 * 10**6, rows * 20 * 10**6)


@pytest.mark.parametrize(
    ("ranks", "own", "bytes_each"),
    [(64, "", 2), (65, "", 4), (64, "fp32", 4), (65, "bf16", 2), (65, "FP16", 2)],
)
def test_buckets_have_the_dtype_of_the_communication(ranks: int, own: str, bytes_each: int) -> None:
    """Above 64 ranks, gradients are summed in fp32; 65 ranks have at most 16 of 1000 parameters each."""
    raw = [f"actor.deepspeed.communication_data_type={own}"] if own else []
    raw.append("actor.deepspeed.zero_optimization.reduce_bucket_size=400")
    found = {}
    for stage, dtype in ((1, "fp16"), (2, "bf16"), (3, "bf16")):
        config = plan(f"actor.zero.stage={stage}", *raw, f"actor.model.dtype={dtype}")
        memory = RunMemory(config, Hardware(ranks, 80 * GIB), {"actor": SMALL}, {}, length=10, rows=1)
        found[stage] = memory.engines["actor"]
    # fp32 gradients, copied into a 16-bit bucket: 400 flattened elements, 16 of this rank, 400 copied
    assert found[1].reduction == 4 * (400 + 16) + (2 * 400 if bytes_each == 2 else 0)
    # 16-bit gradients, copied into an fp32 bucket
    assert found[2].reduction == 2 * (400 + 16) + (4 * 400 if bytes_each == 4 else 0)
    assert (found[3].buffers, found[3].reduction) == (4 * 16 + bytes_each * 400, bytes_each * 400)


GPU = Hardware(4, 80 * GIB)


def plan(*arguments: str) -> Config:
    return with_cpu_limits(compose(*MINIMAL, "actor.model.dtype=bf16", *arguments))


def models(config: Config, critic: Shape | None = SMALL) -> Models:
    return Models(SMALL, critic, FrozenModel(SMALL, 2, False, config.reference.zero.offload_params), {}, 100)


def test_large_gradients_are_page_locked_by_sub_groups() -> None:
    # 2.5 x 10^9 elements of 4 bytes: 10^10 in 2^34 bytes; sub-groups of 4 x 10^9 in 2^32, 2 x 10^9 in 2^31
    share = 25 * 10**8
    found = engine(replace(BIG, parameters=share, trained=share), 3, ranks=1, offload_optimizer=True)
    assert found.host == 12 * share + 2**34 + 2 * 2**32 + 2**31


def resident(*arguments: str) -> dict[str, int]:
    config = plan(*arguments)
    return estimate(config, models(config), GPU).resident


def test_resident_memory_of_each_role() -> None:
    assert resident() == {"actor": 5000, "critic": 5000, "reference": 2000}
    assert resident("reference.zero.offload_params=true")["reference"] == 0
    assert resident("actor.ema.decay=0.9", "algo.old_policy=lagged")["ema"] == 1000


def test_an_offloaded_reference_is_on_the_gpu_while_it_scores() -> None:
    offloaded, there = plan("reference.zero.offload_params=true"), plan()
    one, other = estimate(offloaded, models(offloaded), GPU), estimate(there, models(there), GPU)
    assert one.phases["ref_logprobs"] == other.phases["ref_logprobs"]
    assert one.phases["old_logprobs"] == other.phases["old_logprobs"] - 2000
    assert (one.host, other.host) == (2000, 0)
    # a quarter on each of four ranks, whose tensors torch page-locks one by one
    assert FrozenModel(SMALL, 2, sharded=True, offloaded=True).host(4) == 2 * 500


def test_generation_memory_of_a_sharded_actor() -> None:
    found = {}
    for how in ("whole", "layers"):
        config = plan("actor.zero.stage=3", f"actor.zero.generation_gather={how}")
        found[how] = estimate(config, Models(BIG, None, None, {}, 0), GPU)
    # whole: 2 bytes for each of 10**9 weights. layers: 2 bytes for each of 50 million prefetched weights and
    # of the 100 million in the largest tensor, all counted twice while they are assembled.
    # Only whole weights have fixed addresses, which CUDA graphs need: four graphs of 28 MiB.
    assert found["whole"].phases["generate"] - found["layers"].phases["generate"] == (
        2 * 10**9 - 2 * 2 * (50_000_000 + 10**8) + 4 * 28 * 2**20
    )
    assert "gathered once" in found["whole"].generation and "layer by layer" in found["layers"].generation


def test_memory_of_an_engine_with_its_own_weights() -> None:
    whole = plan("actor.zero.stage=3", "rollout.backend=vllm", "rollout.vllm.kv_cache_gb=1")
    config = with_setting(whole, "rollout.vllm.tensor_parallel", 2)
    shapes = Models(BIG, None, None, {}, 0)
    found = {
        level: estimate(with_setting(config, "rollout.vllm.sleep", level), shapes, GPU)
        for level in ("auto", 0, 1)
    }
    # half of 10**9 weights of 2 bytes; logits of 1,024 sequences in bf16, in fp32 and three copies
    weights, cache, activations = 10**9, GIB, 1024 * 10**5 * (2 + 4 + 12)
    # while the weights arrive: gathered and copied, chunks of 10**8 numbers and the largest tensor
    arriving = 2 * 2 * (10**8 + 10**8)
    asleep = GRAPHS + COMMUNICATOR
    awake = asleep + weights + cache
    for level, resident, switch, generate in (
        ("auto", asleep, weights + arriving, weights + cache + activations),
        (0, awake, arriving, activations),
        (1, asleep, weights + arriving, weights + cache + activations),
    ):
        one = found[level]
        total = sum(one.resident.values())
        assert one.resident["vllm"] == resident
        assert (one.phases["switch"] - total, one.phases["generate"] - total) == (switch, generate)
    assert (found["auto"].host, found[0].host, found[1].host) == (0, 0, weights)
    # training has the memory that the engine frees while it sleeps
    assert found[0].phases["update_actor"] - found["auto"].phases["update_actor"] == weights + cache
    assert "divided among 2 ranks; asleep in training, level 2" in found["auto"].generation


def test_optimizer_states_move_if_the_engine_needs_their_memory() -> None:
    config = plan("actor.zero.stage=3", "rollout.backend=vllm")
    shapes = Models(BIG, None, None, {}, 0)
    # 5.5 GB of the actor, 1.6 GB of graphs; 90 % of the other 5.1 GB are less than the 5.2 GB of the engine
    gpu = Hardware(4, Hardware(4, 0).context + 12 * GIB)
    found = estimate(config, shapes, gpu)
    actor = found.engines["actor"]
    assert found.moved == actor.masters + actor.moments + actor.buffers
    assert found.generation.endswith("optimizer states offloaded")
    assert found.phases["generate"] == sum(found.resident.values()) - found.moved + sum(
        (found.vllm.weights, found.vllm.kv_cache, found.vllm.activations)
    )


def finetune_estimate(*arguments: str, shape: Shape, longest: int, evaluated: int = 0) -> Estimate:
    stage = ("stage=sft", "actor.model.path=org/base", "data.path=org/chats", "run.steps=1")
    config = with_cpu_limits(
        compose(*stage, "sft.batch_size=8", "actor.model.dtype=fp32", *arguments, ranks=4)
    )
    hardware = Hardware(4, 80 * GIB)
    sizes = {"name": "actor", "shape": shape, "longest": longest, "evaluated": evaluated}
    return FinetuneMemory(config, hardware, **sizes).estimate()


def test_memory_of_fine_tuning() -> None:
    """Two rows of 10 tokens on each rank; a bucket has 500 million elements whatever the model's size."""
    one = finetune_estimate("memory.train_tokens=10", shape=SMALL, longest=10)
    both = finetune_estimate("memory.train_tokens=20", shape=SMALL, longest=10)
    assert set(one.phases) == {"loading", "update_actor"} and set(one.resident) == {"actor"}
    # 1000 weights of 4 bytes, and a quarter of the master weights (4 bytes) and of the moments (8 bytes)
    assert one.resident["actor"] == 4000 + 1000 + 2000
    kept = [activation_bytes(SMALL, tokens, 10, 4, False) for tokens in (10, 20)]
    heads = [head_backward_bytes(SMALL, tokens, 4, 4, GPU_BLOCK, KEPT) for tokens in (10, 20)]
    accumulated = one.engines["actor"].gradients  # of the first micro-batch
    assert both.phases["update_actor"] - one.phases["update_actor"] == (
        kept[1] + heads[1] - kept[0] - heads[0] - accumulated
    )
    averaged = finetune_estimate("actor.ema.decay=0.9", shape=SMALL, longest=10, evaluated=3)
    assert averaged.resident["ema"] == 4 * 250 and averaged.phases["eval"] > sum(averaged.resident.values())


def test_a_pair_of_texts_is_in_one_forward() -> None:
    stage = ("stage=reward_model", "scorer.model.path=org/base", "data.path=org/pairs", "run.steps=1")
    small = "memory.train_tokens=1"
    config = with_cpu_limits(
        compose(*stage, "reward_model.batch_size=8", small, "scorer.model.dtype=fp32", ranks=4)
    )
    shape = replace(SMALL, head=0)
    memory = FinetuneMemory(
        config, Hardware(4, 80 * GIB), name="scorer", shape=shape, longest=10, evaluated=0
    )
    assert (memory.update_rows, memory.forward_tokens(1, memory.update_rows)) == (4, 20)
    assert memory.head_positions(20) == 2
    engine = memory.engines["scorer"]
    scores = 2 * 4 * shape.hidden * 2  # two scores, and their gradients
    kept = activation_bytes(shape, 20, 10, 4, False) + scores + engine.gathered
    assert memory.backward("scorer") == engine.gradients + engine.bucket + max(kept, engine.reduction)


@pytest.mark.parametrize(("size", "group"), [(2, 2), (4, 4), (8, 4)])
def test_copies_of_the_weights_are_divided_by_the_ranks_of_a_group(size: int, group: int) -> None:
    sharded = "actor.zero.stage=3"
    copies = f"+actor.deepspeed.zero_optimization.zero_hpz_partition_size={size}"
    more = resident(sharded, copies)["actor"] - resident(sharded)["actor"]
    assert more == 2 * 1000 // group  # 4 ranks; 2 bytes for each of 1000 weights


def test_a_cpu_holds_only_the_written_part_of_a_bucket() -> None:
    def engines(place: Hardware, *arguments: str) -> dict[str, EngineMemory]:
        config = plan(*arguments)
        return estimate(config, models(config), place).engines

    # DeepSpeed allocates a bucket of 500 million numbers in bf16. Only a thousand gradients are written to
    # it, and a CPU uses memory only for the written part.
    for stage, ours in ((2, lambda e: e.bucket), (3, lambda e: e.buffers - 4 * 250)):
        arguments = [f"{role}.zero.stage={stage}" for role in ("actor", "critic")]
        assert {ours(e) for e in engines(GPU, *arguments).values()} == {2 * 500_000_000}
        assert {ours(e) for e in engines(Hardware(4, None), *arguments).values()} == {2 * 1000}
    smaller = engines(
        Hardware(4, None), "actor.zero.stage=2", "actor.deepspeed.zero_optimization.reduce_bucket_size=400"
    )
    assert smaller["actor"].bucket == 2 * 400


def test_generation_on_a_cpu_has_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, on_cpu = replace(SMALL, linear=700), Hardware(4, None)
    roles = [f"{role}.zero.stage=3" for role in ("actor", "critic")]

    def generate(shape: Shape, place: Hardware, *arguments: str) -> int:
        config = plan("actor.model.dtype=fp32", "sampling.max_new_tokens=32", *arguments)
        return estimate(config, Models(shape, None, None, {}, 0), place).phases["generate"]

    def packed(*arguments: str, place: Hardware = on_cpu, shape: Shape = shape) -> int:
        return generate(shape, place, *arguments) - generate(replace(shape, linear=0), place, *arguments)

    monkeypatch.setattr(matmul, "_library", "onednn")
    assert packed() == 4 * 700  # a copy in fp32
    assert packed(*roles, "actor.zero.generation_gather=whole") == 4 * 700
    assert packed(*roles, "actor.zero.generation_gather=layers") == 0
    assert packed("rollout.backend=hf") == packed("sampling.max_new_tokens=31") == packed(place=GPU) == 0
    # at most 512 MiB are packed
    assert packed(shape=replace(SMALL, linear=2**27)) == 2**29
    assert packed(shape=replace(SMALL, linear=2**27 + 1)) == 0
    monkeypatch.setattr(matmul, "_library", "torch")
    assert packed() == 0


def test_ranks_that_divide_a_row_need_the_activations_of_their_tokens() -> None:
    def memory(*arguments: str) -> PPOMemory:
        # a row has 28 + 4 tokens; the last of 4 ranks has 8 of them, 4 with labels
        row = ("data.max_prompt_tokens=28", "sampling.max_new_tokens=4", "memory.train_tokens=1")
        config = with_cpu_limits(compose(*MINIMAL, "actor.model.dtype=bf16", *row, *arguments, ranks=4))
        return PPOMemory(config, models(config, critic=CRITIC), GPU, 28)

    whole, divided = memory(), memory("memory.sequence_parallel=4")
    states = 2 * 4 * 5 * 4  # four states of 5 numbers and their gradients, in fp32
    for found, tokens in ((whole, 32), (divided, 8)):
        assert found.graph("critic") == activation_bytes(CRITIC, tokens, 32, 2, False) + states
        assert found.head_positions(tokens) == 4
    half = memory("memory.sequence_parallel=2", "memory.score_tokens=1")._scoring()
    assert half["values"] == inference_activation_bytes(CRITIC, 16, 32, 2)
    assert whole.estimate().phases["generate"] == divided.estimate().phases["generate"]


def test_a_kept_graph_of_the_critic_is_there_in_the_backward_of_the_actor() -> None:
    one_step = ("algo.epochs=1", "algo.minibatch_size=null")
    gradients = 10**10  # so that the memory of the optimizer step does not matter

    def update(reuse: str, *arguments: str) -> int:
        config = plan(*one_step, f"memory.reuse_forwards={reuse}", "memory.train_tokens=1", *arguments)
        memory = PPOMemory(config, models(config, critic=CRITIC), GPU, 8)
        memory.engines = {
            name: replace(engine, gradients=0, step=0, bucket=gradients)
            for name, engine in memory.engines.items()
        }
        memory.engines["critic"] = replace(memory.engines["critic"], gradients=7)
        return memory._updates()["update_actor"]

    length = 8 + compose(*MINIMAL).sampling.max_new_tokens  # one row is one micro-batch
    graph = activation_bytes(CRITIC, length, length, 2, False)
    graph += 2 * 4 * 5 * (length - 8)  # states of 5 numbers and their gradients, in fp32
    assert update("auto") == update("off")
    assert update("all") - update("off") == graph
    # the actor's forward is not kept: the critic's backward comes first and leaves its gradients
    decoded = "algo.old_logprobs=rollout"
    assert update("all", decoded) - update("off", decoded) == 7
    assert update("auto", decoded) - update("off", decoded) == 7
    # a run in fp32 may take the log-probs of generation
    exact = "actor.model.dtype=fp32"
    assert update("auto", exact) - update("off", exact) == 7


# -- messages


def test_suggestions_name_keys_and_their_effect() -> None:
    config = plan("rollout.prompts_per_step=4096", "data.max_prompt_tokens=56")
    asked = Models(BIG, BIG, FrozenModel(BIG, 2, False, False), {}, 64)

    def estimated(config: Config) -> Estimate:
        return estimate(config, asked, GPU)

    peak = estimated(config).peak
    # two engines with 2 + (4 + 8) / 4 GB each, and a reference with 2 GB
    assert 12e9 < peak < 40e9
    alone, together, left = suggest_reductions(config, estimated, int(0.7 * peak))
    assert left <= 0.7 * peak and left == estimated(with_settings(config, together)).peak
    for settings, brings in alone:
        assert brings == estimated(with_settings(config, settings)).peak < peak
    assert [("actor.zero.offload_optimizer", True), ("critic.zero.offload_optimizer", True)] in [
        settings for settings, _ in alone
    ]


def test_dividing_rows_is_suggested_where_one_row_needs_too_much() -> None:
    def suggested(tokens: int, *arguments: str, now: int = 1, parts: tuple[int, ...] = (2, 4)) -> set[object]:
        config = with_setting(
            plan(f"sampling.max_new_tokens={tokens}", *arguments), "memory.sequence_parallel", now
        )
        asked = Models(BIG, BIG, FrozenModel(BIG, 2, False, False), {}, 64)
        single, _, _ = suggest_reductions(config, lambda tried: estimate(tried, asked, GPU), 1, parts)
        return {value for [(key, value), *_], _ in single if key == "memory.sequence_parallel"}

    assert suggested(100_000) == {2, 4} and not suggested(100_000, parts=())
    assert suggested(100_000, now=2) == {4}
    assert not suggested(100)  # several rows of a micro-batch have fewer tokens with a lower budget
    assert not suggested(100_000, "memory.layout=padded")
    assert not suggested(100_000, "memory.reuse_forwards=all", "algo.epochs=1", "algo.minibatch_size=null")


def test_each_setting_of_a_combination_reduces_the_peak() -> None:
    budgets = [f"memory.{name}_tokens=65536" for name in ("rollout", "score", "train")]
    sizes = ("rollout.prompts_per_step=4096", "data.max_prompt_tokens=56", "rollout.backend=hf")
    config = plan(*sizes, *budgets)
    asked = Models(BIG, BIG, FrozenModel(BIG, 2, False, False), {}, 64)

    def peak(settings: list[tuple[str, object]]) -> int:
        return estimate(with_settings(config, settings), asked, GPU).peak

    # a peak of 1 byte is impossible, so all settings that help are suggested
    _, together, left = suggest_reductions(config, lambda config: estimate(config, asked, GPU), 1)
    assert left == peak(together) and len(together) > 4
    # Gradient checkpointing is added early, and dropped because it saves nothing once updates have few
    # tokens. A ZeRO stage may be kept although it saves nothing itself, since other settings need it.
    assert not [key for key, _ in together if key.endswith("gradient_checkpointing")]
    for key, _ in together:
        assert (
            key.endswith("zero.stage") or peak([setting for setting in together if setting[0] != key]) > left
        ), key


def test_nested_keys_can_be_set() -> None:
    config = with_setting(plan(), "actor.deepspeed.zero_optimization.reduce_bucket_size", 7)
    assert config.actor.deepspeed == {"zero_optimization": {"reduce_bucket_size": 7}}
    assert (
        format_settings([("actor.zero.offload_optimizer", True), ("memory.train_tokens", 8)])
        == "actor.zero.offload_optimizer=true memory.train_tokens=8"
    )


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a model of 27 million parameters, a reward model of 23 million, prompts and a reward function."""
    folder = tmp_path_factory.mktemp("doctor")
    words = [f"w{i}" for i in range(8000)]
    tokenizer = tiny.character_tokenizer("abcdefgh ")
    common = dict(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    special = dict(vocab_size=len(words), pad_token_id=0, eos_token_id=1, bos_token_id=None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        tiny.save(LlamaForCausalLM(LlamaConfig(**common, **special)), tokenizer, folder / "model")
        config: PreTrainedConfig = LlamaConfig(**common, **special, num_labels=1)
        tiny.save(LlamaForSequenceClassification(config), tokenizer, folder / "reward")
    (folder / "prompts.jsonl").write_text(16 * (json.dumps({"prompt": 64 * "a"}) + "\n"))
    (folder / "mine.py").write_text(
        "def score(prompts, responses, rows):\n    return [float(len(r)) for r in responses]\n"
    )
    return folder


def arguments(start: Path, *more: str) -> list[str]:
    names = ("actor.model.path=model", "data.path=prompts.jsonl", "reward.path=mine.py:score")
    located = [f"{key}={start}/{value}" for key, value in (name.split("=") for name in names)]
    sizes = (
        "rollout.prompts_per_step=16",
        "sampling.max_new_tokens=32",
        "data.max_prompt_tokens=64",
        "run.steps=2",
        "actor.model.dtype=fp32",
    )
    return ["reward=function", *located, *sizes, f"run.dir={start}/run", *more]


def diagnosis(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = doctor.main(list(argv))
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_a_run_that_fits(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = diagnosis(
        capsys, *arguments(start, "actor.lora.rank=4", "critic.init=actor"), "--gpus", "2", "--gpu-mem", "80"
    )
    assert code == 0, said
    # 6 layers x (inputs + outputs of q, o: 1024 each; k, v: 768 each; gate, up, down: 1920 each) x rank 4
    adapters = 6 * (2 * 1024 + 2 * 768 + 3 * 1920) * 4
    assert f"{adapters / 1e6:.1f} M of them trained" in said
    assert "reference" not in said.split("resident")[1]  # it is the actor without adapters
    for text in ("= 16 samples per step, 8 per rank", "the longest has 64 tokens", "fits", "deepspeed 0."):
        assert text in said
    assert "update_critic" in said
    assert not (start / "run").exists()


def test_rows_have_the_length_of_the_longest_prompt_of_the_data(start: Path) -> None:
    """All prompts have 64 tokens, although the config allows more."""
    config = with_cpu_limits(compose(*arguments(start, "data.max_prompt_tokens=200")))
    found = plan_ppo(config, Hardware(1, None), Report())
    assert found is not None and found.estimate(config).row_tokens == 64 + 32


def test_a_run_that_does_not_fit_gets_suggestions(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = diagnosis(
        capsys, *arguments(start, "actor.model.dtype=bf16"), "--gpus", "2", "--gpu-mem", "5.1"
    )
    assert code == 1
    assert "too much" in said and "reduce_bucket_size=50000000 reduces it to 0." in said


@pytest.mark.parametrize(
    ("prepared", "options", "line"),
    [
        (True, ("--gpus", "8", "--gpu-mem", "1"), "a GPU of 1.0 GiB is smaller than the 3.6 GiB that CUDA"),
        (False, ("--gpu-mem", "1e-9"), "a GPU of 0.0 MiB is smaller than the 1.8 GiB that CUDA"),
    ],
)
def test_a_gpu_too_small_for_cuda_itself_is_one_line_without_advice(
    start: Path, capsys: pytest.CaptureFixture[str], prepared: bool, options: tuple[str, ...], line: str
) -> None:
    run = arguments(start) if prepared else ["+experiment=quickstart", f"run.dir={start}/run"]
    code, said = diagnosis(capsys, *run, *options)
    assert code == 1 and said.splitlines()[-1].startswith(f"too much   {line}")
    assert not [text for text in ("reduce", "all of", "not estimated") if text in said]


def test_before_prepare_the_unchecked_parts_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = diagnosis(capsys, "+experiment=quickstart", f"run.dir={tmp_path}/run")
    assert code == 0 and f"\ndisk       run.dir={tmp_path}/run: " in said and "GiB free\n" in said
    unchecked = "`prepare` creates models and data when the run starts, so they were not checked"
    assert unchecked in said.splitlines()[-1]


def test_the_disk_and_shared_memory_of_a_cluster_are_not_checked_here(
    start: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(total=2**20, used=2**20, free=0)
    monkeypatch.setattr("ppo_ds.tools.doctor.report.shutil.disk_usage", lambda _: full)
    for cluster in (("--gpus", "2"), ("--gpu", "h100"), ("--nodes", "2"), ("--gpu", "h100", "--gpus", "16")):
        code, said = diagnosis(capsys, *arguments(start), *cluster)
        assert code == 0 and " free" not in said, said
        assert f"\ndisk       run.dir={start}/run: " in said and "the cluster's disk was not checked" in said
        needs_shared = "\n/dev/shm   several GPUs on a node need at least 1 GiB; " in said
        assert needs_shared == ("--gpus" in cluster)
    code, said = diagnosis(capsys, *arguments(start))
    assert code == 1 and "\ndisk       error: run.dir=" in said and ", 0.0 MiB free; choose" in said
    assert "\n/dev/shm   1.0 MiB\n" in said


def test_shared_memory_of_this_machine_with_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ppo_ds.tools.doctor.report.shutil.disk_usage", lambda _: SimpleNamespace(total=2**26)
    )
    for per_node, is_this_machine, errors in ((2, True, 1), (1, True, 0), (2, False, 0)):
        report = Report()
        cluster = Cluster(per_node, per_node, 80 * GIB, None, is_this_machine)
        check_host(3 * GIB, [5 * GIB, 7 * GIB], cluster, report)
        assert report.errors == errors, report.lines
        here = "; this machine has " if is_this_machine else ""
        host = str(report.lines[-1])
        sizes = f"3.0 GiB per rank for offloading, {3 * per_node}.0 GiB per node"
        assert f"{sizes}; 7.0 GiB on rank 0 for the export{here}" in host
        assert ("this machine" in host) == is_this_machine


@pytest.mark.parametrize(
    ("assumed", "problem"),
    [
        ("prompt=65", "--assume prompt=65: must be at most data.max_prompt_tokens=64; lower it or raise "),
        (
            "response=33",
            "--assume response=33: must be at most sampling.max_new_tokens=32; lower it or raise ",
        ),
    ],
)
def test_an_assumed_length_is_at_most_the_maximum(
    start: Path, capsys: pytest.CaptureFixture[str], assumed: str, problem: str
) -> None:
    code, said = diagnosis(capsys, *arguments(start), "--gpu", "h100", "--assume", assumed)
    assert code == 2 and said.startswith(f"error: {problem}") and said.count("\n") == 1
    code, said = diagnosis(capsys, *arguments(start), "--gpu", "h100", "--assume", "prompt=64", "response=32")
    assert code == 0, said


def test_vllm_is_checked_without_loading_it(
    start: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is looked for only if the run is to start on this machine."""
    monkeypatch.setattr(vllm_support, "installed_version", lambda: None)
    asked = arguments(start, "rollout.backend=vllm", "rollout.vllm.sleep=2")
    code, said = diagnosis(capsys, *asked)
    assert code != 0 and "decode     error: rollout.backend=vllm: vLLM is not installed; " in said
    assert "decode     error: rollout.vllm.sleep=2: vLLM cannot sleep on a CPU; use auto or 0" in said
    _, said = diagnosis(capsys, *asked, "--gpus", "1", "--gpu-mem", "80")
    assert "decode     error" not in said


@pytest.mark.parametrize(
    ("experiment", "parts"),
    [
        ("rlhf", ["494.0 M", "435.1 M"]),
        ("rlhf_70b", ["72,706.2 M", "4,022.5 M"]),
        ("sft", ["494.0 M"]),
        ("reward_model", ["494.0 M"]),
    ],
)
def test_experiments_are_estimated_offline_by_the_shapes_that_ship(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, experiment: str, parts: list[str]
) -> None:
    """The numbers of parameters are those of the model cards."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    _, text = diagnosis(capsys, f"+experiment={experiment}", "--gpu", "h100", "--gpus", "16")
    assert "the shapes that ship with ppo_ds" in text and "time       estimated" in text
    assert all(f": {part} parameters" in text for part in parts)


def test_all_errors_are_reported_together(start: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (start / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    code, said = diagnosis(
        capsys,
        *arguments(
            start,
            f"data.path={start}/bad.jsonl",
            "reward.path=nowhere.py:score",
            f"critic.model.path={start}/run",
        ),
    )
    # an error in the config ends the doctor before other checks
    assert code == 2 and "no such folder" in said
    code, said = diagnosis(capsys, *arguments(start, f"data.path={start}/bad.jsonl"), "--gpus", "1")
    # the doctor still reports its other findings
    assert code == 1 and f"error: {start}/bad.jsonl:2: " in said and "update_actor" in said


@pytest.mark.parametrize("memory", ["nan", "inf", "-inf", "1e300", "0", "-1"])
def test_the_memory_of_a_gpu_must_be_a_plausible_number(
    capsys: pytest.CaptureFixture[str], memory: str
) -> None:
    code, said = diagnosis(capsys, "+experiment=quickstart", f"--gpu-mem={memory}")
    expected = f"error: --gpu-mem={float(memory):g}: must be above 0 and at most 100000\n"
    assert (code, said) == (2, expected)


@pytest.mark.parametrize("argv", [("--gpus", "0"), ("--gpus", "many"), ("--gpus", "3"), ("algo.epoch=2",)])
def test_command_line_errors(start: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    code, said = diagnosis(capsys, *arguments(start), *argv)
    assert code == 2 and said.startswith("error: ")


@pytest.mark.slow
def test_an_unavailable_hub_model_is_one_error_line(start: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "launch" / "doctor.py"),
        *arguments(start, "actor.model.path=owner/name"),
        "--gpus",
        "1",
    ]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=offline, capture_output=True, text=True, timeout=900)
    assert done.returncode == 1, done.stderr
    for name in ("tokenizer", "actor"):
        assert (
            f"{name:<10} error: actor.model.path=owner/name: no folder of that name, not in "
            "the local Hub cache"
        ) in done.stdout
    assert "huggingface.co" not in done.stdout
    assert (
        "16 samples per step" in done.stdout
        and "not estimated" in done.stdout
        and "Traceback" not in done.stderr
    )


# -- measurements


@pytest.mark.slow
def test_the_estimate_is_within_15_percent_of_a_run(start: Path, tmp_path: Path) -> None:
    bucket = [
        f"{role}.deepspeed.zero_optimization.reduce_bucket_size=10000000" for role in ("actor", "critic")
    ]
    stages = (
        "actor.zero.stage=2",
        "critic.zero.stage=0",
        "critic.init=actor",
        "critic.model.gradient_checkpointing=true",
        "checkpoint.every=0",
        "algo.epochs=1",
        "algo.old_logprobs=recompute",
        f"run.dir={tmp_path}/run",
    )
    budgets = (
        "rollout.prompts_per_step=8",
        "memory.train_tokens=384",
        "memory.score_tokens=384",
        "memory.layout=padded",
        "sampling.stop_token_ids=[]",
    )
    argv = arguments(start, *stages, *budgets, *bucket)
    measured = measured_peaks(argv, tmp_path)
    config = with_cpu_limits(compose(*argv))
    planned = plan_models(config, load_tokenizer(config.actor.model.path), Report())
    assert planned is not None
    found = estimate(config, planned, Hardware(1, None), 64).phases
    for phase in ("generate", "old_logprobs", "ref_logprobs", "values", "update_actor", "update_critic"):
        assert found[phase] == pytest.approx(measured[phase], rel=0.15), (
            phase,
            found[phase] / 2**20,
            measured[phase] / 2**20,
        )


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "reward_model"])
def test_the_estimate_of_fine_tuning_is_within_10_percent_of_a_run(
    start: Path, tmp_path: Path, stage: str
) -> None:
    """Every row has 64 tokens. The second half of each optimizer step adds to the gradients of the first.

    The phase data allocates no tensors. What the process holds in it besides the resident tensors belongs to
    the libraries that it has imported since its start.
    """
    role = {"sft": "actor", "reward_model": "scorer"}[stage]
    rows = [{"prompt": "a" * 30, "chosen": chr(98 + i % 7) * 33, "rejected": "a" * 33} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [
        f"stage={stage}",
        f"{role}.model.path={start}/model",
        f"{role}.model.dtype=fp32",
        f"{role}.deepspeed.zero_optimization.reduce_bucket_size=10000000",
        f"data.path={tmp_path}/rows.jsonl",
        f"data.eval_path={tmp_path}/rows.jsonl",
        f"{stage}.batch_size={16 if stage == 'sft' else 8}",
        "memory.train_tokens=512",
        "memory.score_tokens=1024",
        "memory.layout=padded",
        "run.steps=2",
        "checkpoint.every=0",
        f"run.dir={tmp_path}/run",
        *(["sft.learn=all", "sft.samples=1", "sft.sample_tokens=4"] if stage == "sft" else []),
    ]
    measured = measured_peaks(argv, tmp_path)
    config = with_cpu_limits(compose(*argv))
    plan = plan_finetuning(config, Hardware(1, None), Report())
    assert plan is not None
    found = plan.estimate(config)
    libraries = measured["data"] - sum(found.resident.values())
    assert 0 < libraries < 100 * 2**20
    for phase in ("eval", f"update_{role}"):
        assert found.phases[phase] + libraries == pytest.approx(measured[phase], rel=0.1), (phase, measured)


def measured_peaks(argv: list[str], tmp_path: Path) -> dict[str, int]:
    """Runs the training of a command line and returns the peak memory of each phase in bytes."""
    (tmp_path / "arguments.json").write_text(json.dumps(argv))
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {
        "PYTHONPATH": str(ROOT),
        "MALLOC_MMAP_THRESHOLD_": "1048576",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, str(WORKER), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tmp_path / "peaks.json").read_text())


def test_model_shapes_equal_the_loaded_model(start: Path) -> None:
    planned = planned_shape(
        ModelConfig(path=f"{start}/model"), classifier=False, trained=True, key="actor.model.path"
    )
    assert planned == shape_of(LlamaForCausalLM.from_pretrained(start / "model"))
    # the head and the matrices of the layers
    assert planned.linear == 8000 * 512 + 6 * (2 * 512**2 + 2 * 512 * 256 + 3 * 512 * 1408)
    # Embedding and head: 8000 x 512 each. Each of 6 layers: q and o with 512 x 512, k and v with 512 x 256,
    # three matrices of 512 x 1408, and two norms. Finally the last norm.
    assert (
        planned.parameters
        == 2 * 8000 * 512 + 6 * (2 * 512**2 + 2 * 512 * 256 + 3 * 512 * 1408 + 2 * 512) + 512
    )
