"""LoRA adapters in an engine of vLLM, which adds them to a base that is never changed.

vLLM reads an adapter from a folder, here a temporary folder of each rank, and keeps a copy under a number.
The calls follow the code of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ppo_ds.errors import single_line
from ppo_ds.models.lora import ADAPTER, save_adapter
from ppo_ds.models.quantized import whole_shape
from ppo_ds.rollout.vllm_support import ADAPTER_RANKS, slot_rank


def adapter_problem(lm: PreTrainedModel) -> str | None:
    """Returns why vLLM cannot decode ``lm`` with adapters, or None if no reason is known before the start."""
    from vllm.model_executor.models import ModelRegistry, supports_lora

    rank, name = lm.peft_config[ADAPTER].r, type(lm).__name__
    if slot_rank(rank) is None:
        return f"actor.lora.rank={rank} is above vLLM's limit, {ADAPTER_RANKS[-1]}"
    known = ModelRegistry.models.get(name)
    if known is None or not supports_lora(known.load_model_cls()):
        return f"vLLM has no adapters for {name}"
    return None


class AdapterSlot:
    """The adapters of an actor in an engine."""

    def __init__(self, llm: Any, lm: PreTrainedModel):
        self._llm, self._lm = llm, lm
        self._number = 0
        self.request: Any = None  # selects the adapters in a request

    def replace(self, state: Mapping[str, Tensor]) -> None:
        """Loads new adapters, named as in the model, into the engine and removes the earlier adapters."""
        from vllm.lora.request import LoRARequest

        if self.request is not None:
            self._llm.llm_engine.remove_lora(self._number)
        self._number += 1
        with TemporaryDirectory(prefix="ppo_ds_adapter_") as folder:
            save_adapter(self._lm, Path(folder), dict(state))
            # vLLM finds cached keys and values by the name
            self.request = LoRARequest(f"step {self._number}", self._number, folder)
            if not self._llm.llm_engine.add_lora(self.request):
                raise RuntimeError("vLLM did not accept new LoRA adapters")

    def try_zeros(self) -> str | None:
        """Loads adapters of zeros; returns why vLLM does not apply all adapters of the model, or None."""
        trained = [(name, p) for name, p in self._lm.named_parameters() if p.requires_grad]
        try:
            self.replace({name: torch.zeros(*whole_shape(p)) for name, p in trained})
        except ValueError as error:  # layers whose names vLLM does not know
            return single_line(str(error))
        ignored = self._llm.collective_rpc(ignored_layers, args=(self._number,))[0]
        return f"it would ignore those of {ignored[0]} ({len(ignored)} layers)" if ignored else None


def ignored_layers(worker: Any, number: int) -> list[str]:
    """Returns the layers of an adapter that a worker of vLLM does not find in its model."""
    manager = worker.get_model().lora_manager
    return sorted(set(manager.get_adapter(number).loras) - set(manager.modules))
