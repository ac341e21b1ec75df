"""Loads models from a folder or the Hub, without dropout and without missing weights.

Errors name the config key and a remedy. Loading works under ZeRO-3 too (inside ``policy.sharded_loading``),
since no code in this module reads or writes a weight.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from inspect import signature
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    TRANSFORMERS_DYNAMIC_MODULE_NAME,
    cached_file,
)

from ppo_ds.config.sections.models import ModelConfig
from ppo_ds.config.similar_paths import did_you_mean_model
from ppo_ds.errors import UserError
from ppo_ds.models.download import UNREACHABLE, fetch_weights, hub_arguments
from ppo_ds.models.layer_functions import use_fused_functions
from ppo_ds.models.linear import install_linears
from ppo_ds.models.quantized import hide_quantization, nf4_arguments
from ppo_ds.storage.reading import entries_from_elsewhere

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NOT_REACHED = "couldn't connect"  # part of the error message of transformers without a network
# the attention implementations that are built into transformers
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention")
# matches attention_dropout, resid_pdrop, encoder_layerdrop, classifier_dropout_prob, ...
_DROPOUT = re.compile(r"dropout|pdrop|layerdrop")


def torch_dtype(name: str) -> torch.dtype:
    """Returns the torch dtype named bf16, fp16 or fp32; raises UserError for other names."""
    if name not in _DTYPES:
        raise UserError(f"model.dtype={name!r}: must be one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


def load_config(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, key: str = "model.path"
) -> PreTrainedConfig:
    """Loads the Hugging Face config of a local folder or Hub id, and sets every dropout to 0.

    Errors name ``key``, the config key of ``path``.
    """
    path = _checked(path, key)
    if trust_remote_code:
        refuse_code_of_others(path, revision, key)
    with user_errors(path, key, Exception):
        config = AutoConfig.from_pretrained(
            path, trust_remote_code=trust_remote_code, **hub_arguments(path, revision)
        )
    _remove_dropout(config)
    _undo_rope_rewrite(config)
    # The run's config chooses the attention. The entry in the folder's config could refer to code on the Hub.
    config._attn_implementation = None
    return config


def config_of(model: ModelConfig, key: str) -> PreTrainedConfig:
    """Loads the Hugging Face config of a model section; see ``load_config``."""
    return load_config(
        model.path, revision=model.revision, trust_remote_code=model.trust_remote_code, key=key
    )


def refuse_code_of_others(path: str, revision: str | None, key: str) -> None:
    """Raises UserError if a model whose code may run refers to code of another repository.

    transformers would download and run that code, although only the code of this model is trusted. If
    config.json lists other config files for certain versions of transformers, they are checked too, since
    transformers reads one of them.
    """
    names = ["config.json", "tokenizer_config.json"]
    for name in names:
        try:
            file = cached_file(path, name, **hub_arguments(path, revision))
            settings = json.loads(Path(file).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue  # the file is absent, or damaged, which loading the model reports
        others = settings.get("configuration_files") if isinstance(settings, dict) else None
        if isinstance(others, list):  # transformers fails on anything else
            names += [other for other in others if isinstance(other, str) and other not in names]
        for code in _code_references(settings):
            repository, separator, _ = code.rpartition("--")
            if os.path.isabs(code) or (separator and repository != path):
                raise UserError(
                    f"{key}={path}: its {name} runs code of another repository ({repository or code}), for "
                    "which trust_remote_code does not hold; read that code, copy it into the model's folder, "
                    "and correct auto_map"
                )


def refuse_adapter_on_hub(path: str, revision: str | None, key: str) -> None:
    """Raises UserError if a model of the Hub contains an adapter, that is, an adapter_config.json.

    transformers would load the weights of the base model that this file names, and run the base model's code
    if the code of ``path`` may run. The base model may be any repository or a folder of this machine. Local
    folders are not checked: if a folder has a config.json, transformers loads the weights in that folder.
    """
    if os.path.isdir(path):
        return
    try:
        file = cached_file(
            path,
            "adapter_config.json",
            _raise_exceptions_for_missing_entries=False,
            **hub_arguments(path, revision),
        )
    except OSError:
        return  # the Hub cannot be reached; loading the model reports this
    if file is not None:
        raise UserError(
            f"{key}={path}: contains an adapter (adapter_config.json), whose base model would be loaded from "
            "elsewhere; merge the adapter into its base model and give the folder of the merged model"
        )


def _code_references(settings: Any) -> Iterator[str]:
    """Yields the entries of every ``auto_map`` in a model's JSON file, such as ``module.Class``."""
    if isinstance(settings, dict):
        mapped = settings.get("auto_map", {})
        for entry in mapped.values() if isinstance(mapped, dict) else (mapped,):
            yield from (str(code) for code in (entry if isinstance(entry, list) else [entry]))
        settings = list(settings.values())
    for part in settings if isinstance(settings, list) else ():
        yield from _code_references(part)


