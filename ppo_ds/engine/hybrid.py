"""Hybrid actor: one set of trained weights that switches between training and generation.

DeepSpeed's own hybrid engine is not used. It supports no current model family, and it modifies the hooks of a
live engine, which an exception can leave half modified. With ZeRO 0 to 2, every rank has all weights and uses
them directly for decoding. With ZeRO-3 there are two modes (actor.zero.generation_gather):

- whole: the weights are gathered once per generation phase, in chunks, into an inference copy of the model
  without hooks. The training engine is not modified, so that an exception leaves nothing to repair, and
  ranks may decode different numbers of tokens. LoRA adapters are merged into the copy, whose weights are
  rounded to its dtype: in bf16, its log-probs differ from the training log-probs by a few thousandths of a
  nat. Adapters are never merged into the trained model's own weights. The copy is freed for training, where
  the free memory determines the size of micro-batches. The addresses of the copy therefore change with every
  phase.
- layers: the sharded model itself decodes, and each forward gathers one layer after the other
  (engine/layerwise_generation.py). This is for models that do not fit on one device. All ranks must then run
  the same number of forwards (lockstep).

An inference engine with separate weights (rollout.backend=vllm) needs neither mode. It receives all weights
at each switch to generation, one or more decoder layers at a time, for every ZeRO stage. If it can decode
with LoRA adapters, it receives only the adapters instead; it receives the base weights at the first switch,
and again only after it has freed them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from ppo_ds.engine.gather import GATHER_ELEMENTS, chunked
from ppo_ds.engine.layerwise_generation import layer_by_layer
from ppo_ds.engine.memory_budget import GIB, MemoryBudget, describe_plan, free_bytes, plan_generation
from ppo_ds.engine.optimizer_offload import OptimizerOffload
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.models.lora import PlainWeight, checkpoint_tensors, plain_weights
from ppo_ds.models.quantized import whole_numel

# A context in which an inference engine generates with the given weights, named as in a checkpoint. A second
# iterator yields adapters, named as in the causal LM; the weights are then those of the base.
Engine = Callable[..., AbstractContextManager[None]]


class HybridActor(TrainedModel):
    """Adds a generation mode to a TrainedModel whose module is a policy (``module.lm`` is the causal LM)."""

    def __init__(
        self,
        module: nn.Module,
        *,
        make_inference_copy: Callable[[nn.Module, torch.device], nn.Module] | None,
        timer: Callable[[str], AbstractContextManager[None]],
        gather_elements: int = GATHER_ELEMENTS,
        **engine: Any,
    ):
        """Wraps ``module`` in an engine and, with ZeRO-3, creates the inference copy.

        ``make_inference_copy`` returns an unsharded causal LM without weights. If it is None, an inference
        engine with separate weights generates; the caller passes this engine to ``connect``. The context
        ``timer("switch")`` measures each switch. Weights are gathered in chunks of ``gather_elements``.
        """
        super().__init__(module, **engine)
        self._timer = timer
        self._gather_elements = gather_elements
        self._copy: nn.Module | None = None
        if make_inference_copy is not None and self.zero_stage == 3:
            self._copy = make_inference_copy(self.module.lm, self.world.device)
        self._has_engine = make_inference_copy is None
        self._engine: Engine | None = None
        self._sends_adapters = False
        self._offloads: list[OptimizerOffload] = []  # one per model with states offloaded in generation
        self._switched_bytes = 0
        self._depth = 0

    def plan_generation(
        self, *, generation_gather: str, offload_states: str, decoding_bytes: int, critic: TrainedModel | None
    ) -> str:
        """Chooses how weights are gathered and whether optimizer states are offloaded during generation.

        All ranks must call this once all models are in memory. Until then, weights are gathered whole and
        nothing is offloaded. ``generation_gather`` and ``offload_states`` are the settings of actor.zero.
        ``decoding_bytes`` is the memory that decoding needs in addition to the actor's weights: KV cache,
        activations and an inference engine's own weights. If states are offloaded, those of ``critic`` are
        too. Returns a line for the banner.
        """
        offloads = [OptimizerOffload(model) for model in (self, critic) if model is not None]
        future = sum(offload.future_bytes for offload in offloads)
        sharded = self.zero_stage == 3 and not self._has_engine
        weights = self._weight_bytes if sharded else 0
        layer = 0
        if sharded:
            # during a forward, ZeRO-3 keeps at most this many bytes of gathered weights
            live = self.engine.zero_max_live_parameters() * next(self.module.lm.parameters()).element_size()
            layer = min(weights, live)
        budget = MemoryBudget(
            free=-self.world.max_int(-(free_bytes(self.world) - future)),
            weights=weights,
            layer=layer,
            decoding=decoding_bytes,
            offloadable=-self.world.max_int(-(sum(offload.bytes for offload in offloads) + future)),
        )
        plan = plan_generation(
            budget,
            generation_gather=generation_gather,
            offload_states=offload_states,
            on_gpu=self.world.device.type == "cuda",
        )
        if not plan.gather_once:
            self._copy = None
        self._offloads = offloads if plan.offload_states else []
        return describe_plan(budget, plan, sharded=sharded)

    @property
    def lockstep(self) -> bool:
        """True if all ranks must run the same number of forwards of ``lm`` (ZeRO-3 by layers)."""
        return self.zero_stage == 3 and self._copy is None and not self._has_engine

    @property
    def lockstep_max(self) -> Callable[[int], int] | None:
        """With ``lockstep``, a collective that returns a number's maximum over all ranks. Otherwise None."""
        return (lambda number: self.world.max_int(int(number))) if self.lockstep else None

    @property
    def lm(self) -> nn.Module:
        """The causal LM for decoding; its weights are whole unless ``lockstep``.

        Available only inside ``generation_mode()``.
        """
        assert self._depth > 0, "the actor generates only inside generation_mode()"
        return self.module.lm if self._copy is None else self._copy

    def connect(self, engine: Engine, *, adapters: bool = False) -> None:
        """Makes ``engine`` generate: ``generation_mode`` enters the context ``engine(self.weights())``.

        With ``adapters``, the context is ``engine(self.weights(merge=False), self.adapters())`` instead, and
        the engine need not read the weights. On leaving the context, the engine should free its memory for
        training.
        """
        assert self._has_engine and self._depth == 0
        self._engine, self._sends_adapters = engine, adapters

    @torch.no_grad()
    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and value of each adapter matrix; with ZeRO-3 every rank must read all of them."""
        matrices = [item for item in self.module.lm.named_parameters() if item[1].requires_grad]
        for chunk in chunked(matrices, lambda item: whole_numel(item[1]), self._gather_elements):
            sharded = [parameter for _, parameter in chunk]
            with deepspeed.zero.GatheredParameters(sharded, enabled=self.zero_stage == 3):
                tensors = {name: parameter.detach().clone() for name, parameter in chunk}
            self._switched_bytes += sum(tensor.nbytes for tensor in tensors.values())
            yield from tensors.items()

    @torch.no_grad()
    def weights(self, *, merge: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yields the name and value of each weight of the causal LM, as an export would write them.

        Adapters are merged unless ``merge`` is False, and tied weights are yielded once. Only one chunk is in
        memory besides the model: as many decoder layers as reach ``gather_elements``. With ZeRO-3 every rank
        must read all weights.
        """
        layers = by_layer(plain_weights(self.module.lm))

        def numel(layer: list[PlainWeight]) -> int:
            return sum(whole_numel(parameter) for source in layer for parameter in source.parameters)

        for chunk in chunked(layers, numel, self._gather_elements):
            sources = [source for layer in chunk for source in layer]
            parameters = [parameter for source in sources for parameter in source.parameters]
            with deepspeed.zero.GatheredParameters(parameters, enabled=self.zero_stage == 3):
                tensors = {source.name: source.merged(self.world.device, merge) for source in sources}
            self._switched_bytes += sum(tensor.nbytes for tensor in tensors.values())
            yield from checkpoint_tensors(self.module.lm, tensors)
            del tensors  # before the next layer is gathered and merged

    @contextmanager
    def generation_mode(self) -> Iterator[None]:
        """Switches to generation for the duration of the block. All ranks must call this.

        A nested block has no effect. The actor switches back to training after an exception, too.
        """
        self._depth += 1
        try:
            with self._switched() if self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1

    def take_switched_gb(self) -> float:
        """Returns the GiB that this rank has gathered, or moved to and from the CPU, since the last call.

        If weights are gathered layer by layer, each forward counts as the size of all weights.
        """
        taken, self._switched_bytes = self._switched_bytes, 0
        return taken / GIB

    @contextmanager
    def _switched(self) -> Iterator[None]:
        """Implements ``generation_mode`` for a block that is not nested."""
        self.restore_weights()
        self.module.eval()
        switch = ExitStack()

        def switch_back() -> None:
            with self._timer("switch"):
                switch.close()

        with ExitStack() as cleanup:
            cleanup.callback(self.module.train)
            cleanup.callback(switch_back)
            with self._timer("switch"):
                for offload in self._offloads:
                    self._switched_bytes += 2 * switch.enter_context(offload.offloaded())
                if self.lockstep:
                    offload = self.engine.optimizer.parameter_offload
                    switch.enter_context(layer_by_layer(offload, self.module.lm, self._count_weights))
                elif self._copy is not None:
                    switch.enter_context(self._filled(self._copy))
                elif self._engine is not None:
                    adapters = (self.adapters(),) if self._sends_adapters else ()
                    switch.enter_context(self._engine(self.weights(merge=not adapters), *adapters))
            yield

    @property
    def _weight_bytes(self) -> int:
        return sum(whole_numel(p) * p.element_size() for p in self.module.lm.parameters())

    def _count_weights(self) -> None:
        self._switched_bytes += self._weight_bytes

    @contextmanager
    def _filled(self, copy: nn.Module) -> Iterator[None]:
        """Fills the inference copy with the gathered weights and frees them afterwards."""
        try:
            self._count_weights()
            pairs = zip(plain_weights(self.module.lm), copy.parameters(), strict=True)
            for chunk in chunked(
                pairs, lambda pair: sum(map(whole_numel, pair[0].parameters)), self._gather_elements
            ):
                sharded = [parameter for source, _ in chunk for parameter in source.parameters]
                with torch.no_grad(), deepspeed.zero.GatheredParameters(sharded):
                    for source, target in chunk:
                        target.data = source.merged(target.device)
            yield
        finally:
            for parameter in copy.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)


def by_layer(weights: list[PlainWeight]) -> list[list[PlainWeight]]:
    """Groups weights by decoder layer (first number in the name); others are groups of one weight each."""
    groups: dict[str, list[PlainWeight]] = {}
    for weight in weights:
        layer = re.match(r"(?:.*?\.)?\d+\.", weight.name)
        groups.setdefault(layer[0] if layer else weight.name, []).append(weight)
    return list(groups.values())
