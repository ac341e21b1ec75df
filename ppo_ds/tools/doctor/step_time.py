"""Estimates the seconds of each phase of a step, from FLOPs, bytes moved, and the rates of a machine.

Phases have the names of the trainer's time/* metrics. The estimate is for the rank with the longest response,
for which the others wait. A phase is bound by the resource that would take longest on its own.

The efficiencies assumed for GPUs were never measured on a GPU. The efficiencies for CPUs were calibrated with
the workloads W1 and W2 (docs/dev/scaling.md). Not included are reward functions, models with their own code,
texts of algo.ptx, averaged weights, exchange of experience and recording of CUDA graphs.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from ppo_ds.compute.batching import padded_tokens, plan_forwards
from ppo_ds.compute.sizes import Shape, causal_pairs, decode_bytes, forward_flops
from ppo_ds.config.schema import (
    Config,
    PPOConfig,
    TextConfig,
    TrainedConfig,
    reference_is_base,
    reward_models,
    rollout_size,
    trained_models,
    uses_reference,
)
from ppo_ds.engine.zero import RANKS_16_BIT_SUM
from ppo_ds.errors import UserError
from ppo_ds.planning.forwards import old_logprobs_source
from ppo_ds.planning.model_memory import FP32, kv_cache_bytes
from ppo_ds.planning.ppo_memory import Models
from ppo_ds.planning.run_memory import BYTES, Estimate, FrozenModel
from ppo_ds.planning.vllm_memory import BATCHED_TOKENS, SEQUENCES, kv_heads
from ppo_ds.rollout.continuous_batch import PREFILL_TOKENS, fast_batch_size
from ppo_ds.tools.doctor.gpus import Device

# -- the machine ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A number that --assume can set. Without a default, it has no value unless it is set."""

    default: float | None
    description: str
    most: float = 1e9
    on_cpu: float | None = None  # the default on a CPU; None: the same as on a GPU


OPTIONS = {
    "mfu": Option(0.4, "of the peak FLOP/s in updates, recomputed forwards included", 1, 0.75),
    "forward": Option(0.5, "of the peak FLOP/s in forwards over whole rows, prefill included", 1, 0.8),
    "decode": Option(0.6, "of the memory bandwidth in decode steps", 1, 0.35),
    "decode_mfu": Option(0.4, "of the peak FLOP/s in decode steps", 1, 0.75),
    "adam": Option(0.6, "of the memory bandwidth in optimizer steps", 1, 0.5),
    "links": Option(0.7, "of the bandwidth of NVLink, PCIe and the network", 1),
    "overlap": Option(0.5, "of the shorter of computation and ZeRO-3's gathers, hidden by the other", 1, 0.0),
    "kernels": Option(40, "kernels of a decoder layer in a forward"),
    "launch_us": Option(8, "microseconds of the host for each kernel, without CUDA graphs", on_cpu=18),
    "graph_us": Option(1.5, "microseconds between two kernels of a CUDA graph"),
    "collective_us": Option(40, "microseconds of a collective, besides its transfer"),
    "host_gb": Option(20, "GB/s of CPU memory for each rank in offloaded optimizer steps"),
    "disk_gb": Option(1, "GB/s of all ranks together for checkpoints"),
    "network_gb": Option(None, "GB/s of the network for each GPU, instead of the table's"),
    "prompt": Option(None, "tokens of a prompt on average"),
    "response": Option(None, "tokens of a response on average, instead of the maximum"),
}
Assumptions = Mapping[str, float]  # by the names in OPTIONS
MAX_LENGTHS = {  # stage -> mean lengths that it uses, and the keys of their maxima
    "ppo": {"prompt": "data.max_prompt_tokens", "response": "sampling.max_new_tokens"},
    "sft": {"prompt": "sft.max_tokens"},
    "reward_model": {"prompt": "reward_model.max_tokens"},
}


