"""Estimates the seconds of each phase of a step, from FLOPs, bytes moved, and the rates of a machine.

Phases have the names of the trainer's time/* metrics. The estimate is that of the
rank with the longest response of the step, for which the other ranks wait. A phase is bound by the resource
that would take longest if nothing overlapped.

The estimate leaves out reward functions and models with their own code, texts of algo.ptx, averaged weights,
the exchange of experience, the recording of CUDA graphs, and all work of Python that a GPU does not wait for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ppo_ds.compute.batching import padded_tokens, plan_forwards
from ppo_ds.compute.sizes import Shape, causal_pairs, decode_bytes, forward_flops
from ppo_ds.config.schema import (
    Config,
    TrainedConfig,
    reference_is_base,
    reward_models,
    rollout_size,
    trained_models,
    uses_reference,
)
from ppo_ds.engine.zero import RANKS_16_BIT_SUM
from ppo_ds.planning.decode_work import decode_work, response_lengths
from ppo_ds.planning.forwards import old_logprobs_source
from ppo_ds.planning.model_memory import FP32, kv_cache_bytes
from ppo_ds.planning.ppo_memory import Models
from ppo_ds.planning.run_memory import Estimate, FrozenModel
from ppo_ds.planning.vllm_memory import BATCHED_TOKENS, SEQUENCES, VllmMemory, kv_heads
from ppo_ds.rollout.continuous_batch import PREFILL_TOKENS, fast_batch_size
from ppo_ds.tools.doctor.rates import Machine

# resources that can bound a phase
COMPUTE, MEMORY, LINKS = "compute", "memory bandwidth", "links"
LAUNCHES, HOST, DISK = "launch overhead", "CPU memory and PCIe", "disk"
GATHERS = 7  # collectives of ZeRO-3 for each decoder layer: one for each of its matrices
HEAD_LAYERS = 1  # the kernels of the head and the sampler, in decoder layers
# bytes that AdamW reads and writes for each trained parameter: master weight, two moments, gradient, weight
ADAM_BYTES = 30


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of a phase, and the seconds that each resource is busy in it."""

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
    """Forwards of one rank over whole rows."""

    count: int
    tokens: int  # padding included
    pairs: int
    head_positions: int


def passes_over(lengths: Sequence[int], head_positions: int, budget: int, packed: bool) -> Passes:
    """Divides rows into forwards as the trainer does."""
    rows = torch.tensor(lengths)
    plan = plan_forwards(rows, budget, packed=packed)
    groups = [rows[group] for group in plan]
    widths = [group.tolist() if packed else [int(group.max())] * len(group) for group in groups]
    return Passes(
        len(groups),
        sum(padded_tokens(group, packed) for group in groups),
        sum(causal_pairs(each) for each in widths),
        head_positions,
    )


