"""Estimates the memory of the parts of a run that all stages have, on one rank.

No weights are loaded. model_memory.py computes the memory of a model; this module adds up the parts that are
in memory at the same time. Phases have the names of the trainer's time/* metrics. PPO runs are estimated in
ppo_memory.py, the other stages in finetune_memory.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil

from ppo_ds.compute.linear_logprobs import CPU_BLOCK, GPU_BLOCK, KEPT
from ppo_ds.compute.sizes import Shape
from ppo_ds.config.schema import TextConfig, TrainedConfig, averaged_models, trained_models
from ppo_ds.config.sections.models import FrozenZeroConfig
from ppo_ds.engine.zero import communication_dtype
from ppo_ds.planning.model_memory import (
    BUCKET,
    FP32,
    PREFETCH,
    Engine,
    EngineMemory,
    activation_bytes,
    head_backward_bytes,
    head_forward_bytes,
    inference_activation_bytes,
    output_bytes,
)
from ppo_ds.planning.vllm_memory import VllmMemory

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# Memory of a GPU without tensors. vLLM's pull request 10511 reports 1.79 GiB on one GPU of 80 GB (the CUDA
# context, kernels, workspaces) and 3.58 GiB on two, with NCCL. Not measured with this trainer.
CONTEXT = int(1.8 * 2**30)
# Memory of NCCL for each of two communicators, the run's and DeepSpeed's. According to NCCL's issues 864 and
# 1685, a communicator takes 0.5 to 1.6 GiB, depending on channels and algorithms.
COMMUNICATOR = int(0.9 * 2**30)
COMMUNICATORS = 2
USABLE = 0.95  # share of the rest that tensors can use; fragmentation takes the remainder


@dataclass(frozen=True)
class FrozenModel:
    """A model that only scores."""

    shape: Shape
    each: int  # bytes per weight
    sharded: bool
    offloaded: bool

    @classmethod
    def of(cls, shape: Shape, dtype: str, zero: FrozenZeroConfig) -> FrozenModel:
        return cls(shape, BYTES[dtype], zero.stage == 3, zero.offload_params)

    def resident(self, ranks: int) -> int:
        return ceil(self.shape.weight_bytes(self.each) / (ranks if self.sharded else 1))

    def host(self, ranks: int) -> int:
        """Returns an upper bound of the bytes that this model takes in CPU memory: 0 unless offloaded.

        torch page-locks each tensor of a sharded model, which takes at most twice its size.
        """
        return self.resident(ranks) * (2 if self.sharded else 1) if self.offloaded else 0


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
        """Bytes of a GPU that the CUDA context and NCCL use."""
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
    host: int  # upper bound of the CPU memory for offloading, for runs on GPUs (see Engine.memory)
    engines: dict[str, EngineMemory]
    generation: str  # how the weights are held for decoding
    layerwise: bool = False  # each forward of generation gathers the weights layer by layer
    moved: int = 0  # bytes of optimizer states that are in CPU memory during generation
    row_tokens: int = 0  # tokens of the longest row
    rows: int = 0  # rows that a rank decodes in one phase; 0 without generation
    vllm: VllmMemory | None = None  # memory of the vLLM engine; None with other decode backends

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.phases[phase])


class RunMemory:
    """Computes the memory of the parts that all stages have: engines, loading, forwards and backwards."""

    def __init__(
        self,
        config: TextConfig,
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
            frozen: The models that only score, by role or config key.
            length: Tokens of the longest row.
            rows: Rows of an optimizer step on one rank.
            unit: Rows that must be in the same forward, such as the two of a pair.
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
        engine = Engine(
            stage=zero.stage,
            each=BYTES[dtype],
            communication=BYTES.get(communication, FP32),  # DeepSpeed refuses other names when a run starts
            scaled=dtype == "fp16",
            ranks=self.hardware.ranks,
            moment=1 if role.optim.name == "adamw_8bit" else FP32,
            offload_optimizer=zero.offload_optimizer,
            offload_params=zero.offload_params,
            # DeepSpeed allocates the whole bucket for models of any size: a GPU reserves all of it, a CPU
            # only the pages that are written to
            bucket=bucket if self.hardware.on_gpu else min(bucket, shape.trained),
            separate_host=self.hardware.on_gpu,
        ).memory(shape)
        group = min(int(raw.get("zero_hpz_partition_size", 1)), self.hardware.ranks)
        if zero.stage == 3 and group > 1:  # a second shard, of the copy of the weights in each group of ranks
            copies = BYTES[dtype] * ceil(shape.parameters / group)
            if zero.offload_params and self.hardware.on_gpu:
                return replace(engine, host=engine.host + 2 * copies)  # each tensor is page-locked by torch
            return replace(engine, weights=engine.weights + copies)
        return engine

    def _role(self, role: str) -> tuple[TrainedConfig, Shape, int]:
        """Returns the config of a trained role, its shape and the bytes per weight."""
        section = trained_models(self.config)[role]
        return section, self.shapes[role], BYTES[str(section.model.dtype)]

    def copy_of(self, role: str) -> int:
        """Returns the bytes of a copy of a role's trained weights in fp32."""
        section, shape, _ = self._role(role)
        shards = self.hardware.ranks if section.zero.stage else 1
        return FP32 * ceil(shape.trained / shards)

    def averages(self) -> dict[str, int]:
        """Returns {"ema": bytes of the averaged weights}, or {} if the run has none."""
        for name, role in averaged_models(self.config).items():
            if role.ema.decay is not None:
                return {"ema": self.copy_of(name)}
        return {}

    def head_positions(self, tokens: int) -> int:
        """Counts the positions among ``tokens`` to which the head of a model is applied."""
        return tokens

    def forward_tokens(self, budget: int, rows: int) -> int:
        """Counts the tokens of the largest forward: whole units of rows within the budget, at least one."""
        return forward_tokens(budget, rows // self.unit, self.unit * self.length)

    def loading(self) -> int:
        """Computes the peak while models are loaded one after the other.

        At ZeRO stages 1 and 2, and at stage 0 in 16 bits, an engine copies its trained weights into one flat
        tensor and then frees the originals.
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

    # The peaks below do not include the memory that is resident between phases.

    def trained_forward(self, role: str, tokens: int, prefetch: bool) -> int:
        """Computes the peak bytes of a forward without gradients through the trained model ``role``.

        With ZeRO-3 they include the gathered weights, and with ``prefetch`` also the prefetched ones.
        """
        section, shape, each = self._role(role)
        gathered = gathered_bytes(shape, each, prefetch) if section.zero.stage == 3 else 0
        return gathered + self.forward(shape, tokens, self.length, each)

    def forward(self, shape: Shape, tokens: int, length: int, each: int) -> int:
        """Computes the peak bytes of a forward without gradients of ``tokens`` in rows of ``length``."""
        positions = self.head_positions(tokens)
        head = 0
        if shape.head:
            output = output_bytes(each, self.hardware.on_gpu)
            head = head_forward_bytes(shape, positions, each, output, self.block)
        return max(inference_activation_bytes(shape, tokens, length, each), head)

    def graph(self, role: str) -> int:
        """Computes the bytes that a role's largest forward keeps for its backward, plus the head's peak."""
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
        """Computes the peak of a trained role's memory in the backwards of one optimizer step."""
        engine = self.engines[role]
        tokens = self.forward_tokens(int(self.config.memory.train_tokens), self.update_rows)
        accumulated = engine.gradients if self.update_rows * self.length > tokens else 0
        return max(
            engine.gathered + self.graph(role) + engine.bucket + accumulated,
            engine.gradients + engine.bucket + engine.reduction,
        )


def forward_tokens(budget: int, rows: int, length: int) -> int:
    """Counts the tokens of the largest forward: whole rows within the budget, at least one row."""
    return length * max(1, min(budget // length, rows))


def gathered_bytes(shape: Shape, each: int, prefetch: bool) -> int:
    """Computes the bytes of the weights that ZeRO-3 holds gathered at the same time in a forward.

    The largest tensor counts twice while it is assembled; ``prefetch`` adds the next tensors.
    """
    return each * min(2 * shape.parameters, (2 * PREFETCH if prefetch else 0) + 2 * shape.largest_tensor)