def from_pretrained(
    auto_class: Any, model: ModelConfig, *, config: PreTrainedConfig, key: str = "model.path"
) -> tuple[nn.Module, dict[str, Any]]:
    """Loads a model; returns it with the loading info of transformers (missing_keys, mismatched_keys, ...).

    The caller must check for missing weights with ``refuse_missing``.
    """
    path, implementation = _checked(model.path, key), attention(model, key)
    refuse_adapter_on_hub(path, model.revision, key)
    fetch_weights(path, model.revision, key)
    quantized: dict[str, Any] = {}
    if model.quantization == "nf4":
        with torch.device("meta"):
            skeleton = auto_class.from_config(copy.deepcopy(config))
        quantized = nf4_arguments(skeleton, torch_dtype(model.dtype))
    # caused by an index of weights with values of wrong types, or by errors in a model's own code
    damaged = () if model.trust_remote_code else (AttributeError, TypeError)
    with user_errors(path, key, *damaged):
        module, info = auto_class.from_pretrained(
            path,
            config=config,
            dtype=torch_dtype(model.dtype),
            trust_remote_code=model.trust_remote_code,
            attn_implementation=implementation,
            ignore_mismatched_sizes=True,  # reported by refuse_missing, with names and shapes
            output_loading_info=True,
            **quantized,
            **hub_arguments(path, model.revision),
        )
    if is_deepspeed_zero3_enabled():
        # Under ZeRO-3 transformers keeps all conversions of its loader, such as LayerNorm.gamma -> weight for
        # old files of BERT. ``save_pretrained`` would undo them, although they did not match any weight.
        module._weight_conversions = [
            conversion
            for conversion in getattr(module, "_weight_conversions", None) or []
            if conversion.was_used()
        ]
    elif _is_own_code(type(module)):
        with user_errors(path, key, Exception):
            _compute_buffers(module)
    if quantized:
        hide_quantization(module)
    install_linears(module)
    use_fused_functions(module)
    return module, info


def recompute_activations(model: nn.Module, section: ModelConfig) -> None:
    """Makes the backward pass recompute activations if ``section`` enables gradient_checkpointing."""
    if section.gradient_checkpointing:
        # with reentrant checkpointing, a block whose input needs no gradient, such as the first one, gets no
        # gradients
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def weight_names(path: str, revision: str | None = None) -> set[str] | None:
    """Returns the names of the weights in a model's local safetensors files; None if none can be read."""
    for name in (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME):
        try:
            file = cached_file(path, name, **hub_arguments(path, revision) | {"local_files_only": True})
            if name == SAFE_WEIGHTS_INDEX_NAME:
                return set(json.loads(Path(file).read_text(encoding="utf-8"))["weight_map"])
            with safe_open(file, framework="pt") as weights:
                return set(weights.keys())
        except (OSError, ValueError, TypeError, KeyError, RecursionError, SafetensorError):
            continue  # the file is absent or damaged; loading the weights reports damage
    return None


def refuse_missing(
    path: str, info: dict[str, Any], *, allowed: Sequence[str] = (), key: str = "model.path"
) -> None:
    """Raises UserError if a weight is missing from the files or has a different shape there.

    transformers initializes such weights at random. The weights in ``allowed`` may be missing.
    """
    missing = sorted(set(info["missing_keys"]) - set(allowed))
    if missing:
        raise UserError(
            f"{key}={path}: weights missing from its files would start at random ({_some(missing)}); "
            "give a complete model"
        )
    mismatched = [
        f"{name} is {list(there)}, not {list(here)}" for name, there, here in sorted(info["mismatched_keys"])
    ]
    if mismatched:
        raise UserError(f"{key}={path}: its files do not fit its config.json: {_some(mismatched)}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _remove_dropout(config: PreTrainedConfig) -> None:
    """Sets every dropout of a config to 0.

    Ratios and value clipping compare the results of two forwards, and dropout would add noise to both.
    """
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):  # text_config, attn_config, ...
            _remove_dropout(value)
        elif _DROPOUT.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, name, type(value)(0))  # some fields take only ints


def _is_own_code(type_: type) -> bool:
    """Returns whether a class comes from the Python code in a model's files."""
    return type_.__module__.startswith(TRANSFORMERS_DYNAMIC_MODULE_NAME)


def _compute_buffers(module: Any) -> None:
    """Computes buffers that are missing from the files of a model with own code, such as RoPE frequencies.

    transformers 5 creates models on the meta device (except under ZeRO-3) and leaves such buffers
    uninitialized, unless the model's code is written for transformers 5 and computes them in
    ``_init_weights``.
    """
    buffers = dict(module.named_non_persistent_buffers())
    if buffers:
        with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
            computed = dict(type(module)(copy.deepcopy(module.config)).named_buffers())
        for name, buffer in buffers.items():
            buffer.copy_(computed[name])


def _undo_rope_rewrite(config: PreTrainedConfig) -> None:
    """Sets ``rope_scaling`` back to None where transformers 5 has replaced a None by a dict without ``type``.

    Only configs whose class is the model's own code are changed, since code written for transformers 4 would
    read ``type`` from the dict. Classes with ``rope_parameters`` are not changed: they expect the dict.
    """
    if not _is_own_code(type(config)):
        return
    own_fields = {field.name for field in fields(config)} | set(signature(type(config).__init__).parameters)
    scaling = vars(config).get("rope_parameters")
    if "rope_parameters" not in own_fields and scaling and set(scaling) <= {"rope_theta", "rope_type"}:
        config.rope_parameters = None


