"""Low-rank adapters on frozen weights (Hu et al. 2021): y = W x + alpha / rank * B A x, through peft.

The layers are wrapped in place, so an adapted model stays what it was for everyone else: ``generate``, the
config, the head. A starts at random and B at zero: a model begins as its base. The base is never written to;
what decodes or is saved elsewhere gets merged copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.helpers import rescale_adapter_scale
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ppo_ds.config.text import show
from ppo_ds.errors import UserError

ADAPTER = "default"  # peft's name for the only one


def add_adapters(
    model: PreTrainedModel, *, rank: int, alpha: float, targets: list[str] | None, seed: int, key: str
) -> None:
    """Freezes ``model`` and adapts the linear layers named by ``targets`` (all of them but the head for
    None); a score head stays trained, whole.

    Under ZeRO-3 the base may be sharded already; the adapters begin whole, with the same values on every
    rank, and the engine shards them. ``key`` is the config section that errors name.
    """
    kind = "CAUSAL_LM" if model.can_generate() else None
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_checked(targets, _linear_layers(model), key),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=model.name_or_path,
        task_type=kind,
    )
    with torch.random.fork_rng(devices=[]):  # A depends on the seed alone, not on what was drawn before it
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    if hasattr(model, "score"):
        model.score.requires_grad_(True)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Full names of the linear layers.

    Heads are left out: a language model's is often tied to its embedding, a critic's is trained whole.
    """
    heads = [id(model.get_output_embeddings()), id(getattr(model, "score", None))]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and id(module) not in heads
    ]


def _checked(targets: list[str] | None, layers: list[str], key: str) -> list[str]:
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    if targets is None:
        return names
    lost = [target for target in targets if not any(f".{layer}".endswith(f".{target}") for layer in layers)]
    if lost or not targets:
        what = f"no linear layer is called {' or '.join(lost)}" if lost else "names no layer"
        raise UserError(
            f"{key}.targets={show(targets)}: {what}; this model has {', '.join(names)} (the head is not adapted); null takes them all"
        )
    return targets


def adapter_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """The adapted layers by name; empty for a model without adapters."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


def adapter_parameters(module: nn.Module) -> list[nn.Parameter]:
    """All A and B."""
    return [matrix for layer in adapter_layers(module).values() for matrix in _matrices(layer)]


def without_adapters(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, the model computes what its base computes, exactly: the adapters' scale is 0.

    Their layers still run: under ZeRO-3 a forward that visits other modules than the last one did throws the
    prefetch plan away, and peft's own switch takes ``requires_grad`` off parameters that belong to a living
    engine.
    """
    return rescale_adapter_scale(module, 0.0)


@dataclass(frozen=True)
class PlainWeight:
    """One parameter of the model as it is without adapters, and what an adapter adds to it."""

    base: nn.Parameter
    layer: LoraLayer | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that ``merged`` reads; under ZeRO-3 they must be gathered."""
        return [self.base, *(_matrices(self.layer) if self.layer else ())]

    def merged(self, device: torch.device) -> Tensor:
        """A new tensor in the dtype of the base."""
        if self.layer is None:
            return self.base.detach().to(device, copy=True)
        return _merged(self.layer, self.base, *_matrices(self.layer)).to(device)


def plain_modules(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """Yields the modules of the model without adapters: base layers in place of adapted layers."""
    seen = set() if seen is None else seen
    module = module.get_base_layer() if isinstance(module, LoraLayer) else module
    if id(module) not in seen:
        seen.add(id(module))
        yield module
        for child in module.children():
            yield from plain_modules(child, seen)


def plain_weights(module: nn.Module) -> list[PlainWeight]:
    """In the order of ``parameters()`` of the model without adapters; a tied one once."""
    adapted = {id(layer.get_base_layer().weight): layer for layer in adapter_layers(module).values()}
    parameters = {id(p): p for plain in plain_modules(module) for p in plain.parameters(recurse=False)}
    return [PlainWeight(parameter, adapted.get(key)) for key, parameter in parameters.items()]


def merged_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of ``model`` -> that of the model without adapters, with what they add in the weights.

    ``state`` stays as it is.
    """
    plain = dict(state)
    for name, layer in adapter_layers(model).items():
        down, up = (plain.pop(f"{name}.{part}.{ADAPTER}.weight") for part in ("lora_A", "lora_B"))
        for key, _ in layer.get_base_layer().named_parameters():
            plain[f"{name}.{key}"] = plain.pop(f"{name}.base_layer.{key}")
        plain[f"{name}.weight"] = _merged(layer, plain[f"{name}.weight"], down, up)
    return plain


def save_adapter(model: nn.Module, directory: Path, state: dict[str, Tensor]) -> None:
    """A folder that ``PeftModel.from_pretrained(base, directory)`` loads; ``state`` is a state dict of
    ``model``.
    """
    config: Any = model.peft_config[ADAPTER]
    directory.mkdir(parents=True, exist_ok=True)
    adapter = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=ADAPTER, save_embedding_layers=False
    )
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)


def _matrices(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """A [rank,in] and B [out,rank]."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


@torch.no_grad()
def _merged(layer: LoraLayer, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """W + alpha / rank * B A, computed in fp32."""
    change = layer.scaling[ADAPTER] * (up.float() @ down.float())
    return (base.float() + (change.T if layer.fan_in_fan_out else change)).to(base.dtype)
