"""Tests the doctor's estimate of time against numbers computed by hand.

The device does 1,000 FLOPs per second, reads 1,000 bytes per second, and has links of 1,000 bytes per second
within a node of two devices, 500 to the CPU and 100 to other nodes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from ppo_ds.compute.sizes import Shape
from ppo_ds.config.schema import Config
from ppo_ds.errors import UserError
from ppo_ds.planning.ppo_memory import Models
from ppo_ds.planning.run_memory import Estimate, FrozenModel
from ppo_ds.planning.vllm_memory import VllmMemory
from ppo_ds.tools.doctor.cluster import Cluster, cluster_of
from ppo_ds.tools.doctor.gpus import GPUS, Device, find_gpu, recognized
from ppo_ds.tools.doctor.step_time import (
    HOST,
    LAUNCHES,
    LINKS,
    MEMORY,
    DecodeWork,
    Machine,
    Passes,
    PPOTime,
    decode_work,
    passes_over,
    read_assumptions,
    response_lengths,
)
from tests.config.commands import MINIMAL, compose

DEVICE = Device("toy", 80, 1e-9, 5e-10, 1e-9, 1e-6, 1e-6, 5e-7, 1e-7, 2, "none")
ASSUMED = dict(
    mfu=0.4,
    forward=0.5,
    decode=0.5,
    decode_mfu=0.25,
    adam=0.5,
    links=0.5,
    overlap=0.0,
    kernels=10,
    launch_us=10_000,
    graph_us=100_000,
    collective_us=1_000_000,
    host_gb=2e-6,
)
# The model of tests/ops/test_flops.py: 1192 parameters in the body, an embedding and a head of 80 each.
ACTOR = Shape(
    body=1192,
    head=80,
    parameters=1352,
    trained=1352,
    largest_trained=128,
    largest_tensor=128,
    vocabulary=10,
    layers=2,
    hidden=8,
    inner=16,
    gated=True,
    heads=2,
    width=8,
    kv_width=4,
)
CRITIC = replace(ACTOR, parameters=1272, trained=1272, head=0)
MODELS = Models(ACTOR, CRITIC, FrozenModel(ACTOR, 2, False, False), {}, 5)
WHOLE = Estimate({}, {}, 0, {}, "weights whole on each rank")


def machine(ranks: int = 2, **assumed: float) -> Machine:
    return Machine(DEVICE, ASSUMED | assumed, ranks, per_node=2, on_gpu=True)


def config(stage: int = 1, *more: str) -> Config:
    """Returns 4 rows of 3 + 2 tokens, and two optimizer steps of 2 rows each."""
    return compose(
        *MINIMAL,
        "rollout.prompts_per_step=4",
        "sampling.max_new_tokens=2",
        "algo.epochs=1",
        "algo.minibatch_size=2",
        f"zero=stage{stage}",
        "memory.rollout_tokens=100",
        "memory.score_tokens=100",
        "memory.train_tokens=100",
        *more,
        ranks=2,
    )


def time_of(config: Config, memory: Estimate = WHOLE, models: Models = MODELS, **assumed: float) -> PPOTime:
    return PPOTime(config, machine(**assumed), memory, models=models, mean_prompt=3, longest=3)


def test_a_step_by_hand() -> None:
    phases = time_of(config()).phases()
    # A rank has 2 rows. Prefill: 2 prompts x 2 tokens, 6 pairs: 2 x 1192 x 4 + 64 x 6 = 9920 FLOPs.
    # Decoding: 2 steps x 2 rows, which read 3 and 4 positions each, 14 in all: 2 x 1192 x 4 + 64 x 14 + 160 x
    # 4 = 11072 FLOPs at a quarter of the peak. Bytes: 2 x (2 x 1272 weights + 14 x 16) = 5536 at a half.
    # Between kernels: 2 steps x 3 layers x 10 kernels x 0.1 s.
    assert phases["generate"].seconds == pytest.approx(9920 / 500 + 11072 / 250 + 6.0)
    assert phases["generate"].resources[MEMORY] == pytest.approx(5536 / 500)
    # 10 tokens, 30 pairs, the head at 4 positions: 23840 + 1920 + 640 FLOPs at a half of the peak
    assert phases["old_logprobs"].seconds == phases["ref_logprobs"].seconds == pytest.approx(26400 / 500)
    assert phases["values"].seconds == pytest.approx(25760 / 500)  # the critic has no LM head
    # Each of 2 optimizer steps, of one row: (11920 + 960 + 320) x 3 FLOPs at 0.4; gradients and new weights
    # of 2 x 1352 bytes, half of which come from the other rank, at 500 bytes per second and 1 s each; AdamW
    # on half of the parameters, 30 bytes each, at 500 bytes per second.
    actor = 3 * 13200 / 400 + 2 * (2704 / 2 / 500 + 1) + 30 * 676 / 500
    assert phases["update_actor"].seconds == pytest.approx(2 * actor)
    critic = 3 * 12880 / 400 + 2 * (2544 / 2 / 500 + 1) + 30 * 636 / 500
    assert phases["update_critic"].seconds == pytest.approx(2 * critic)
    assert list(phases) == [
        "generate",
        "old_logprobs",
        "ref_logprobs",
        "values",
        "update_actor",
        "update_critic",
    ]
    assert {phase.bound for phase in phases.values()} == {"compute"}


def test_ranks_that_divide_rows_exchange_them_in_every_layer() -> None:
    whole, divided = time_of(config()).phases(), time_of(config(1, "memory.sequence_parallel=2")).phases()
    # Both ranks score 4 rows together, 10 tokens each. In 2 layers, queries and outputs of 8 numbers, keys
    # and values of 4, in 2 bytes: 960 bytes, half of them for the other rank, at 500 bytes per second. Each
    # of the 4 exchanges of a layer waits for 1 s.
    exchange = 480 / 500 + 4 * 2
    for name in ("old_logprobs", "ref_logprobs", "values"):
        assert divided[name].seconds == pytest.approx(whole[name].seconds + exchange)
        assert divided[name].resources[LINKS] == pytest.approx(exchange)
    # In each of 2 optimizer steps, 5 tokens are exchanged in the forward and in the backward.
    exchange = 2 * 2 * (240 / 500 + 4 * 2)
    for name in ("update_actor", "update_critic"):
        assert divided[name].seconds == pytest.approx(whole[name].seconds + exchange)
        assert divided[name].resources[LINKS] == pytest.approx(whole[name].resources[LINKS] + exchange)
    assert divided["generate"] == whole["generate"]


def test_generation_by_an_engine_by_hand() -> None:
    engine = VllmMemory(weights=0, kv_cache=4 * 5 * 32, activations=0, kept=0, group=2)  # 4 rows of 5 tokens
    memory = replace(WHOLE, vllm=engine)
    found = time_of(config(), memory).phases()["generate"]
    # Both ranks generate 4 rows together. Prefill: 12 tokens, 24 pairs: 28608 + 1536 FLOPs. Decoding: 8
    # tokens that read 28 positions: 19072 + 1792 + 1280 FLOPs. Each rank does half of them.
    compute = 30_144 / 2 / 500 + 22_144 / 2 / 250
    # All-reduces of 20 hidden states of 16 bytes, two in each of 2 layers: 1280 bytes, of which half is sent
    # twice at 500 bytes per second. Each of the 3 forwards waits 4 times for 1 s.
    links = 2 * 640 / 500 + 3 * 4
    assert found.seconds == pytest.approx(compute + links + 6.0)
    assert found.resources[LINKS] == pytest.approx(links)
    # Half of the weights in both steps. The only head of the keys is on both ranks.
    assert found.resources[MEMORY] == pytest.approx((2 * 2 * 1272 / 2 + 2 * 16 * 28) / 500)
    # A decode step: half of the decoding, 3 s between kernels, 4 s of latency and 4 hidden states of 16 bytes
    # in 4 all-reduces, of which half is sent twice.
    token = 22_144 / 2 / 250 / 2 + 3 + 4 + 2 * (4 * 4 * 16 / 2) / 500
    assert found.detail.startswith(f"2 decode steps of {1000 * token:.1f} ms with 4 rows of 2 rank(s)")


def test_an_engine_decodes_as_many_rows_as_its_cache_holds() -> None:
    memory = replace(
        WHOLE, vllm=VllmMemory(weights=0, kv_cache=3 * 5 * 32 - 1, activations=0, kept=0, group=2)
    )
    found = time_of(config(), memory).phases()["generate"]
    assert found.detail.startswith("4 decode steps of ") and "2 rows of 2 rank(s)" in found.detail


@pytest.mark.parametrize(("stage", "transfers"), [(1, 2), (2, 3)])
def test_zero_2_reduces_gradients_after_every_forward(stage: int, transfers: int) -> None:
    """Rows of 5 tokens are computed one by one: two forwards for each optimizer step of two rows."""
    one_by_one = config(stage, "memory.train_tokens=5", "algo.minibatch_size=4")
    links = time_of(one_by_one).phases()["update_actor"].resources[LINKS]
    assert links == pytest.approx(transfers * (2704 / 2 / 500 + 1))


def test_zero_3_gathers_weights_in_every_forward_and_generation_may_for_every_token() -> None:
    sharded = replace(MODELS, reference=replace(MODELS.reference, sharded=True))
    layerwise = replace(WHOLE, layerwise=True)
    phases = time_of(config(3), layerwise, sharded).phases()
    gather = 2704 / 2 / 500 + 14  # half of the weights, and 7 collectives of each of 2 layers
    # 2 decode steps and a prefill, whose kernels are launched one by one
    assert phases["generate"].resources[LINKS] == pytest.approx(3 * gather)
    assert phases["generate"].resources[LAUNCHES] == pytest.approx(2 * 3 * 10 * 0.01)
    assert phases["ref_logprobs"].seconds == pytest.approx(26400 / 500 + gather)
    # a gather in the forward, one in the backward, and the gradients, in 2 optimizer steps
    assert phases["update_actor"].resources[LINKS] == pytest.approx(2 * 3 * gather)
    overlapping = time_of(config(3), layerwise, sharded, overlap=0.5).phases()
    assert overlapping["ref_logprobs"].seconds == pytest.approx(26400 / 500 + gather / 2)
    whole = time_of(config(3), WHOLE, sharded).phases()
    assert whole["switch"].seconds == pytest.approx(gather) and whole["generate"].resources[LINKS] == 0


def test_offloading_is_paid_in_the_update_and_in_the_switch() -> None:
    phases = time_of(config(2, "actor.zero.offload_optimizer=true")).phases()
    # 676 parameters: 30 bytes each at 2000 bytes per second of CPU memory; 4 bytes down and 2 up at 250
    assert phases["update_actor"].resources[HOST] == pytest.approx(2 * (676 * 30 / 2000 + 676 * 6 / 250))
    moved = time_of(config(2), replace(WHOLE, moved=1000)).phases()
    assert moved["switch"].seconds == pytest.approx(2 * 1000 / 250)
    offloaded = replace(MODELS, reference=FrozenModel(ACTOR, 2, False, True))
    found = time_of(config(), models=offloaded).phases()["ref_logprobs"]
    assert found.seconds == pytest.approx(26400 / 500 + 2704 / 250)


def test_adapters_need_no_gradients_of_weights_and_the_reference_is_the_actor() -> None:
    adapted = Models(replace(ACTOR, trained=100), None, None, {}, 5)
    lora = config(1, "actor.lora.rank=4", "algo=grpo", "rollout.samples_per_prompt=2", "algo.kl.place=loss")
    phases = time_of(lora, models=adapted).phases()
    assert "values" not in phases and "update_critic" not in phases
    assert phases["ref_logprobs"].resources["compute"] > 0
    two = time_of(lora, models=adapted).update("actor", adapted.actor, 1, Passes(1, 5, 15, 2))
    checkpointed = config(1, "actor.lora.rank=4", "actor.model.gradient_checkpointing=true")
    three = time_of(checkpointed, models=adapted).update("actor", adapted.actor, 1, Passes(1, 5, 15, 2))
    assert two.resources["compute"] == pytest.approx(2 * 13200 / 400)
    assert three.resources["compute"] == pytest.approx(3 * 13200 / 400)


@pytest.mark.parametrize(
    ("ranks", "group", "seconds"),
    [
        (1, None, 0.0),
        (2, None, 1000 / 2 / 500 + 1),
        # 4 ranks on 2 nodes: half of the bytes cross the network, through the adapters of both GPUs
        (4, None, 500 / (2 * 50) + 1),
        (4, 2, 1000 / 2 / 500 + 1),  # within the node
    ],
)
def test_gathers_within_and_across_nodes(ranks: int, group: int | None, seconds: float) -> None:
    assert machine(ranks).gather(1000, 1, group) == pytest.approx(seconds)


def test_decoding_in_places_that_become_free() -> None:
    # Rows of 1 + 4, 1 + 2 and 1 + 2 tokens in two places: steps 1 and 2 have rows one and two, steps 3 and 4
    # rows one and three. The longest row reads 1, 2, 3 and 4 positions.
    assert decode_work([1, 1, 1], [4, 2, 2], 2) == DecodeWork(4, 8, 2 * (1 + 2 + 3 + 4))
    assert decode_work([3, 3], [2, 2], 2) == DecodeWork(2, 4, 14)
    assert decode_work([1, 1], [3, 1], 2) == DecodeWork(3, 4, 2 * 1 + 2 + 3)


def test_lengths_are_quantiles_of_a_geometric_distribution() -> None:
    assert response_lengths(3, 7, None) == [7, 7, 7]
    # Each token is the last one with probability 1/2: half of the responses have 1 token, a quarter 2, ...
    assert response_lengths(8, 100, 2.0) == [4, 3, 2, 2, 1, 1, 1, 1]
    assert response_lengths(8, 3, 2.0) == [3, 3, 2, 2, 1, 1, 1, 1]
    lengths = response_lengths(1000, 10_000, 48.0)
    assert sum(lengths) / 1000 == pytest.approx(48, rel=0.02)


def test_forwards_are_divided_as_the_trainer_does() -> None:
    # within 10 tokens: rows of 4 and 4 are padded to 8 tokens, the row of 2 costs less alone
    assert passes_over([4, 4, 2], 3, 8, packed=False) == Passes(2, 10, 23, 3)
    assert passes_over([4, 4, 2], 3, 10, packed=True) == Passes(1, 10, 23, 3)


def test_every_row_of_the_table_has_a_source_and_plausible_rates() -> None:
    for gpu in GPUS.values():
        assert gpu.source.startswith("https://") and gpu.fp32 <= gpu.tf32 * 3 and gpu.fp32 < gpu.bf16
        assert gpu.network < gpu.node_link <= 900 and gpu.host_link in (32, 64)
        # FLOPs for each byte that can be read: 295 on an H100, 76 on an RTX 3090, 419 on an L40S
        assert 70 < gpu.bf16 * 1e3 / gpu.bandwidth < 430
    assert recognized("NVIDIA H100 80GB HBM3") is GPUS["h100"]
    assert recognized("NVIDIA GeForce RTX 4090") is GPUS["rtx4090"] and recognized("Tesla K80") is None
    assert GPUS["h100"].flops("bf16") == 989.5e12 and GPUS["h100"].flops("fp32", tf32=True) == 494.7e12


def test_the_number_of_nodes() -> None:
    gpu = GPUS["h100"]
    assert cluster_of("H100", 64, None, None) == Cluster(64, 8, int(79.2 * 2**30), gpu)
    assert cluster_of("h100", 4, None, 40.0) == Cluster(4, 4, 40 * 2**30, gpu)
    assert cluster_of("h100", 4, 3, None) == Cluster(12, 4, int(79.2 * 2**30), gpu)
    assert cluster_of(None, 64, None, None) == Cluster(64, 8, int(79.2 * 2**30), None)
    assert cluster_of(None, 4, None, 40.0) == Cluster(4, 4, 40 * 2**30, None)
    assert cluster_of(None, 16, 2, None) == Cluster(32, 16, int(79.2 * 2**30), None)
    assert "64 h100 GPU(s) of 79.2 GiB, 8 on each of 8 nodes" in str(cluster_of("h100", 64, None, None))
    with pytest.raises(UserError, match="--gpus=12: not a multiple of the 8 GPUs of a node"):
        cluster_of("h100", 12, None, None)
    with pytest.raises(UserError, match="--gpus=12: not a multiple of the 8 GPUs of a node"):
        cluster_of(None, 12, None, None)
    plain = {
        "4090": "rtx4090", "RTX 3090": "rtx3090", "A100 80GB": "a100", "A100-40GB": "a100-40gb",
        "H100 SXM5": "h100", "H100 PCIe": "h100-pcie", "NVIDIA L40S": "l40s", "RTX A6000": "a6000",
    }  # fmt: skip
    assert {name: find_gpu(name).name for name in plain} == plain
    with pytest.raises(UserError, match="--gpu=h1000: unknown; the table has b200, h200, h100"):
        find_gpu("h1000")


def test_assumptions_of_the_command_line() -> None:
    default = read_assumptions([], on_gpu=True)
    given = read_assumptions(["mfu=0.3", "overlap=0", "response=200"], on_gpu=True)
    assert given == {**default, "mfu": 0.3, "overlap": 0.0, "response": 200.0} and "response" not in default
    assert read_assumptions([], on_gpu=False)["mfu"] != default["mfu"]
    for setting, problem in (
        ("mfuu=1", "--assume mfuu=1: no such assumption; there are mfu, forward"),
        ("mfu=2", "--assume mfu=2: must be above 0 and at most 1"),
        ("mfu=0", "must be above 0 and at most 1"),
        ("overlap=1.5", "--assume overlap=1.5: must be at least 0 and at most 1"),
        ("kernels=many", "--assume kernels=many: must be above 0 and at most 1e+09"),
        ("decode", "--assume decode: must be above 0 and at most 1"),
    ):
        with pytest.raises(UserError) as raised:
            read_assumptions([setting], on_gpu=True)
        assert problem in raised.value.problems[0] and "\n" not in raised.value.problems[0]
