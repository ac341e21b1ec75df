"""Low-rank adapters on frozen weights (Hu et al. 2021): y = W x + alpha / rank * B A x, through peft.

The layers are wrapped in place, so that ``generate``, the config and the head of an adapted model work as
before. A is initialized at random and B with zeros, so that an adapted model initially computes the same as
its base model. The base weights are never changed; inference copies and saved models contain merged weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from ppo_ds.config.text import show
from ppo_ds.errors import UserError
from ppo_ds.models.loading import refuse_links
from ppo_ds.models.quantized import is_quantized, plain_weight, whole_shape

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"  # peft's name of a model's only adapter


def add_adapters(
    model: PreTrainedModel, *, rank: int, alpha: float, targets: list[str] | None, seed: int, key: str
) -> None:
    """Freezes ``model`` and adds adapters to the linear layers named in ``targets`` (None: to all).

    Heads are never adapted. The head of a language model is often tied to its embedding, and a score head is
    trained in full. Under ZeRO-3 the base may already be sharded. The adapters are created unsharded, with
    the same values on every rank, and the engine shards them. Errors name ``key``, the section in the config.
    """
    from peft import LoraConfig, inject_adapter_in_model

    kind = "CAUSAL_LM" if model.can_generate() else None
    trunk = {id(module) for module in model.base_model.modules()} | {id(model)}
    head = [] if kind else [pair for pair in model.named_modules() if id(pair[1]) not in trunk]
    heads = [id(model.get_output_embeddings()), *(id(module) for _, module in head)]
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and id(module) not in heads
    ]
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=_target_names(targets, layers, key),
        exclude_modules=[name for name, _ in head] or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=model.name_or_path,
        task_type=kind,
    )
    with torch.random.fork_rng(devices=[]):  # A depends only on the seed, not on earlier draws
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)
    for layer in adapter_layers(model).values():
        if is_quantized(layer.get_base_layer().weight):  # peft gives adapters the dtype of other weights
            layer.to(model.dtype)
    for _, module in head:
        module.requires_grad_(True)


def _target_names(targets: list[str] | None, layers: list[str], key: str) -> list[str]:
    """Returns the names of the layers to adapt; raises UserError for an empty list or an unknown name."""
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    if targets is None:
        return names
    lost = [target for target in targets if not any(f".{layer}".endswith(f".{target}") for layer in layers)]
    if lost or not targets:
        what = f"no linear layer is called {' or '.join(lost)}" if lost else "names no layer"
        raise UserError(
            f"{key}.targets={show(targets)}: {what}; this model has {', '.join(names)} "
            "(the head is not adapted); null takes them all"
        )
    return targets


def is_adapted(module: nn.Module) -> TypeGuard[LoraLayer]:
    """Returns whether ``module`` is a LoraLayer of peft; does not import peft, which takes a second."""
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict)


def adapter_layers(module: nn.Module) -> dict[str, LoraLayer]:
    """Returns the adapted layers by name; empty for a model without adapters."""
    return {name: layer for name, layer in module.named_modules() if is_adapted(layer)}


def adapter_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters A and B of all adapters."""
    return [matrix for layer in adapter_layers(module).values() for matrix in _matrices(layer)]


def without_adapters(module: nn.Module) -> AbstractContextManager[None]:
    """Sets the adapters' scale to 0 inside the block, so that the model computes exactly as its base does.

    The adapter layers still run. If they were skipped, ZeRO-3 would discard its prefetch plan, which expects
    the modules of the last forward. Disabling them by peft would change their ``requires_grad``.
    """
    from peft.helpers import rescale_adapter_scale

    return rescale_adapter_scale(module, 0.0)


@dataclass(frozen=True)
class PlainWeight:
    """Parameter of the model without adapters, and the adapted layer that it belongs to, if any."""

    name: str  # in the model without adapters
    base: nn.Parameter
    layer: LoraLayer | None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that ``merged`` reads; under ZeRO-3 they must be gathered."""
        return [self.base, *(_matrices(self.layer) if self.layer else ())]

    def merged(self, device: torch.device, merge: bool = True) -> Tensor:
        """Returns a copy of the weight on ``device``, in its dtype; ``merge`` merges any adapter into it."""
        if self.layer is None or not merge:
            return plain_weight(self.base).detach().to(device, copy=True)
        return _merged(self.layer, plain_weight(self.base), *_matrices(self.layer)).to(device)


def plain_modules(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    """Yields the modules of the model without adapters: base layers in place of adapted layers."""
    seen = set() if seen is None else seen
    module = module.get_base_layer() if is_adapted(module) else module
    if id(module) not in seen:
        seen.add(id(module))
        yield module
        for child in module.children():
            yield from plain_modules(child, seen)


def plain_weights(module: nn.Module) -> list[PlainWeight]:
    """Returns the parameters of the model without adapters in the order of ``parameters()``."""
    adapted = {id(layer.get_base_layer().weight): layer for layer in adapter_layers(module).values()}
    names = {id(p): name.replace(".base_layer.", ".") for name, p in module.named_parameters()}
    parameters = {id(p): p for plain in plain_modules(module) for p in plain.parameters(recurse=False)}
    return [PlainWeight(names[key], parameter, adapted.get(key)) for key, parameter in parameters.items()]


def merged_state(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts a state dict of ``model`` to that of the model without adapters by merging the adapters.

    ``state`` is changed in place and returned, so that each base weight is freed once its merged copy exists:
    for a 70B model, two copies of all weights take 280 GB.
    """
    for name, layer in adapter_layers(model).items():
        down, up = (state.pop(f"{name}.{part}.{ADAPTER}.weight") for part in ("lora_A", "lora_B"))
        for key, _ in layer.get_base_layer().named_parameters():
            state[f"{name}.{key}"] = state.pop(f"{name}.base_layer.{key}")
        state[f"{name}.weight"] = _merged(layer, state[f"{name}.weight"], down, up)
    return state


