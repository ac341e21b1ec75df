"""The hybrid actor: one set of trained weights that switches between learning and generating.

DeepSpeed's own hybrid engine is not used: it supports no current family and surgery on a live engine's hooks is easy to leave half
done. With ZeRO 0 to 2 the weights are whole on every rank and decoding uses them as they are. With ZeRO-3 they are gathered once per
generation phase into a twin of the model that has no hooks, parameter by parameter; the training engine is never touched, so there is
nothing to repair after an exception, and ranks may decode different numbers of tokens. Adapters (LoRA) run beside their layers with ZeRO
0 to 2 and are merged into the twin with ZeRO-3 (rounded to its dtype: in bf16 log-probs then differ from training's by some thousandths
of a nat); nothing is ever added to the trained model's own weights and taken off again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import deepspeed
import torch
from torch import nn

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
        self._depth = 0

    @property
    def lm(self) -> nn.Module:
        """The causal LM to decode with: whole, in eval mode, on this rank's device. Only inside ``generation_mode()``."""
        assert self._depth > 0, "the actor generates only inside generation_mode()"
        return self.module.lm if self._twin is None else self._twin

    @contextmanager
    def generation_mode(self) -> Iterator[None]:
        """Collective: all ranks enter together. Entered again inside, it changes nothing; left by an exception, it cleans up."""
        self._depth += 1
        try:
            if self._depth == 1:
                self.settle()
                self.module.eval()
                with self._timed("switch"):
                    self._fill_twin()
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                with self._timed("switch"):
                    self._empty_twin()
                self.module.train()

    @torch.no_grad()
    def _fill_twin(self) -> None:
        if self._twin is None:
            return
        batch, elements = [], 0
        for pair in zip(plain_weights(self.module.lm), self._twin.parameters(), strict=True):
            batch.append(pair)
            elements += sum(parameter.ds_numel for parameter in pair[0].parameters)
            if elements >= GATHER_ELEMENTS:
                self._gather(batch)
                batch, elements = [], 0
        self._gather(batch)

    def _gather(self, pairs: list[tuple[PlainWeight, nn.Parameter]]) -> None:
        with deepspeed.zero.GatheredParameters([parameter for sharded, _ in pairs for parameter in sharded.parameters]):
            for sharded, whole in pairs:
                whole.data = sharded.merged(whole.device)

    def _empty_twin(self) -> None:
        if self._twin is not None:
            for parameter in self._twin.parameters():
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