def read_assumptions(settings: Iterable[str], on_gpu: bool) -> Assumptions:
    """Returns the defaults with ``settings`` (NAME=VALUE) applied; raises UserError for wrong settings."""
    values = {name: option.default for name, option in OPTIONS.items() if option.default is not None}
    if not on_gpu:
        values |= {name: option.on_cpu for name, option in OPTIONS.items() if option.on_cpu is not None}
    problems = []
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if name not in OPTIONS:
            problems.append(f"--assume {setting}: no such assumption; there are {', '.join(OPTIONS)}")
            continue
        most = OPTIONS[name].most
        if not 0 <= value <= most or (value == 0 and name != "overlap"):
            least = "at least 0" if name == "overlap" else "above 0"
            problems.append(f"--assume {setting}: must be {least} and at most {most:g}")
        values[name] = value
    if problems:
        raise UserError(*problems)
    return values


def check_lengths(assumed: Assumptions, config: Config) -> None:
    """Raises UserError if an assumed mean length is above the maximum in the config."""
    problems = []
    for name, key in MAX_LENGTHS[config.stage].items():
        value, most = assumed.get(name), attrgetter(key)(config)
        if value is not None and value > most:
            problems.append(
                f"--assume {name}={value:g}: must be at most {key}={most}; lower it or raise {key}"
            )
    if problems:
        raise UserError(*problems)