class StepTime(ABC):
    """Computes the time of the parts that all stages have: forwards, updates, and gathers of weights."""

    @abstractmethod
    def phases(self) -> dict[str, PhaseTime]:
        """Returns the time of each phase of a step, in the order of the step."""

    @abstractmethod
    def evaluation(self, count: int) -> PhaseTime:
        """Returns the time of an evaluation on ``count`` prompts or texts."""

    def __init__(self, config: Config, machine: Machine):
        self.config, self.machine, self.assumed = config, machine, machine.assumed
        layout = config.memory.layout
        self.packed = layout == "packed" or (layout == "auto" and machine.on_gpu)

    def dtype(self, role: str) -> str:
        return str(trained_models(self.config)[role].model.dtype)

    def overlapped(self, busy: float, links: float) -> float:
        """Returns the seconds of computation and gathers that partly hide each other."""
        return busy + links - self.assumed.overlap * min(busy, links)

    def computed(self, seconds: float, launches: float) -> float:
        """Returns the seconds of a forward: a GPU computes while the host launches the next kernels."""
        return max(seconds, launches) if self.machine.on_gpu else seconds + launches

    def gather(self, shape: Shape, each: int, role: TrainedConfig | None) -> float:
        """Returns the seconds of one gather of all weights of a model that ZeRO-3 has sharded.

        With zero_hpz_partition_size, only the first gather after an optimizer step crosses groups of ranks.
        The estimate counts this gather like the later ones.
        """
        raw = {} if role is None else role.deepspeed.get("zero_optimization", {})
        group = int(raw.get("zero_hpz_partition_size", 1))
        group = group if group > 1 else self.machine.ranks
        seconds = self.machine.gather(
            each * shape.parameters, GATHERS * shape.layers, min(group, self.machine.ranks)
        )
        if role is not None and role.zero.stage == 3 and role.zero.offload_params and self.machine.on_gpu:
            seconds += self.machine.host_copy(each * shape.parameters / self.machine.ranks)
        return seconds

    def forward(
        self, shape: Shape, dtype: str, each: int, passes: Passes, sharded: bool, role: TrainedConfig | None
    ) -> PhaseTime:
        """Returns the time of forwards without gradients."""
        flops = forward_flops(shape, passes.tokens, passes.pairs, passes.head_positions)
        compute = self.machine.products(flops, dtype, self.assumed.forward)
        launches = self.machine.launches(passes.count * shape.layers, self.assumed.launch_us)
        links = passes.count * self.gather(shape, each, role) if sharded else 0.0
        seconds = self.overlapped(self.computed(compute, launches), links)
        return PhaseTime(seconds, {COMPUTE: compute, LAUNCHES: launches, LINKS: links})

    def update(self, name: str, shape: Shape, steps: int, passes: Passes) -> PhaseTime:
        """Returns the time of ``steps`` optimizer steps, each of which runs ``passes``."""
        role, machine = trained_models(self.config)[name], self.machine
        dtype, stage, ranks = self.dtype(name), role.zero.stage, machine.ranks
        each = FP32 if dtype == "fp32" else 2
        # the forward, the gradients of activations, those of weights unless most are frozen, recomputation
        forwards = 2 + (2 * shape.trained > shape.parameters) + bool(role.model.gradient_checkpointing)
        flops = forward_flops(shape, passes.tokens, passes.pairs, passes.head_positions)
        compute = steps * forwards * machine.products(flops, dtype, self.assumed.mfu)
        launches = steps * forwards * machine.launches(passes.count * shape.layers, self.assumed.launch_us)
        sent = shape.trained * (FP32 if ranks > RANKS_16_BIT_SUM else each)
        if stage == 3:  # a gather in the forward, one in the backward, and the gradients
            links = 2 * self.gather(shape, each, role) + machine.gather(sent, GATHERS * shape.layers)
            links *= passes.count
        elif stage == 0 and dtype == "fp32":  # all-reduce
            links = 2 * machine.gather(sent)
        else:  # gradients after each forward, or only after the last one; then the new weights
            links = (passes.count if stage == 2 else 1) * machine.gather(sent)
            links += machine.gather(each * shape.trained)
        links *= steps
        share = shape.trained / (1 if stage == 0 and dtype == "fp32" else ranks)
        adam, host = machine.memory(ADAM_BYTES * share, self.assumed.adam), 0.0
        if role.zero.offload_optimizer and stage and machine.on_gpu:  # gradients down, new weights up
            adam, host = 0.0, machine.host_memory(ADAM_BYTES * share)
            host += machine.host_copy((FP32 + each) * share)
        busy = self.computed(compute, launches)
        waits = self.overlapped(busy, links) if stage == 3 else busy + links
        return PhaseTime(
            waits + steps * (adam + host),
            {COMPUTE: compute, LAUNCHES: launches, LINKS: links, MEMORY: steps * adam, HOST: steps * host},
        )


