"""Estimates the memory of a run on one rank, by phase, from the config and the shapes of the models.

No weights are loaded. ops/memory.py computes the parts; this module adds up the parts that are in memory at
the same time. Phases have the names of the trainer's time/* metrics. RunMemory has the parts that all stages
share; the estimate of a PPO run is here, that of the other stages is in finetune_memory.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

import torch

from ppo_ds.assemble.algorithm import kept_roles
from ppo_ds.assemble.vllm_memory import asleep, engine_memory, synced_bytes
from ppo_ds.compute import matmul
from ppo_ds.compute.linear_logprobs import CPU_BLOCK, GPU_BLOCK, KEPT
from ppo_ds.config.schema import Config, TrainedConfig, averaged_models, rollout_size, trained_models
from ppo_ds.engine.gather import GATHER_ELEMENTS
from ppo_ds.engine.memory_budget import GenerationPlan, MemoryBudget, plan_generation
from ppo_ds.engine.zero import communication_dtype
from ppo_ds.models.linear import pays
from ppo_ds.models.loading import torch_dtype
from ppo_ds.ops.memory import (
    BUCKET,
    FP32,
    PREFETCH,
    REUSE,
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
    trained_engine,
)
from ppo_ds.ops.vllm_memory import VllmMemory
from ppo_ds.rollout.continuous_batch import COLUMNS, PREFILL_TOKENS, fast_batch_size
from ppo_ds.rollout.graphs import KEPT_GRAPHS

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Memory of a GPU besides tensors. vLLM's pull request 10511 reports 1.79 GiB on one GPU of 80 GB (the CUDA
# context, kernels, workspaces) and 3.58 GiB on two, with NCCL. Not measured with this trainer.
CONTEXT = int(1.8 * 2**30)
# Of NCCL, for each of the two communicators: that of the run, and that of DeepSpeed. By NCCL's issues 864 and
# 1685, a communicator takes 0.5 to 1.6 GiB, depending on channels and algorithms.
COMMUNICATOR = int(0.9 * 2**30)
COMMUNICATORS = 2
# Executable CUDA graph of a decode step, besides its tensors: by vLLM's pull requests 11349 and 22897, 6 to
# 28 MiB.
GRAPH = 28 * 2**20
USABLE = 0.95  # share of the rest that tensors can use; fragmentation takes the remainder


@dataclass(frozen=True)
class FrozenModel:
    """A model that only scores."""

    shape: Shape
    each: int  # bytes per weight
    sharded: bool
    offloaded: bool

    def resident(self, ranks: int) -> int:
        return self.each * ceil(self.shape.parameters / (ranks if self.sharded else 1))


@dataclass(frozen=True)
class Models:
    """The shapes of all roles. A role that shares the weights of another has no entry."""

    actor: Shape
    critic: Shape | None
    reference: FrozenModel | None
    rewards: Mapping[str, FrozenModel]  # by their config key
    reward_length: int  # tokens of the longest text that the reward models read


@dataclass(frozen=True)
class Hardware:
    """The ranks of a run and the memory of each GPU."""

    ranks: int
    gpu_memory: int | None  # bytes; None: the run is on CPUs

    @classmethod
    def measured(cls, ranks: int, tensor_memory: int) -> Hardware:
        """Returns the hardware of a run on GPUs whose tensors may take ``tensor_memory`` bytes per rank."""
        return cls(ranks, tensor_memory + cls(ranks, 0).context)

    @property
    def context(self) -> int:
        """Bytes of a GPU that the CUDA context and NCCL take."""
        return CONTEXT + (COMMUNICATORS * COMMUNICATOR if self.ranks > 1 else 0)

    @property
    def on_gpu(self) -> bool:
        return self.gpu_memory is not None

    @property
    def usable(self) -> int | None:
        """Bytes of a GPU that tensors can use; None if the run is on CPUs."""
        return None if self.gpu_memory is None else int((self.gpu_memory - self.context) * USABLE)


@dataclass(frozen=True)
class Estimate:
    """The estimated memory of one rank, in bytes."""

    resident: dict[str, int]  # by role: memory on the device between two phases
    phases: dict[str, int]  # peak of each phase, resident memory included
    host: int  # CPU memory for offloading, for runs on GPUs
    engines: dict[str, EngineMemory]
    generation: str  # how the weights are held for decoding
    layerwise: bool = False  # each forward of generation gathers the weights layer by layer
    moved: int = 0  # bytes of optimizer states that are in CPU memory during generation
    row_tokens: int = 0  # tokens of the longest row
    rows: int = 0  # rows that a rank decodes in one phase; 0 without generation
    vllm: VllmMemory | None = None  # of the inference engine, if it has one

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])


def estimate(
    config: Config, models: Models, hardware: Hardware, longest_prompt: int | None = None
) -> Estimate:
    """Estimates the memory of a run on one rank.

    Args:
        longest_prompt: Number of tokens of the longest prompt; None uses data.max_prompt_tokens.
    """
    return _Estimator(config, models, hardware, longest_prompt or config.data.max_prompt_tokens).estimate()


class RunMemory:
    """Computes the memory of the parts that all stages have: engines, loading, forwards and backwards."""

    def __init__(
        self,
        config: Config,
        hardware: Hardware,
        shapes: Mapping[str, Shape],
        frozen: Mapping[str, FrozenModel],
        *,
        length: int,
        rows: int,
        unit: int = 1,
    ):
        """Initializes the estimate.

        Args:
            shapes: The shapes of the trained models, by role.
            length: Tokens of the longest row.
            rows: Rows of an optimizer step on one rank.
            unit: Rows that a forward keeps together.
        """
        self.config, self.hardware, self.shapes, self.frozen = config, hardware, shapes, frozen
        self.length, self.update_rows, self.unit = length, rows, unit
        self.block = GPU_BLOCK if hardware.on_gpu else CPU_BLOCK
        roles = trained_models(config)
        self.engines = {name: self._engine(roles[name], shape) for name, shape in shapes.items()}

    def _engine(self, role: TrainedConfig, shape: Shape) -> EngineMemory:
        dtype, zero = str(role.model.dtype), role.zero
        raw = role.deepspeed.get("zero_optimization", {})
        bucket = int(raw.get("reduce_bucket_size", BUCKET))
        communication = communication_dtype(dtype, self.hardware.ranks, role.deepspeed)
        engine = trained_engine(
            shape,
            stage=zero.stage,
            each=BYTES[dtype],
            communication=BYTES.get(communication, FP32),  # DeepSpeed refuses other names when a run starts
            scaled=dtype == "fp16",
            ranks=self.hardware.ranks,
            offload_optimizer=zero.offload_optimizer,
            offload_params=zero.offload_params,
            # DeepSpeed allocates the whole bucket whatever the size of the model: a GPU reserves all of it, a
            # CPU only the pages that are written to
            bucket=bucket if self.hardware.on_gpu else min(bucket, shape.trained),
            separate_host=self.hardware.on_gpu,
        )
        group = min(int(raw.get("zero_hpz_partition_size", 1)), self.hardware.ranks)
        if zero.stage == 3 and group > 1:  # a second shard, of the copy of the weights in each group of ranks
            copies = BYTES[dtype] * ceil(shape.parameters / group)
            if zero.offload_params and self.hardware.on_gpu:
                return replace(engine, host=engine.host + copies)
            return replace(engine, weights=engine.weights + copies)
        return engine

    def _role(self, role: str) -> tuple[TrainedConfig, Shape, int]:
        """Returns the config of a trained role, its shape and the bytes per weight."""
        section = trained_models(self.config)[role]
        return section, self.shapes[role], BYTES[str(section.model.dtype)]

    def copy_of(self, role: str) -> int:
        """Returns the bytes of a copy of a role's trained weights in fp32."""
        section, shape, _ = self._role(role)
        return FP32 * (
            shape.trained if section.zero.stage == 0 else ceil(shape.trained / self.hardware.ranks)
        )

    def averages(self) -> dict[str, int]:
        """Returns the bytes of the averaged weights as ``ema``, if the run has them."""
        for name, role in averaged_models(self.config).items():
            if role.ema.decay is not None:
                return {"ema": self.copy_of(name)}
        return {}

    def head_positions(self, tokens: int) -> int:
        """Counts the positions among ``tokens`` that the head of a model is applied to."""
        return tokens

    def forward_tokens(self, budget: int, rows: int) -> int:
        """Counts the tokens of the largest forward: whole units of rows within the budget, at least one."""
        return _forward_tokens(budget, rows // self.unit, self.unit * self.length)

    def loading(self) -> int:
        """Computes the peak while models are loaded one after the other.

        An engine below ZeRO stage 3 copies its trained weights into one flat tensor before the old ones are
        freed.
        """
        loaded = peak = 0
        for role, engine in self.engines.items():
            section, shape, each = self._role(role)
            stage = section.zero.stage
            flat = each * shape.trained if stage in (1, 2) or (stage == 0 and each < FP32) else 0
            peak = max(peak, loaded + engine.weights + flat)
            loaded += engine.resident - engine.moments
        for model in self.frozen.values():
            if not (model.offloaded and self.hardware.on_gpu):
                loaded += model.resident(self.hardware.ranks)
        return max(peak, loaded)

    def trained_forward(self, role: str, tokens: int, prefetch: bool) -> int:
        """Computes the peak of a forward of a trained role without gradients."""
        section, shape, each = self._role(role)
        gathered = _gathered(shape, each, prefetch) if section.zero.stage == 3 else 0
        return gathered + self.forward(shape, tokens, self.length, each)

    def forward(self, shape: Shape, tokens: int, length: int, each: int) -> int:
        """Computes the peak of a forward without gradients."""
        positions = self.head_positions(tokens)
        head = 0
        if shape.head:
            output = output_bytes(each, self.hardware.on_gpu)
            head = head_forward_bytes(shape, positions, each, output, self.block)
        return max(inference_activation_bytes(shape, tokens, length, each), head)

    def graph(self, role: str) -> int:
        """Computes what the largest forward of a trained role keeps for its backward, and the head's peak."""
        section, shape, each = self._role(role)
        tokens = self.forward_tokens(int(self.config.memory.train_tokens), self.update_rows)
        positions = self.head_positions(tokens)
        checkpointing = bool(section.model.gradient_checkpointing)
        kept = activation_bytes(shape, tokens, self.length, each, checkpointing)
        if shape.head:
            output = output_bytes(each, self.hardware.on_gpu)
            head = head_backward_bytes(shape, positions, each, output, self.block, KEPT)
        else:
            head = 2 * FP32 * shape.hidden * positions
        return kept + head

    def backward(self, role: str) -> int:
        """Computes the peak of the backwards of an optimizer step of a trained role."""
        engine = self.engines[role]
        tokens = self.forward_tokens(int(self.config.memory.train_tokens), self.update_rows)
        accumulated = engine.gradients if self.update_rows * self.length > tokens else 0
        return max(
            engine.gathered + self.graph(role) + engine.bucket + accumulated,
            engine.gradients + engine.bucket + engine.reduction,
        )


class _Estimator(RunMemory):
    """Computes the estimate of a PPO run."""

    def __init__(self, config: Config, models: Models, hardware: Hardware, longest_prompt: int):
        frozen = {} if models.reference is None else {"reference": models.reference}
        super().__init__(
            config,
            hardware,
            {"actor": models.actor} | ({} if models.critic is None else {"critic": models.critic}),
            frozen | dict(models.rewards),
            length=longest_prompt + config.sampling.max_new_tokens,
            rows=(config.algo.minibatch_size or rollout_size(config)) // hardware.ranks,
        )
        self.models, self.prompt = models, longest_prompt
        self.rows = rollout_size(config) // hardware.ranks
        _, shape, each = self._role("actor")
        self.vllm = engine_memory(config, shape, each, self.length, hardware.on_gpu)
        self.sleep = asleep(config, hardware.on_gpu)

    def estimate(self) -> Estimate:
        ranks, on_gpu = self.hardware.ranks, self.hardware.on_gpu
        resident = {role: engine.resident for role, engine in self.engines.items()}
        host = sum(engine.host for engine in self.engines.values()) if on_gpu else 0
        for key, model in self.frozen.items():
            offloaded = model.offloaded and on_gpu
            resident[key] = 0 if offloaded else model.resident(ranks)
            host += model.resident(ranks) if offloaded else 0
        resident |= self.averages()
        if self.config.algo.old_policy == "lagged":
            resident["lagged"] = self.copy_of("actor")
        if self.vllm is not None:
            resident["vllm"] = self.vllm.between(self.sleep)
            host += self.vllm.host(self.sleep) if on_gpu else 0
        rest = sum(resident.values())
        phases = {"loading": self.loading()}
        phases |= {name: rest + more for name, more in self._scoring().items()}
        generation, layerwise, moved = self._generation(rest, phases)
        phases |= {name: rest + more for name, more in self._updates().items()}
        return Estimate(
            resident,
            phases,
            host + moved,
            self.engines,
            generation,
            layerwise,
            moved,
            row_tokens=self.length,
            rows=self.rows,
            vllm=self.vllm,
        )

    # -- scoring -------------------------------------------------------------------------------------------

    def _scoring(self) -> dict[str, int]:
        budget, models = int(self.config.memory.score_tokens), self.models
        tokens = _forward_tokens(budget, self.rows, self.length)
        peaks = {}
        if models.rewards:
            text = _forward_tokens(budget, self.rows, models.reward_length)
            peaks["reward"] = max(
                self._frozen_forward(model, text, models.reward_length) for model in models.rewards.values()
            )
        # DeepSpeed prefetches after a few equal forwards in a row; an update in between resets that count
        prefetch = self.rows * self.length > 2 * tokens
        peaks["old_logprobs"] = self.trained_forward("actor", tokens, prefetch)
        if models.reference is not None:
            peaks["ref_logprobs"] = self._frozen_forward(models.reference, tokens, self.length)
        if models.critic is not None:
            peaks["values"] = self.trained_forward("critic", tokens, prefetch)
        return peaks

    def _frozen_forward(self, model: FrozenModel, tokens: int, length: int) -> int:
        uploaded = model.resident(self.hardware.ranks) if model.offloaded and self.hardware.on_gpu else 0
        gathered = _gathered(model.shape, model.each, prefetch=True) if model.sharded else 0
        return uploaded + gathered + self.forward(model.shape, tokens, length, model.each)

    def head_positions(self, tokens: int) -> int:
        """Counts the response tokens among ``tokens``; the head is applied to those only."""
        return ceil(tokens * self.config.sampling.max_new_tokens / self.length)

    # -- generation ----------------------------------------------------------------------------------------

    def _generation(self, rest: int, phases: dict[str, int]) -> tuple[str, bool, int]:
        """Adds the phases of generation to ``phases``.

        Returns a description of how the weights are held, whether each forward gathers them layer by layer,
        and the bytes of optimizer states that are offloaded to CPU memory during generation.
        """
        if self.vllm is not None:
            return self._engine_generation(self.vllm, rest, phases)
        _, shape, each = self._role("actor")
        zero = self.config.actor.zero
        memory, sharded, weights = self.config.memory, zero.stage == 3, each * shape.parameters
        budget = int(memory.rollout_tokens)
        slots = max(1, min(budget // self.length, fast_batch_size(self.rows)))
        length = -(-self.length // COLUMNS) * COLUMNS
        prompts = min(slots, ceil(self.rows / self.config.rollout.samples_per_prompt))
        sampling = self.config.sampling
        logit = output_bytes(each, self.hardware.on_gpu) + sampling_bytes(sampling.top_k, sampling.top_p)
        decode = static_decode_bytes(
            shape,
            tokens=slots * length,
            length=length,
            rows=slots,
            prefill=min(max(min(budget, PREFILL_TOKENS), self.prompt), prompts * self.prompt),
            waiting=self.rows > slots,
            each=each,
            logit=logit,
        )
        prefill = None if self.config.rollout.backend == "hf" else min(budget, PREFILL_TOKENS)
        tokens = min(budget, self.rows * self.length)
        rows = min(self.rows, max(1, tokens // sampling.max_new_tokens))
        plan, moved = self._plan(
            rest,
            weights=weights if sharded else 0,
            layer=min(weights, each * REUSE) if sharded else 0,
            decoding=decode_bytes_bound(shape, tokens, rows, each, logit, prefill),
        )
        if not sharded:
            gathered, description = 0, "weights whole on each rank"
        elif plan.gather_once:
            gathered, description = weights, "weights gathered once"
            switch = each * min(shape.parameters, GATHER_ELEMENTS + shape.largest_tensor)
            phases["switch"] = rest - moved + weights + switch
        else:
            gathered, description = _gathered(shape, each, prefetch=True), "weights gathered layer by layer"
        layerwise = sharded and not plan.gather_once
        records = not layerwise and self.hardware.on_gpu and self.config.rollout.backend != "hf"
        graphs = KEPT_GRAPHS * GRAPH if records else 0
        packed = 0 if layerwise else packed_bytes(self.config, shape, self.hardware.on_gpu)
        phases["generate"] = rest - moved + gathered + decode + graphs + packed
        description += "; optimizer states offloaded" if plan.offload_states else ""
        return description, layerwise, moved

    def _engine_generation(
        self, engine: VllmMemory, rest: int, phases: dict[str, int]
    ) -> tuple[str, bool, int]:
        """Adds the phases of an engine with own weights to ``phases``; returns the values of _generation.

        The KV cache is allocated after the weights have arrived. ``rest`` contains what the engine keeps
        between two phases.
        """
        _, shape, each = self._role("actor")
        between = engine.between(self.sleep)
        loaded = engine.loading(self.sleep, synced_bytes(shape, each, self.config.actor.zero.stage == 3))
        plan, moved = self._plan(rest, decoding=max(engine.awake, loaded) - between)
        phases["switch"] = rest - moved + loaded - between
        phases["generate"] = rest - moved + engine.awake - between
        group = self.config.rollout.vllm.tensor_parallel
        held = f"vLLM's weights divided among {group} ranks" if group > 1 else "vLLM's weights on each rank"
        asleep = f"; asleep in training, level {self.sleep}" if self.sleep else ""
        return f"{held}{asleep}{'; optimizer states offloaded' if plan.offload_states else ''}", False, moved

    def _plan(
        self, rest: int, *, decoding: int, weights: int = 0, layer: int = 0
    ) -> tuple[GenerationPlan, int]:
        """Plans generation as a run does; also returns the bytes of the states that it offloads."""
        idle = sum(
            engine.masters + engine.moments + (engine.buffers if self._role(role)[0].zero.stage == 3 else 0)
            for role, engine in self.engines.items()
        )
        usable, zero = self.hardware.usable, self.config.actor.zero
        plan = plan_generation(
            MemoryBudget(
                free=2**62 if usable is None else max(0, usable - rest),
                weights=weights,
                layer=layer,
                decoding=decoding,
                offloadable=idle,
            ),
            generation_gather=zero.generation_gather,
            offload_states=zero.offload_states,
            on_gpu=self.hardware.on_gpu,
        )
        return plan, idle if plan.offload_states and self.hardware.on_gpu else 0

    # -- updates -------------------------------------------------------------------------------------------

    def _updates(self) -> dict[str, int]:
        """Computes the peak of each model's update.

        The peak is at one of three moments: the backward of the largest micro-batch begins, the last backward
        ends, or the optimizer steps. Both backwards come before both steps (ppo/learner.py): the gradients of
        one model stay in memory during the backward of the other.

        A graph of the actor that an earlier forward keeps (memory.reuse_forwards) adds nothing: that forward
        is the last before the update, on the only micro-batch, and the actor's backward comes first. A kept
        graph of the critic is in memory during the actor's backward, or the critic's gradients are.
        """
        actor, critic = self.engines["actor"], self.engines.get("critic")
        if critic is None:
            return {"update_actor": max(self.backward("actor"), actor.gradients + actor.step)}
        kept = kept_roles(self.config)
        others = self.graph("critic") if "actor" in kept else critic.gradients
        backward = self.backward("actor") + (others if "critic" in kept else 0)
        return {
            "update_actor": max(backward, actor.gradients + actor.step + critic.gradients),
            "update_critic": max(actor.gradients + self.backward("critic"), critic.gradients + critic.step),
        }


def packed_bytes(config: Config, shape: Shape, on_gpu: bool) -> int:
    """Computes the bytes of the packed weights in generation (models/linear.py), unless it runs by layers."""
    dtype = torch_dtype(config.actor.model.dtype)
    packs = not on_gpu and config.rollout.backend != "hf" and matmul.packs(torch.empty(1, dtype=dtype))
    size = dtype.itemsize * shape.linear
    return size if packs and pays(size, config.sampling.max_new_tokens) else 0


def _forward_tokens(budget: int, rows: int, length: int) -> int:
    """Counts the tokens of the largest forward: whole rows within the budget, at least one row."""
    return length * max(1, min(budget // length, rows))


def _gathered(shape: Shape, each: int, prefetch: bool) -> int:
    """Computes the bytes of the weights that ZeRO-3 holds gathered at the same time in a forward.

    The largest tensor counts twice while it is assembled; with ``prefetch``, the next tensors are gathered
    too.
    """
    return each * min(2 * shape.parameters, (2 * PREFETCH if prefetch else 0) + 2 * shape.largest_tensor)