@dataclass(frozen=True)
class Machine:
    """The devices of a run, and the efficiencies that are assumed for them."""

    device: Device
    assumed: Assumptions
    ranks: int
    per_node: int
    on_gpu: bool
    tf32: bool = False

    def products(self, flops: float, dtype: str, share: float) -> float:
        """Returns the seconds of matrix products on one rank, at a fraction ``share`` of the peak."""
        return flops / (self.device.flops(dtype, self.tf32) * share)

    def memory(self, size: float, share: float) -> float:
        """Returns the seconds to read or write ``size`` bytes of memory, at a fraction of the bandwidth."""
        return size / (self.device.bandwidth * 1e9 * share)

    def launches(self, layers: float, microseconds: float) -> float:
        """Returns the launch overhead of ``layers`` layers in seconds, at ``microseconds`` per kernel."""
        return layers * self.assumed["kernels"] * microseconds / 1e6

    def gather(self, size: float, collectives: float = 1, group: int | None = None) -> float:
        """Returns the seconds of an all-gather of ``size`` bytes; a reduce-scatter takes equally long.

        ``group`` consecutive ranks (None: all ranks) take part, each with an equal share of the bytes. As in
        NCCL's rings, transfers between nodes use the network adapters of all GPUs, at the same time as the
        transfers inside each node.
        """
        group = group or self.ranks
        if group == 1:
            return 0.0
        local = min(group, self.per_node)
        nodes = -(-group // local)
        inside = size * (group - 1) / group / self.device.node_link if local > 1 else 0.0
        network = self.assumed.get("network_gb") or self.device.network
        across = size * (nodes - 1) / nodes / (local * network)
        latency = collectives * self.assumed["collective_us"] / 1e6
        return max(inside, across) / (1e9 * self.assumed["links"]) + latency

    def host_copy(self, size: float) -> float:
        """Returns the seconds of copying ``size`` bytes between a GPU and CPU memory."""
        return size / (self.device.host_link * 1e9 * self.assumed["links"])


# -- the phases of a step --------------------------------------------------------------------------------

# resources that can bound a phase
COMPUTE, MEMORY, LINKS = "compute", "memory bandwidth", "links"
LAUNCHES, HOST, DISK = "launch overhead", "CPU memory and PCIe", "disk"
GATHERS = 7  # collectives of ZeRO-3 for each decoder layer: one for each of its matrices
HEAD_LAYERS = 1  # the kernels of the head and the sampler, in decoder layers
# bytes that AdamW reads and writes for each trained parameter: master weight, two moments, gradient, weight
ADAM_BYTES = 30


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase, and the seconds for which each resource is busy in it."""

    seconds: float
    resources: Mapping[str, float]
    detail: str = ""

    @property
    def bound(self) -> str:
        """The resource that is busy for the longest time."""
        return max(self.resources, key=lambda name: self.resources[name])

    def times(self, factor: float) -> PhaseTime:
        return PhaseTime(self.seconds * factor, {name: s * factor for name, s in self.resources.items()})


@dataclass(frozen=True)
class Passes:
    """Forwards of one rank that process all tokens of their rows, unlike decode steps."""

    count: int
    tokens: int  # padding included
    pairs: int  # (query, key) pairs of attention
    head_positions: int  # positions to which the head is applied
    parts: int = 1  # ranks that divide the tokens of each forward


def passes_over(
    lengths: Sequence[int], head_positions: int, budget: int, packed: bool, parts: int = 1
) -> Passes:
    """Divides rows into forwards as the trainer does; ``parts`` ranks divide the tokens of each forward."""
    rows = torch.tensor([length for length in lengths for _ in range(parts)])
    plan = plan_forwards(rows, parts * budget, packed=packed)
    groups = [rows[group] for group in plan]
    widths = [group.tolist() if packed else [int(group.max())] * len(group) for group in groups]
    return Passes(
        len(groups),
        sum(padded_tokens(group, packed) for group in groups) // parts,
        sum(causal_pairs(each) for each in widths) // parts,
        head_positions,
        parts,
    )


@dataclass(frozen=True)
class TimedModel:
    """A model whose forwards are timed."""

    shape: Shape
    dtype: str
    sharded: bool  # by ZeRO-3
    role: TrainedConfig | None = None  # of a trained model
    offloaded: int = 0  # bytes of a frozen model that a GPU uploads before its forwards

    @property
    def each(self) -> int:
        """Bytes per weight."""
        return BYTES[self.dtype]


@dataclass
class StepTime(ABC):
    """Computes the time of the parts that all stages have: forwards, updates, and gathers of weights."""

    config: TextConfig
    machine: Machine

    @abstractmethod
    def phases(self) -> dict[str, PhaseTime]:
        """Returns the time of each phase of a step, in the order of the step."""

    @abstractmethod
    def evaluation(self, count: int) -> PhaseTime:
        """Returns the time of an evaluation on ``count`` prompts or texts."""

    def __post_init__(self) -> None:
        self.assumed, layout = self.machine.assumed, self.config.memory.layout
        self.packed = layout == "packed" or (layout == "auto" and self.machine.on_gpu)

    def trained(self, name: str, shape: Shape) -> TimedModel:
        role = trained_models(self.config)[name]
        return TimedModel(shape, str(role.model.dtype), role.zero.stage == 3, role)

    def overlapped(self, busy: float, links: float) -> float:
        """Returns the duration of computation (``busy``) and gathers (``links``), which partly overlap."""
        return busy + links - self.assumed["overlap"] * min(busy, links)

    def computed(self, seconds: float, launches: float) -> float:
        """Returns the duration of computation and kernel launches, which overlap only on a GPU."""
        return max(seconds, launches) if self.machine.on_gpu else seconds + launches

    def gather(self, model: TimedModel) -> float:
        """Returns the seconds of one gather of all weights of a model that ZeRO-3 has sharded.

        With zero_hpz_partition_size, ranks gather within groups of this size, except for the first gather
        after an optimizer step. The estimate ignores this exception.
        """
        role, ranks, size = model.role, self.machine.ranks, model.each * model.shape.parameters
        raw = {} if role is None else role.deepspeed.get("zero_optimization", {})
        group = int(raw.get("zero_hpz_partition_size", 1))
        group = group if group > 1 else ranks
        seconds = self.machine.gather(size, GATHERS * model.shape.layers, min(group, ranks))
        if role is not None and role.zero.stage == 3 and role.zero.offload_params and self.machine.on_gpu:
            seconds += self.machine.host_copy(size / ranks)
        return seconds

    def exchange(self, model: TimedModel, passes: Passes) -> float:
        """Returns the seconds of exchanges for attention; 0 unless ranks divide the tokens of ``passes``."""
        shape = model.shape
        size = 2 * shape.layers * (shape.width + shape.kv_width) * model.each * passes.tokens
        return self.machine.gather(size, 4 * shape.layers * passes.count, passes.parts)

    def forward(self, model: TimedModel, passes: Passes) -> PhaseTime:
        """Returns the time of forwards without gradients."""
        flops = forward_flops(model.shape, passes.tokens, passes.pairs, passes.head_positions)
        compute = self.machine.products(flops, model.dtype, self.assumed["forward"])
        launches = self.machine.launches(passes.count * model.shape.layers, self.assumed["launch_us"])
        links = passes.count * self.gather(model) if model.sharded else 0.0
        host = self.machine.host_copy(model.offloaded) if self.machine.on_gpu else 0.0
        exchanged = self.exchange(model, passes)
        seconds = self.overlapped(self.computed(compute, launches), links) + exchanged
        links += exchanged
        return PhaseTime(seconds + host, {COMPUTE: compute, LAUNCHES: launches, LINKS: links, HOST: host})

    def update(self, name: str, shape: Shape, steps: int, passes: Passes) -> PhaseTime:
        """Returns the time of ``steps`` optimizer steps, each of which runs ``passes``."""
        model, machine, ranks = self.trained(name, shape), self.machine, self.machine.ranks
        role, each = trained_models(self.config)[name], model.each
        stage, unsharded = role.zero.stage, role.zero.stage == 0 and model.dtype == "fp32"
        # forward, gradients of activations, gradients of weights unless most are frozen, recomputation
        forwards = 2 + (2 * shape.trained > shape.parameters) + bool(role.model.gradient_checkpointing)
        flops = forward_flops(shape, passes.tokens, passes.pairs, passes.head_positions)
        compute = steps * forwards * machine.products(flops, model.dtype, self.assumed["mfu"])
        launches = machine.launches(passes.count * shape.layers, self.assumed["launch_us"])
        launches *= steps * forwards
        sent = shape.trained * (FP32 if ranks > RANKS_16_BIT_SUM else each)
        if stage == 3:  # a gather in the forward, one in the backward, and the gradients
            links = 2 * self.gather(model) + machine.gather(sent, GATHERS * shape.layers)
            links *= passes.count
        elif unsharded:  # all-reduce
            links = 2 * machine.gather(sent)
        else:  # gradients after each forward, or only after the last one; then the new weights
            links = (passes.count if stage == 2 else 1) * machine.gather(sent)
            links += machine.gather(each * shape.trained)
        links *= steps
        share = shape.trained / (1 if unsharded else ranks)
        adam, host = machine.memory(ADAM_BYTES * share, self.assumed["adam"]), 0.0
        if role.zero.offload_optimizer and stage and machine.on_gpu:  # gradients down, new weights up
            adam, host = 0.0, ADAM_BYTES * share / (self.assumed["host_gb"] * 1e9)
            host += machine.host_copy((FP32 + each) * share)
        busy = self.computed(compute, launches)
        waits = self.overlapped(busy, links) if stage == 3 else busy + links
        # in the forward, in the backward, and in the recomputation
        exchanged = (2 + bool(role.model.gradient_checkpointing)) * steps * self.exchange(model, passes)
        waits, links = waits + exchanged, links + exchanged
        return PhaseTime(
            waits + steps * (adam + host),
            {COMPUTE: compute, LAUNCHES: launches, LINKS: links, MEMORY: steps * adam, HOST: steps * host},
        )


@dataclass
class PPOTime(StepTime):
    """Computes the time of the phases of a PPO step."""

    config: PPOConfig
    memory: Estimate  # determines how weights are gathered for generation
    models: Models
    mean_prompt: float  # tokens
    longest: int  # tokens of the longest prompt

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompt = max(1, round(self.assumed.get("prompt") or self.mean_prompt))
        self.longest = max(self.longest, self.prompt)
        limit = self.config.sampling.max_new_tokens
        lengths = response_lengths(rollout_size(self.config), limit, self.assumed.get("response"))
        self.responses = lengths[:: self.machine.ranks]  # of the rank with the longest response
        self.actor = self.trained("actor", self.models.actor)
        self.gathered_once = self.actor.sharded and not self.memory.layerwise
        totals = [self.prompt + response for response in self.responses]
        score_tokens = int(self.config.memory.score_tokens)
        self.scored = passes_over(totals, sum(self.responses), score_tokens, self.packed)
        self.parts = self.config.memory.sequence_parallel
        # of actor, critic and reference; ranks may divide their tokens
        self.divided = passes_over(totals, sum(self.responses), score_tokens, self.packed, self.parts)

    def phases(self) -> dict[str, PhaseTime]:
        """Returns the time of each phase of a PPO step, in the order of the step."""
        config, models = self.config, self.models
        phases = {}
        if self.gathered_once or self.memory.moved:
            phases["switch"] = self.switch()
        phases["generate"] = self.generate(self.responses)
        if scored := self.rewards():
            phases["reward"] = scored
        if old_logprobs_source(config) == "forward":
            phases["old_logprobs"] = self.forward(self.actor, self.divided)
        if models.reference is not None:
            phases["ref_logprobs"] = self.score_by_frozen(models.reference, self.divided)
        elif uses_reference(config) and reference_is_base(config):
            phases["ref_logprobs"] = self.forward(self.actor, self.divided)
        if models.critic is not None:
            phases["values"] = self.forward(self.trained("critic", models.critic), self.divided)
        phases["update_actor"] = self.learn("actor", models.actor)
        if models.critic is not None:
            phases["update_critic"] = self.learn("critic", models.critic)
        return phases

    # -- generation ----------------------------------------------------------------------------------------

    def switch(self) -> PhaseTime:
        """Returns the time to gather all weights for generation and to move optimizer states out and back."""
        links = self.gather(self.actor) if self.gathered_once else 0.0
        host = 2 * self.machine.host_copy(self.memory.moved) if self.memory.moved else 0.0
        return PhaseTime(links + host, {LINKS: links, HOST: host})

    def generate(self, responses: Sequence[int]) -> PhaseTime:
        """Returns the time of generating these responses on one rank.

        With vLLM, a tensor-parallel group generates the responses of all its ranks together: each rank
        computes a share of every matrix product and waits for two all-reduces in each layer.
        """
        shape, dtype, each = self.actor.shape, self.actor.dtype, self.actor.each
        machine, assumed, rollout, engine = self.machine, self.assumed, self.config.rollout, self.memory.vllm
        group = engine.group if engine else 1
        rows = [response for response in responses for _ in range(group)]
        slots = self.slots(len(rows))
        work = decode_work([self.prompt] * len(rows), rows, slots)
        prompts = -(-len(rows) // rollout.samples_per_prompt)
        # the trainer's own backends decode the last token of a prompt
        length, most = (self.prompt, BATCHED_TOKENS) if engine else (max(1, self.prompt - 1), PREFILL_TOKENS)
        prefilled, pairs = prompts * length, prompts * causal_pairs([length])
        prefills = max(-(-prefilled // most), -(-len(rows) // slots))

        flops = forward_flops(shape, prefilled, pairs, 0)
        prefill = machine.products(flops / group, dtype, assumed["forward"])
        flops = forward_flops(shape, work.row_steps, work.contexts, work.row_steps)
        decode = machine.products(flops / group, dtype, assumed["decode_mfu"])
        weights = decode_bytes(shape, work.steps, 0, each) / group
        cache = decode_bytes(shape, 0, work.contexts, each) / min(group, kv_heads(shape))
        read = machine.memory(weights + cache, assumed["decode"])
        eager = engine.eager if engine else self.memory.layerwise or rollout.backend == "hf"
        graphs = machine.on_gpu and not eager
        between = assumed["graph_us"] if graphs else assumed["launch_us"]
        launches = machine.launches(work.steps * (shape.layers + HEAD_LAYERS), between)
        if not machine.on_gpu:
            busy = decode + read + launches
        elif graphs or engine:
            busy = max(decode, read) + launches
        else:
            busy = max(decode, read, launches)
        waits = self.decode_links(work.row_steps, work.steps)
        links = waits + self.decode_links(prefilled, prefills)
        if engine:
            seconds, stepping, of_group = prefill + busy + links, busy + waits, f" of {group} rank(s)"
            held = f"divided among {group} ranks" if group > 1 else "whole"
        else:
            seconds, stepping = self.overlapped(prefill + busy, links), self.overlapped(busy, waits)
            held = "gathered layer by layer for each token" if self.memory.layerwise else "whole"
            of_group = ""
        detail = (
            f"{work.steps} decode steps of {1000 * stepping / work.steps:.1f} ms with {slots} rows{of_group} "
            f"at a time, weights {held}"
        )
        resources = {COMPUTE: prefill + decode, MEMORY: read, LAUNCHES: launches, LINKS: links}
        return PhaseTime(seconds, resources, detail)

    def decode_links(self, tokens: int, forwards: int) -> float:
        """Returns the seconds in which the forwards of generation transfer data between ranks.

        The transfers are gathers of weights layer by layer, or with tensor parallelism two all-reduces of the
        hidden states per layer. An all-reduce is a reduce-scatter and an all-gather.
        """
        shape, engine = self.actor.shape, self.memory.vllm
        if engine is None:
            return forwards * self.gather(self.actor) if self.memory.layerwise else 0.0
        if engine.group == 1:
            return 0.0
        size = 2 * shape.layers * tokens * shape.hidden * self.actor.each
        latency = 2 * shape.layers * forwards * self.assumed["collective_us"] / 1e6
        return 2 * self.machine.gather(size, collectives=0, group=engine.group) + latency

    def slots(self, rows: int) -> int:
        """Returns the number of responses that the backend decodes at the same time."""
        length, engine = self.longest + self.config.sampling.max_new_tokens, self.memory.vllm
        if engine is None:  # continuous_batch.py
            tokens, most = int(self.config.memory.rollout_tokens), fast_batch_size(rows)
        else:
            shards = min(engine.group, kv_heads(self.actor.shape))
            tokens = engine.kv_cache * shards // kv_cache_bytes(self.actor.shape, 1, self.actor.each)
            most = SEQUENCES
        return max(1, min(tokens // length, most, rows))

    # -- scoring and updates -------------------------------------------------------------------------------

    def score_by_frozen(self, model: FrozenModel, passes: Passes) -> PhaseTime:
        """Returns the time in which a frozen model scores the rollout."""
        dtype = "fp32" if model.each == FP32 else "bf16"
        uploaded = model.resident(self.machine.ranks) if model.offloaded else 0
        return self.forward(TimedModel(model.shape, dtype, model.sharded, None, uploaded), passes)

    def rewards(self) -> PhaseTime | None:
        """Returns the time of the forwards of the training reward's models, or None if it has no models.

        For a reward model that shares weights with the critic, the time of a critic's forward is used.
        """
        critic = self.models.critic
        shared = [
            self.forward(self.trained("critic", critic), self.scored)
            for key, _ in reward_models(self.config.reward)
            if f"{key}.path" not in self.models.rewards and critic is not None
        ]
        own = [model for key, model in self.models.rewards.items() if key.startswith("reward.")]
        times = [self.score_by_frozen(model, self.scored) for model in own] + shared
        return added(times) if times else None

    def learn(self, name: str, shape: Shape) -> PhaseTime:
        """Returns the time of all optimizer steps of a trained model on one rollout."""
        config, size = self.config, rollout_size(self.config)
        minibatches = size // (config.algo.minibatch_size or size)
        responses = self.responses[::minibatches]
        totals = [self.prompt + response for response in responses]
        passes = passes_over(totals, sum(responses), int(config.memory.train_tokens), self.packed, self.parts)
        return self.update(name, shape, config.algo.epochs * minibatches, passes)

    def evaluation(self, count: int) -> PhaseTime:
        """Returns the time of responses to ``count`` prompts and their scores."""
        rows, limit = -(-count // self.machine.ranks), self.config.sampling.max_new_tokens
        responses = response_lengths(rows, limit, self.assumed.get("response"))
        scored = self.rewards()
        share = len(responses) / len(self.responses)
        rewards = [] if scored is None else [scored.times(share)]
        return added([self.generate(responses), *rewards])


@dataclass
class FinetuneTime(StepTime):
    """Computes the time of an optimizer step of supervised fine-tuning or of a reward model."""

    name: str
    shape: Shape
    rows: int  # texts of the batch over all ranks
    longest: int  # tokens of each of them

    def phases(self) -> dict[str, PhaseTime]:
        """Returns the time of the update, which is the only phase."""
        passes = self.over(self.rows, int(self.config.memory.train_tokens))
        return {f"update_{self.name}": self.update(self.name, self.shape, 1, passes)}

    def evaluation(self, count: int) -> PhaseTime:
        """Returns the time of the forwards over ``count`` held-out texts."""
        passes = self.over(count, int(self.config.memory.score_tokens))
        return self.forward(self.trained(self.name, self.shape), passes)

    def over(self, texts: int, budget: int) -> Passes:
        """Returns the forwards of one rank; ``texts`` is the number of texts on all ranks together."""
        rows, length = -(-texts // self.machine.ranks), round(self.assumed.get("prompt") or self.longest)
        return passes_over([length] * rows, rows * length if self.shape.head else rows, budget, self.packed)


def added(times: Sequence[PhaseTime]) -> PhaseTime:
    names = dict.fromkeys(name for each in times for name in each.resources)
    resources = {name: sum(each.resources.get(name, 0.0) for each in times) for name in names}
    return PhaseTime(sum(each.seconds for each in times), resources)


# -- lengths of responses, and the work of decoding them ---------------------------------------------------


@dataclass(frozen=True)
class DecodeWork:
    """Work of decoding a number of rows on one rank."""

    steps: int  # decode steps, each of which reads all weights
    row_steps: int  # generated tokens: rows of a step, summed over the steps
    contexts: int  # cached positions that are read, summed over steps and rows


def response_lengths(count: int, limit: int, mean: float | None) -> list[int]:
    """Returns ``count`` response lengths, longest first.

    Without ``mean`` all of them are ``limit``. Otherwise the lengths are equally spaced quantiles of a
    geometric distribution with this mean: a response ends after each token with a constant probability.
    Lengths above ``limit`` are then cut.
    """
    if mean is None:
        return [limit] * count
    if mean <= 1:
        return [1] * count
    survival = math.log1p(-1 / mean)  # of one more token
    quantiles = ((i + 0.5) / count for i in range(count))
    return [min(limit, max(1, math.ceil(math.log(share) / survival))) for share in quantiles]


def decode_work(prompts: Sequence[int], responses: Sequence[int], slots: int) -> DecodeWork:
    """Counts the work of decoding at most ``slots`` rows at a time; as one row ends, the next begins.

    As in rollout/continuous_batch.py, each row of a step reads as many cached positions as the longest one.
    """
    waiting = list(zip(prompts, responses, strict=True))[::-1]  # the next row is the last of the list
    live: list[tuple[int, int]] = []  # (the step at which the row ends, cached positions at step 0)
    now = row_steps = contexts = 0
    while waiting or live:
        while waiting and len(live) < slots:
            prompt, response = waiting.pop()
            heapq.heappush(live, (now + response, prompt - now))
        steps, width = live[0][0] - now, len(live)
        longest = max(offset for _, offset in live) + now
        row_steps += steps * width
        contexts += width * (steps * longest + steps * (steps - 1) // 2)
        now = live[0][0]
        while live and live[0][0] == now:
            heapq.heappop(live)
    return DecodeWork(now, row_steps, contexts)


# -- the report ------------------------------------------------------------------------------------------

STATE_BYTES = 12  # bytes per trained parameter in a checkpoint: an fp32 weight and two moments


@dataclass(frozen=True)
class Plan:
    """Inputs for the estimates of the memory, time and disk space of a run."""

    estimate: Callable[[Any], Estimate]  # for this config, or for one with other memory settings
    step_time: Callable[[Any, Machine, Estimate], StepTime]
    main: Shape  # of the model with whose sizes the rates of a CPU are measured
    evaluated: int  # prompts, rows or pairs of one evaluation
    flops: int  # of one step over all ranks
    checkpoint: int  # bytes of one checkpoint
    exported: list[int]  # bytes of each model that the run exports


def time_report(config: Config, plan: Plan, machine: Machine, memory: Estimate) -> str:
    """Returns lines on the time of each phase, the bounding resources, the whole run and the assumptions."""
    step_time = plan.step_time(config, machine, memory)
    phases = step_time.phases()
    step = sum(phase.seconds for phase in phases.values())
    lines = ["time       estimated, in seconds", *phase_lines(phases)]
    total, settings = (config.run.steps or 0) * step, config.checkpoint
    saves = 0.0
    if settings.every != 0:  # by steps, by minutes, and at the end of the run
        saves = (config.run.steps or 0) / settings.every if settings.every else 1.0
        saves = max(saves, total / (60 * settings.minutes) if settings.minutes else 0.0)
    if plan.checkpoint and saves:
        each = plan.checkpoint / (machine.assumed["disk_gb"] * 1e9)
        total += saves * each
        lines.append(_row("checkpoint", _seconds(each), "", f"disk; {saves:.0f} in the run"))
    evaluations = 2 + (config.run.steps or 0) // config.eval.every if config.eval.every else 2
    if plan.evaluated:
        evaluation = step_time.evaluation(plan.evaluated)
        total += evaluations * evaluation.seconds
        bound = f"{evaluation.bound}; {evaluations} in the run"
        lines.append(_row("eval", _seconds(evaluation.seconds), "", bound))
    if config.run.steps is not None:
        hours = total / 3600
        cost = f", {hours * machine.ranks:,.1f} GPU-hours" if machine.on_gpu else ""
        lines.append(f"run        {config.run.steps} steps: {hours:,.1f} hours{cost}")
    device, assumed = machine.device, machine.assumed
    where = "never measured on one" if machine.on_gpu else "from W1 and W2"
    lines += [
        f"rates      {device.name}: {device.bf16:,.4g} TFLOPS in 16 bits, {device.fp32:,.4g} in fp32; GB/s: "
        f"{device.bandwidth:,.4g} memory, {device.node_link:.4g} in the node, {device.host_link:.4g} to the "
        f"CPU, {device.network:.4g} network; {device.source}",
        f"assumed    {where}; set by --assume NAME=VALUE ...",
    ]
    for name, option in OPTIONS.items():
        value = format(assumed[name], "g") if name in assumed else "-"
        lines.append(f"  {name:<14}{value:>6}  {option.description}")
    return "\n".join(lines)


def phase_lines(phases: Mapping[str, PhaseTime]) -> list[str]:
    """Returns the table of the phases of a step, with the resources that bound them."""
    step = sum(phase.seconds for phase in phases.values())
    lines = [_row("phase", "seconds", "share", "bound by")]
    for name, phase in phases.items():
        detail = f": {phase.detail}" if phase.detail else ""
        share = f"{100 * phase.seconds / step:.0f} %"
        lines.append(_row(name, _seconds(phase.seconds), share, phase.bound + detail))
    longest = max(phases, key=lambda name: phases[name].seconds)
    return [*lines, _row("step", _seconds(step), "", f"mostly {longest}, by {phases[longest].bound}")]


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.3f}"


def _row(name: str, seconds: str, share: str, bound: str) -> str:
    return f"  {name:<14}{seconds:>10}{share:>8}   {bound}"
