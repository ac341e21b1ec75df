"""The hybrid actor: one set of trained weights that switches between learning and generating.

DeepSpeed's own hybrid engine is not used: it supports no current family and surgery on a live engine's hooks is easy to leave half
done. With ZeRO 0 to 2 the weights are whole on every rank and decoding uses them as they are. With ZeRO-3 there are two ways
(actor.zero.generation_gather):

- whole: gathered once per generation phase into a twin of the model that has no hooks, parameter by parameter; the training engine is never
  touched, so there is nothing to repair after an exception, and ranks may decode different numbers of tokens. Adapters (LoRA), which run beside
  their layers elsewhere, are merged into the twin (rounded to its dtype: in bf16 log-probs then differ from training's by some thousandths of
  a nat); nothing is ever added to the trained model's own weights and taken off again. The twin's memory is given back for training: what
  is left of it decides the size of micro-batches, while a phase takes one gather anyway. Its addresses change with every phase.
- layers: decoding with the sharded model itself, each layer gathered in each forward (engine/layerwise_generation.py), for models that no device holds
  whole. Ranks run forwards in step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import deepspeed
import torch
from torch import nn

from ppo_ds.engine.layerwise_generation import layer_by_layer
from ppo_ds.engine.memory_budget import GIB, MemoryBudget, choose, explain, free_bytes
from ppo_ds.engine.optimizer_offload import OptimizerOffload
from ppo_ds.engine.trained import TrainedModel
from ppo_ds.models.lora import PlainWeight, plain_weights

GATHER_ELEMENTS = 100_000_000  # per collective: enough to keep the links busy, little beside the model


class HybridActor(TrainedModel):
    """A TrainedModel around a policy (``module.lm`` is the causal LM) with a generation mode."""

    def __init__(
        self,
        module: nn.Module,
        *,
        twin: Callable[[nn.Module, torch.device], nn.Module],
        timed: Callable[[str], AbstractContextManager[None]],
        **engine: Any,
    ):
        """``twin`` makes an unsharded, empty copy of the causal LM; it is called once, and only with ZeRO-3.

        ``timed("switch")`` is entered around the work of each switch.
        """
        super().__init__(module, **engine)
        self._timed = timed
        self._twin = twin(self.module.lm, self.world.device) if self.zero_stage == 3 else None
        self._idle: list[OptimizerOffload] = []  # of the models whose optimizer states make way
        self._switched_bytes = 0
        self._depth = 0

    def plan_generation(
        self, *, generate: str, offload_states: str, decoding_bytes: int, critic: TrainedModel | None
    ) -> str:
        """Collective: choose between the ways above, and whether optimizer states make way, once all models are in memory.

        Without it weights are gathered whole and nothing moves. ``generate``, ``offload_states``: as in actor.zero. ``decoding_bytes``: of cache and
        activations. Returns the arithmetic in one line.
        """
        states = [OptimizerOffload(model) for model in (self, critic) if model is not None]
        free = free_bytes(self.world) - sum(s.bytes_to_come for s in states)
        sharded = self.zero_stage == 3
        room = MemoryBudget(
            free=-self.world.max_int(-free),
            weights=self._weight_bytes if sharded else 0,
            layer=min(self._weight_bytes, self._live_bytes) if sharded else 0,
            decoding=decoding_bytes,
            idle=-self.world.max_int(-sum(s.bytes + s.bytes_to_come for s in states)),
        )
        choice = choose(
            room, generate=generate, offload_states=offload_states, on_gpu=self.world.device.type == "cuda"
        )
        if not choice.whole:
            self._twin = None
        self._idle = states if choice.states_away else []
        return explain(room, choice, sharded=sharded)

    @property
    def in_step(self) -> bool:
        """Whether every rank must run the same number of forwards of ``lm``, dummies if need be: with ZeRO-3, layer by layer."""
        return self.zero_stage == 3 and self._twin is None

    @property
    def agree(self) -> Callable[[int], int] | None:
        """The largest of the ranks' numbers (a collective), for a decode backend that must run ``in_step``; None where ranks decode by themselves."""
        return (lambda number: self.world.max_int(int(number))) if self.in_step else None

    @property
    def lm(self) -> nn.Module:
        """The causal LM to decode with: in eval mode, on this rank's device, whole unless ``in_step``. Only inside ``generation_mode()``."""
        assert self._depth > 0, "the actor generates only inside generation_mode()"
        return self.module.lm if self._twin is None else self._twin

    @contextmanager
    def generation_mode(self) -> Iterator[None]:
        """Collective: all ranks enter together. Entered again inside, it changes nothing; left by an exception, it cleans up."""
        self._depth += 1
        try:
            with self._switched() if self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1

    def take_switched_gb(self) -> float:
        """GB that this rank gathered, and moved to the CPU and back, since the last call; layer by layer in every forward."""
        taken, self._switched_bytes = self._switched_bytes, 0
        return taken / GIB

    @contextmanager
    def _switched(self) -> Iterator[None]:
        self.settle()
        self.module.eval()
        with ExitStack() as after:
            after.callback(self.module.train)
            after.callback(self._switch_back, switch := ExitStack())
            with self._timed("switch"):
                for states in self._idle:
                    self._switched_bytes += 2 * switch.enter_context(states.offloaded())
                switch.enter_context(self._decodable())
            yield

    def _switch_back(self, switch: ExitStack) -> None:
        with self._timed("switch"):
            switch.close()

    def _decodable(self) -> AbstractContextManager[None]:
        if self.in_step:
            return layer_by_layer(self.engine, self.module.lm, self._count_weights)
        return self._filled_twin()

    @contextmanager
    def _filled_twin(self) -> Iterator[None]:
        try:
            self._fill_twin()
            yield
        finally:
            self._empty_twin()

    @property
    def _weight_bytes(self) -> int:
        return sum(parameter.ds_numel * parameter.element_size() for parameter in self.module.lm.parameters())

    @property
    def _live_bytes(self) -> int:
        """Of what ZeRO-3 keeps gathered at once in a forward, where the model has more."""
        return self.engine.zero_max_live_parameters() * next(self.module.lm.parameters()).element_size()

    def _count_weights(self) -> None:
        self._switched_bytes += self._weight_bytes

    @torch.no_grad()
    def _fill_twin(self) -> None:
        if self._twin is None:
            return
        self._count_weights()
        batch, elements = [], 0
        for pair in zip(plain_weights(self.module.lm), self._twin.parameters(), strict=True):
            batch.append(pair)
            elements += sum(parameter.ds_numel for parameter in pair[0].parameters)
            if elements >= GATHER_ELEMENTS:
                self._gather(batch)
                batch, elements = [], 0
        self._gather(batch)

    def _gather(self, pairs: list[tuple[PlainWeight, nn.Parameter]]) -> None:
        with deepspeed.zero.GatheredParameters(
            [parameter for sharded, _ in pairs for parameter in sharded.parameters]
        ):
            for sharded, whole in pairs:
                whole.data = sharded.merged(whole.device)

    def _empty_twin(self) -> None:
        if self._twin is not None:
            for parameter in self._twin.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