def _checked(path: str, key: str) -> str:
    """Returns the path with ~ expanded.

    Raises UserError unless the path has the form of a Hub id or is a folder without references to files
    elsewhere.
    """
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        refuse_links(path, key)
        refuse_names_of_files_elsewhere(path, key)
        return path
    if os.path.exists(path):
        raise UserError(f"{key}={path}: is a file; give the folder with config.json and the weights")
    if path.startswith((".", os.sep)) or path.count("/") != 1:
        meant = did_you_mean_model(path)
        raise UserError(f"{key}={path}: no such folder, and a Hub id has the form owner/name{meant}")
    return path


def refuse_links(folder: str, key: str) -> None:
    """Raises UserError if a model folder has a pipe, a device, or a link to a file outside the folder.

    The content of a linked file would be saved with the trained model, for example as a chat template.
    """
    for problem in entries_from_elsewhere(Path(folder)):
        raise UserError(f"{key}={folder}: {problem}")


def refuse_names_of_files_elsewhere(folder: str, key: str) -> None:
    """Raises UserError if a JSON file of a model folder contains the path of a file outside the folder.

    The JSON files name weight files, and config and tokenizer files for certain versions of transformers,
    which joins the names to the path of the folder without a check.
    """
    lists = [("config.json", "configuration_files"), ("tokenizer_config.json", "fast_tokenizer_files")]
    indices = Path(folder).rglob("*.index.json")  # config.json can select one in any folder below
    lists += [(str(file.relative_to(folder)), "weight_map") for file in indices]
    for file, entry in lists:
        try:
            listed = json.loads(Path(folder, file).read_text(encoding="utf-8"))[entry]
        except (OSError, ValueError, RecursionError, LookupError, TypeError):
            continue  # the file is absent, or damaged, which loading the model reports
        names = listed.values() if isinstance(listed, dict) else listed if isinstance(listed, list) else ()
        for name in sorted({str(name) for name in names}):
            if os.path.isabs(name) or ".." in Path(name).parts:
                raise UserError(
                    f"{key}={folder}: {entry} in its {file} names a file outside of the folder ({name}); "
                    "copy the file there and correct the name"
                )


def attention(model: ModelConfig, key: str) -> str | None:
    """Returns the attn_implementation of a model section for transformers, with None in place of sdpa.

    With None, transformers uses sdpa, or eager in families without sdpa (DeBERTa), where it rejects an
    explicit sdpa. A name that is not built in raises UserError unless the section sets trust_remote_code,
    because transformers may load code of that name from the Hub.
    """
    name = model.attn_implementation
    if name not in ATTENTION and not model.trust_remote_code:
        section = key.removesuffix("path")
        raise UserError(
            f"{section}attn_implementation={name}: must be one of {', '.join(ATTENTION)}; any other is code "
            f"from the Hub and needs {section}trust_remote_code=true"
        )
    return None if name == "sdpa" else name


def code_arguments(model: ModelConfig, config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the arguments of transformers' from_config for a model that runs its own code.

    With them, the code comes from the revision of the config, and is not requested from the Hub if it is in
    the cache. Returns {} if the model runs no own code or has no revision.
    """
    revision = hub_arguments(model.path, model.revision).get("revision")
    if revision is None or not model.trust_remote_code or not getattr(config, "auto_map", None):
        return {}
    return {"code_revision": revision}


@contextmanager
def user_errors(path: str, key: str, *more: type[Exception]) -> Iterator[None]:
    """Converts exceptions while loading a model into UserErrors with ``key`` and the path.

    transformers raises OSError, ValueError or ImportError for most problems of a folder, a Hub id or its
    code. An invalid config.json can cause other types, such as KeyError. ``more`` are further types
    to convert.
    """
    usual = (OSError, ValueError, ImportError, AssertionError, KeyError, ZeroDivisionError, RecursionError)
    try:
        yield
    except SafetensorError as error:
        raise UserError(f"{key}={path}: its weights are damaged ({error}); get the files anew") from error
    except (UnpicklingError, EOFError, IndexError) as error:
        # raised by torch.load(weights_only=True), which runs no code
        pickled = " or ".join(sorted(file.name for file in Path(path).glob("*.bin"))[:3])
        raise UserError(
            f"{key}={path}: {pickled or 'its pytorch_model.bin'} is damaged, or holds more than tensors, and "
            "could run code when it is read (none was run); get the model with weights in .safetensors files"
        ) from error
    except usual + more as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
        if "trust_remote_code" in reason:
            switch = key.removesuffix("path") + "trust_remote_code"
            reason = f"needs Python code from its own files; read that code, then set {switch}=true"
        elif NOT_REACHED in reason:
            reason = UNREACHABLE + did_you_mean_model(path)
        raise UserError(f"{key}={path}: {' '.join(reason.split())[:400]}") from error