def merge_saved_adapter(model: PreTrainedModel, directory: Path, key: str) -> None:
    """Merges the LoRA adapter in ``directory`` into the weights of ``model``, the adapter's base model.

    The result is the same as that of ``merged_state``. Raises UserError with ``key`` for other kinds of
    adapters and for an adapter of another model.
    """
    from peft import PeftConfig, PeftType, inject_adapter_in_model, set_peft_model_state_dict

    refuse_links(str(directory), key)
    try:
        config: Any = PeftConfig.from_pretrained(str(directory))
        state = load_file(directory / "adapter_model.safetensors")
    except Exception as error:  # peft raises any exception for values of wrong types
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{key}={directory}: its adapter cannot be read ({reason})") from error
    extras = ("use_dora", "modules_to_save", "lora_bias", "layer_replication", "trainable_token_indices")
    special = [name for name in extras if getattr(config, name, None)]
    is_lora = config.peft_type == PeftType.LORA
    if not is_lora or special or config.bias != "none":
        kind = f"LoRA with {', '.join(special) or 'bias'}" if is_lora else "not LoRA"
        remedy = "merge it with peft's merge_and_unload, and give the folder of the merged model"
        raise UserError(f"{key}={directory}: its adapter is {kind}; {remedy}")
    try:
        inject_adapter_in_model(config, model, ADAPTER)
        plain_names = {name.removeprefix("base_model.model."): tensor for name, tensor in state.items()}
        found = set_peft_model_state_dict(model, plain_names, ADAPTER)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{key}={directory}: its adapter does not fit {model.name_or_path} ({reason})"
        ) from error
    lost = [name for name in found.missing_keys if ".lora_" in name] + list(found.unexpected_keys)
    if lost:
        raise UserError(
            f"{key}={directory}: its adapter does not fit {model.name_or_path} ({len(lost)} weights without "
            f"a counterpart, such as {lost[0]})"
        )
    for name, layer in adapter_layers(model).items():
        base = layer.get_base_layer()
        base.weight.data = _merged(layer, base.weight, *_matrices(layer))
        model.set_submodule(name, base)
    del model.peft_config


def save_adapter(model: nn.Module, directory: Path, state: dict[str, Tensor]) -> None:
    """Writes the adapter in ``state``, a state dict of ``model``, for ``PeftModel.from_pretrained``."""
    from peft import get_peft_model_state_dict

    config: Any = model.peft_config[ADAPTER]
    adapter = get_peft_model_state_dict(
        model, state_dict=state, adapter_name=ADAPTER, save_embedding_layers=False
    )
    tensors = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.items()}
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(directory)


def _matrices(layer: LoraLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """Returns A [rank,in] and B [out,rank]."""
    return layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight


@torch.no_grad()
def _merged(layer: LoraLayer, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """Computes W + alpha / rank * B A in fp32, cast to W's dtype; W, B, A are ``base``, ``up``, ``down``."""
    left, right = (down.T, up.T) if layer.fan_in_fan_out else (up, down)
    merged = base.to(torch.float32, copy=True)  # the only matrix of this size: one of a 70B model has 0.9 GiB
    return merged.addmm_(left.float(), right.float(), alpha=layer.scaling[ADAPTER]).to(base.dtype)


def checkpoint_tensors(lm: PreTrainedModel, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields weights of ``lm`` with the names and the layout that ``lm.save_pretrained`` writes.

    For each decoder layer, ``tensors`` must contain all weights or none.
    """
    yield from revert_weight_conversion(lm, tensors).items()


def checkpoint_names(lm: PreTrainedModel) -> set[str]:
    """Returns the names that ``checkpoint_tensors`` yields for all weights of ``lm`` without adapters."""
    shapes = {weight.name: whole_shape(weight.base) for weight in plain_weights(lm)}
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return {name for name, _ in checkpoint_tensors(lm, tensors)}


def tied_names(lm: PreTrainedModel) -> dict[str, list[str]]:
    """Maps the first name of each tied weight of ``lm``, such as a tied head, to the weight's other names."""
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            others.setdefault(first[id(parameter)], []).append(name)
    return others