class PPOTime(StepTime):
    """Computes the time of the phases of a PPO step."""

    def __init__(
        self,
        config: Config,
        machine: Machine,
        memory: Estimate,
        *,
        models: Models,
        prompt: float,
        longest: int,
    ):
        """Initializes the estimate.

        Args:
            memory: The memory estimate, which determines how weights are gathered for generation.
            prompt: Mean number of tokens of a prompt.
            longest: Number of tokens of the longest prompt.
        """
        super().__init__(config, machine)
        self.models, self.memory = models, memory
        self.prompt = max(1, round(machine.assumed.prompt or prompt))
        self.longest = max(longest, self.prompt)
        limit = config.sampling.max_new_tokens
        lengths = response_lengths(rollout_size(config), limit, machine.assumed.response)
        self.responses = lengths[:: machine.ranks]  # of the rank with the longest response
        self.each = FP32 if self.dtype("actor") == "fp32" else 2

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
            phases["old_logprobs"] = self.score_by("actor", models.actor)
        if models.reference is not None:
            phases["ref_logprobs"] = self.score_by_frozen(models.reference)
        elif uses_reference(config) and reference_is_base(config):
            phases["ref_logprobs"] = self.score_by("actor", models.actor)
        if models.critic is not None:
            phases["values"] = self.score_by("critic", models.critic)
        phases["update_actor"] = self.learn("actor", models.actor)
        if models.critic is not None:
            phases["update_critic"] = self.learn("critic", models.critic)
        return phases

    # -- generation ----------------------------------------------------------------------------------------

    @property
    def layerwise(self) -> bool:
        return self.memory.layerwise

    @property
    def gathered_once(self) -> bool:
        return self.config.actor.zero.stage == 3 and not self.memory.layerwise

    def switch(self) -> PhaseTime:
        """Returns the time of one gather of all weights, and of moving optimizer states out and back."""
        links = self.gather(self.models.actor, self.each, self.config.actor) if self.gathered_once else 0.0
        host = 2 * self.machine.host_copy(self.memory.moved) if self.memory.moved else 0.0
        return PhaseTime(links + host, {LINKS: links, HOST: host})

    def generate(self, responses: Sequence[int]) -> PhaseTime:
        """Returns the time of generating these responses on one rank."""
        if self.memory.vllm is not None:
            return self.generate_by_engine(responses, self.memory.vllm)
        shape, machine, dtype = self.models.actor, self.machine, self.dtype("actor")
        slots = self.slots(len(responses))
        work = decode_work([self.prompt] * len(responses), responses, slots)
        prompts = -(-len(responses) // self.config.rollout.samples_per_prompt)
        prefilled = prompts * max(1, self.prompt - 1)
        pairs = prompts * causal_pairs([max(1, self.prompt - 1)])
        prefills = max(-(-prefilled // PREFILL_TOKENS), -(-len(responses) // slots))
        forwards = work.steps + prefills

        prefill = machine.products(forward_flops(shape, prefilled, pairs, 0), dtype, self.assumed.forward)
        decode = machine.products(
            forward_flops(shape, work.row_steps, work.contexts, work.row_steps),
            dtype,
            self.assumed.decode_mfu,
        )
        read = machine.memory(decode_bytes(shape, work.steps, work.contexts, self.each), self.assumed.decode)
        graphs = machine.on_gpu and not self.layerwise and self.config.rollout.backend != "hf"
        between = self.assumed.graph_us if graphs else self.assumed.launch_us
        launches = machine.launches(work.steps * (shape.layers + HEAD_LAYERS), between)
        if not machine.on_gpu:
            busy = prefill + decode + read + launches
        elif graphs:
            busy = prefill + max(decode, read) + launches
        else:
            busy = prefill + max(decode, read, launches)
        links = forwards * self.gather(shape, self.each, self.config.actor) if self.layerwise else 0.0
        seconds = self.overlapped(busy, links)
        token = self.overlapped(busy - prefill, links * work.steps / forwards) / work.steps
        held = "gathered layer by layer for each token" if self.layerwise else "whole"
        detail = (
            f"{work.steps} decode steps of {1000 * token:.1f} ms with {slots} rows at a time, weights {held}"
        )
        resources = {COMPUTE: prefill + decode, MEMORY: read, LAUNCHES: launches, LINKS: links}
        return PhaseTime(seconds, resources, detail)

    def generate_by_engine(self, responses: Sequence[int], engine: VllmMemory) -> PhaseTime:
        """Returns the time of generating these responses with vLLM.

        The ranks of a tensor-parallel group generate the responses of all of them together: each computes a
        share of every matrix product and waits for two all-reduces in each layer.
        """
        shape, machine, dtype = self.models.actor, self.machine, self.dtype("actor")
        settings, length = self.config.rollout.vllm, self.longest + self.config.sampling.max_new_tokens
        group = settings.tensor_parallel
        shards = min(group, kv_heads(shape))
        rows = [response for response in responses for _ in range(group)]
        cached = engine.kv_cache * shards // kv_cache_bytes(shape, 1, self.each)
        slots = max(1, min(cached // length, SEQUENCES, len(rows)))
        work = decode_work([self.prompt] * len(rows), rows, slots)
        prompts = -(-len(rows) // self.config.rollout.samples_per_prompt)
        prefilled, pairs = prompts * self.prompt, prompts * causal_pairs([self.prompt])
        prefills = max(-(-prefilled // BATCHED_TOKENS), -(-len(rows) // slots))

        prefill = machine.products(
            forward_flops(shape, prefilled, pairs, 0) / group, dtype, self.assumed.forward
        )
        decode = machine.products(
            forward_flops(shape, work.row_steps, work.contexts, work.row_steps) / group,
            dtype,
            self.assumed.decode_mfu,
        )
        weights = decode_bytes(shape, work.steps, 0, self.each) / group
        cache = decode_bytes(shape, 0, work.contexts, self.each) / shards
        read = machine.memory(weights + cache, self.assumed.decode)
        graphs = machine.on_gpu and not settings.enforce_eager
        between = self.assumed.graph_us if graphs else self.assumed.launch_us
        launches = machine.launches(work.steps * (shape.layers + HEAD_LAYERS), between)
        waits = self.all_reduces(work.row_steps, work.steps, group)
        stepping = (max(decode, read) if machine.on_gpu else decode + read) + launches + waits
        token = stepping / work.steps
        links = waits + self.all_reduces(prefilled, prefills, group)
        held = f"divided among {group} ranks" if group > 1 else "whole"
        detail = (
            f"{work.steps} decode steps of {1000 * token:.1f} ms with {slots} rows of {group} rank(s) at a "
            f"time, weights {held}"
        )
        resources = {COMPUTE: prefill + decode, MEMORY: read, LAUNCHES: launches, LINKS: links}
        return PhaseTime(prefill + stepping + links - waits, resources, detail)

    def all_reduces(self, tokens: int, forwards: int, group: int) -> float:
        """Returns the seconds of the all-reduces of tensor parallelism, two in each layer of a forward.

        An all-reduce is a reduce-scatter and a gather of the hidden states.
        """
        if group == 1:
            return 0.0
        shape = self.models.actor
        size = 2 * shape.layers * tokens * shape.hidden * self.each
        latency = 2 * shape.layers * forwards * self.assumed.collective_us / 1e6
        return 2 * self.machine.gather(size, collectives=0, group=group) + latency

    def slots(self, rows: int) -> int:
        """Returns the number of responses that are decoded at the same time, as continuous_batch.py does."""
        length = self.longest + self.config.sampling.max_new_tokens
        return max(1, min(int(self.config.memory.rollout_tokens) // length, fast_batch_size(rows), rows))

    # -- scoring and updates -------------------------------------------------------------------------------

    @cached_property
    def scored(self) -> Passes:
        """The forwards over the rollout of one rank."""
        totals = [self.prompt + response for response in self.responses]
        return passes_over(totals, sum(self.responses), int(self.config.memory.score_tokens), self.packed)

    def score_by(self, name: str, shape: Shape) -> PhaseTime:
        """Returns the time in which a trained model scores the rollout."""
        role, dtype = trained_models(self.config)[name], self.dtype(name)
        each = FP32 if dtype == "fp32" else 2
        return self.forward(shape, dtype, each, self.scored, role.zero.stage == 3, role)

    def score_by_frozen(self, model: FrozenModel) -> PhaseTime:
        """Returns the time in which a frozen model scores the rollout."""
        dtype = "fp32" if model.each == FP32 else "bf16"
        found = self.forward(model.shape, dtype, model.each, self.scored, model.sharded, None)
        if not (model.offloaded and self.machine.on_gpu):
            return found
        host = self.machine.host_copy(model.resident(self.machine.ranks))
        return PhaseTime(found.seconds + host, {**found.resources, HOST: host})

    def rewards(self) -> PhaseTime | None:
        """Returns the time of the training reward's models.

        A model that shares the critic's weights counts as a critic.
        """
        shared = [
            self.score_by("critic", self.models.critic)
            for key, _ in reward_models(self.config.reward)
            if f"{key}.path" not in self.models.rewards and self.models.critic is not None
        ]
        own = [model for key, model in self.models.rewards.items() if key.startswith("reward.")]
        times = [self.score_by_frozen(model) for model in own] + shared
        return added(times) if times else None

    def learn(self, name: str, shape: Shape) -> PhaseTime:
        """Returns the time of all optimizer steps of a trained model on one rollout."""
        config, size = self.config, rollout_size(self.config)
        minibatches = size // (config.algo.minibatch_size or size)
        responses = self.responses[::minibatches]
        totals = [self.prompt + response for response in responses]
        passes = passes_over(totals, sum(responses), int(config.memory.train_tokens), self.packed)
        return self.update(name, shape, config.algo.epochs * minibatches, passes)

    def evaluation(self, count: int) -> PhaseTime:
        """Returns the time of responses to ``count`` prompts and their scores."""
        responses = response_lengths(
            -(-count // self.machine.ranks), self.config.sampling.max_new_tokens, self.assumed.response
        )
        scored = self.rewards()
        share = len(responses) / len(self.responses)
        rewards = [] if scored is None else [scored.times(share)]
        return added([self.generate(responses), *rewards])


class FinetuneTime(StepTime):
    """Computes the time of an optimizer step of supervised fine-tuning or of a reward model."""

    def __init__(self, config: Config, machine: Machine, name: str, shape: Shape, rows: int, longest: int):
        """Initializes the estimate; ``rows`` texts of ``longest`` tokens are the batch over all ranks."""
        super().__init__(config, machine)
        self.name, self.shape, self.longest = name, shape, longest
        self.rows = -(-rows // machine.ranks)

    def phases(self) -> dict[str, PhaseTime]:
        """Returns the time of the only phase."""
        passes = self.over(self.rows, int(self.config.memory.train_tokens))
        return {f"update_{self.name}": self.update(self.name, self.shape, 1, passes)}

    def evaluation(self, count: int) -> PhaseTime:
        """Returns the time of the loss of ``count`` held-out texts."""
        role, dtype = trained_models(self.config)[self.name], self.dtype(self.name)
        passes = self.over(-(-count // self.machine.ranks), int(self.config.memory.score_tokens))
        each = FP32 if dtype == "fp32" else 2
        return self.forward(self.shape, dtype, each, passes, role.zero.stage == 3, role)

    def over(self, rows: int, budget: int) -> Passes:
        length = round(self.assumed.prompt or self.longest)
        return passes_over([length] * rows, rows * length if self.shape.head else rows, budget, self.packed)


def added(times: Sequence[PhaseTime]) -> PhaseTime:
    """Returns the sum of phases."""
    names = dict.fromkeys(name for each in times for name in each.resources)
    resources = {name: sum(each.resources.get(name, 0.0) for each in times) for name in names}
    return PhaseTime(sum(each.seconds for each in times), resources)
